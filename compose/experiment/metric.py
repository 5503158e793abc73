"""What variants are compared by, and how differences of it are told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["ratio", "difference"]  # of the geometric means of times; of the means of anything else


@dataclass(frozen=True, slots=True)
class Metric:
    """`tau`: see statistics.py; of ratios it is of their logarithms. `more` and `less`: what is said of a
    variant whose values are higher or lower than another one's; the braces are for the amount."""

    name: str
    title: str
    kind: Kind
    tau: float
    more: str
    less: str

    def shown(self, value: float) -> str:
        """A difference with its sign and unit; of ratios 1.08 is one of 8 %. Points are percentage points."""
        sign = "+" if value >= (1 if self.kind == "ratio" else 0) else "−"
        return sign + self.amount(value).replace("percentage points", "points")

    def amount(self, value: float) -> str:
        if self.kind == "ratio":
            return f"{abs(value - 1) * 100:.1f} %"
        if self.name == "feedback":
            return f"{abs(value):.2f}"
        return f"{abs(value) * 100:.2f} percentage points"

    def statement(self, variant: str, control: str, value: float) -> str:
        """ "B is 8.1 % slower to the first token than A"."""
        words = self.more if value > (1 if self.kind == "ratio" else 0) else self.less
        return f"{variant} {words.format(self.amount(value))} than {control}"


_TIME_TAU = math.log(1.1)
METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "ttft", "time to first token", "ratio", _TIME_TAU,
            "is {} slower to the first token", "is {} faster to the first token",
        ),
        Metric(
            "tpot", "time per output token", "ratio", _TIME_TAU,
            "is {} slower from token to token", "is {} faster from token to token",
        ),
        Metric(
            "e2e", "time of the whole answer", "ratio", _TIME_TAU,
            "is {} slower to the end of the answer", "is {} faster to the end of the answer",
        ),
        Metric(
            "failed", "failed requests", "difference", 0.01, "fails {} more often", "fails {} less often"
        ),
        Metric(
            "aborted", "clients that left", "difference", 0.01,
            "is left by its clients {} more often", "is left by its clients {} less often",
        ),
        Metric("feedback", "feedback", "difference", 0.1, "is scored {} higher", "is scored {} lower"),
    )
}  # fmt: skip
DEFAULT_METRIC = "ttft"
