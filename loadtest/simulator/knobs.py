"""What a simulated engine can be told: its speed, and what is wrong with it.

sim:                                  the defaults
sim:step_base_ms=5,abort_share=0.02   some of them set, separated by commas
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from loadtest.simulator.batching_model import BatchingParameters
from shared.errors import ConfigError

SIMULATED_SOURCE = "sim:"


def is_simulated(source: str) -> bool:
    return source.startswith(SIMULATED_SOURCE)


def _knob(default: float, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorKnobs:
    """Raises ConfigError that names the knob for a value that it cannot have."""

    step_base_ms: float = _knob(10.0, "how long a step takes that computes next to nothing")
    step_per_sequence_ms: float = _knob(0.12, "and how much longer for each sequence that decodes")
    step_per_prefill_token_ms: float = _knob(0.03, "and for each prompt token that is computed")
    max_step_tokens: int = _knob(2048, "tokens of a step, decoding sequences and prompts together")
    decode_slowdown_per_prefill_token: float = _knob(
        0.0, "share by which a prompt token lengthens what decoding takes in the same step"
    )
    prefix_hit_share: float = _knob(0.0, "share of prompt tokens found in the prefix cache")
    undeclared_hit_points: float = _knob(
        0.0, "percentage points by which the counter of hits is higher than the share that was saved"
    )
    ttft_floor_ms: float = _knob(0.0, "how long after its arrival a request is queued")
    itl_jitter: float = _knob(0.0, "a step is longer or shorter by up to this share, at random")
    tokens_per_message: int = _knob(1, "tokens behind the first that are sent together")
    reject_share: float = _knob(0.0, "share of requests that are refused")
    abort_share: float = _knob(0.0, "share of requests that end half-way, without a reason to finish")
    stall_s: float = _knob(0.0, "how long it stands still, while it goes on telling that it lives")
    stall_after_requests: int = _knob(0, "when: as the request of this number comes")
    stall_at_s: float = _knob(0.0, "or when: so long after the first request")
    stall_every_s: float = _knob(0.0, "or when: each so many seconds after the first request")
    seed: int = _knob(0, "of what is random")

    def __post_init__(self) -> None:
        for knob in fields(self):
            value = getattr(self, knob.name)
            if isinstance(knob.default, int) and not float(value).is_integer():
                raise _wrong(knob.name, f"must be a whole number, not {value!r}")
            if not math.isfinite(value) or value < 0:
                raise _wrong(knob.name, f"must be finite and not negative, not {value!r}")
            if (knob.name.endswith("_share") or knob.name == "itl_jitter") and value > 1:
                raise _wrong(knob.name, f"must be between 0 and 1, not {value!r}")
        for name in ("step_base_ms", "max_step_tokens", "tokens_per_message"):
            if getattr(self, name) == 0:
                raise _wrong(name, "must be more than zero")
        if self.undeclared_hit_points > 100:
            raise _wrong("undeclared_hit_points", "must be at most 100")
        if self.reject_share + self.abort_share > 1:
            raise _wrong("abort_share", "and reject_share must not be more than 1 together")
        self._check_stall()

    def _check_stall(self) -> None:
        triggers = ("stall_after_requests", "stall_at_s", "stall_every_s")
        given = [name for name in triggers if getattr(self, name)]
        if self.stall_s and not given:
            raise _wrong("stall_s", f"needs to know when: {', '.join(triggers)}")
        if given and not self.stall_s:
            raise _wrong(given[0], "needs stall_s")
        if len(given) > 1:
            raise _wrong(given[1], f"cannot be combined with {given[0]}")
        if self.stall_every_s and self.stall_every_s <= self.stall_s:
            raise _wrong("stall_every_s", "must be more than stall_s: it would never go on")

    def batching(self, max_num_seqs: int, max_kv_tokens: int | None) -> BatchingParameters:
        """Raises ConfigError for slots that do not fit into a step."""
        return BatchingParameters(
            step_base_s=self.step_base_ms / 1e3,
            step_per_sequence_s=self.step_per_sequence_ms / 1e3,
            step_per_prefill_token_s=self.step_per_prefill_token_ms / 1e3,
            max_num_seqs=max_num_seqs,
            max_step_tokens=self.max_step_tokens,
            prefix_hit_share=self.prefix_hit_share,
            decode_slowdown_per_prefill_token=self.decode_slowdown_per_prefill_token,
            max_kv_tokens=max_kv_tokens,
        )


def knobs_of_source(source: str) -> SimulatorKnobs:
    """Raises ConfigError."""
    return parse_knobs(filter(None, source.removeprefix(SIMULATED_SOURCE).split(",")))


def parse_knobs(assignments: Iterable[str]) -> SimulatorKnobs:
    """Of `name=value` each. Raises ConfigError that names the knob."""
    known = {knob.name: knob for knob in fields(SimulatorKnobs)}
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, _, text = (part.strip() for part in assignment.partition("="))
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown knob {name!r} of a simulated engine; {hint}", name)
        if name in values:
            raise _wrong(name, "is given twice")
        try:
            values[name] = int(text) if isinstance(known[name].default, int) else float(text)
        except ValueError as error:
            kind = "a whole number" if isinstance(known[name].default, int) else "a number"
            raise _wrong(name, f"must be {kind}, not {text!r}") from error
    return SimulatorKnobs(**values)


def meanings() -> list[tuple[str, str, str]]:
    """Name, default and meaning of each knob."""
    return [(knob.name, f"{knob.default:g}", knob.metadata["meaning"]) for knob in fields(SimulatorKnobs)]


def _wrong(name: str, problem: str) -> ConfigError:
    return ConfigError(f"{name} of a simulated engine {problem}", name)
