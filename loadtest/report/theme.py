"""Colours of the pictures. In a page they are variables, for one drawing that reads on white and on black.

The series are those of Okabe and Ito, which the colour-blind can tell apart, lightened for a dark page.
"""

from __future__ import annotations

from dataclasses import dataclass

LIGHT = {
    "ink": "#1b1f24", "faint": "#5b6472", "grid": "#d5d9e0", "back": "#ffffff", "alarm": "#b3261e",
    "band": "#8a93a3",
    "series1": "#0072b2", "series2": "#c25400", "series3": "#00805c", "series4": "#a8558a",
    "series5": "#7a5c00",
    "rate1": "#440154", "rate2": "#46327e", "rate3": "#365c8d", "rate4": "#277f8e", "rate5": "#1a8f74",
    "rate6": "#5a9a1f", "rate7": "#b07800", "rate8": "#c8501c",
}  # fmt: skip
DARK = {
    "ink": "#e4e6ea", "faint": "#a3abb8", "grid": "#3a404a", "back": "#16181c", "alarm": "#ff8a80",
    "band": "#8a93a3",
    "series1": "#56b4e9", "series2": "#ff9d4d", "series3": "#3fd3a5", "series4": "#e6a3cb",
    "series5": "#f0d24a",
    "rate1": "#b28ae6", "rate2": "#8f9bf5", "rate3": "#6bb1f0", "rate4": "#4fcbd6", "rate5": "#4fd8a6",
    "rate6": "#a5dd55", "rate7": "#f5cf4d", "rate8": "#ff9a66",
}  # fmt: skip
NUM_SERIES, NUM_RATES = 5, 8

# Stand-ins that nothing else is drawn in; the page puts `var(--name)` in their place.
_STAND_INS = {name: f"#01fe{number:02x}" for number, name in enumerate(LIGHT)}


@dataclass(frozen=True, slots=True)
class Theme:
    """Colour by name."""

    colours: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.colours[name]

    def series(self, number: int) -> str:
        return self.colours[f"series{number % NUM_SERIES + 1}"]

    def rate(self, place: int, num_rates: int) -> str:
        """From the lowest to the highest, spread over all there are."""
        spread = 0 if num_rates < 2 else round(place * (NUM_RATES - 1) / (num_rates - 1))
        return self.colours[f"rate{spread + 1}"]


PRINTED = Theme(LIGHT)
PAGE = Theme(_STAND_INS)


def style_variables() -> str:
    """The colours of `PAGE` as CSS, for both kinds of page."""
    light = " ".join(f"--{name}: {value};" for name, value in LIGHT.items())
    dark = " ".join(f"--{name}: {value};" for name, value in DARK.items())
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )


def with_variables(svg: str) -> str:
    for name, stand_in in _STAND_INS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return svg
