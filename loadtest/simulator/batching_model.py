"""How long an engine's steps take, and who gets a token of each: iteration-level batching without a clock.

A step lasts `step_base_s`, and longer for each sequence that decodes and each prompt token that is computed.
Every decoding sequence gets one token of it; what is left of its tokens goes to prompts, first come, first
served, in chunks. The last chunk of a prompt brings the first token. (Orca, OSDI 2022; chunks as in Sarathi.)

Nothing here waits: who asks for a step adds its duration to whatever time it keeps, real or simulated.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

from shared.errors import ConfigError

Key = TypeVar("Key", bound=Hashable)  # what requests are told apart by


@dataclass(frozen=True, slots=True)
class BatchingParameters:
    """Raises ConfigError, with the field's name, for a number that no engine could have."""

    step_base_s: float = 0.010
    step_per_sequence_s: float = 0.00012  # for each one that decodes
    step_per_prefill_token_s: float = 0.00003
    max_num_seqs: int = 64  # slots: sequences that have begun and not ended
    max_step_tokens: int = 2048  # of decoding sequences and prompts together
    prefix_hit_share: float = 0.0  # of prompt tokens: these are never computed
    # Each prompt token lengthens what decoding costs in the same step by this share of it. Zero: the two
    # costs add up, as models of an engine take for granted.
    decode_slowdown_per_prefill_token: float = 0.0
    max_kv_tokens: int | None = None  # prompts and answers of those that run; None: there is room for all

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "max_kv_tokens":
                continue
            is_count = field.name.startswith("max_")
            if isinstance(value, bool) or not isinstance(value, int if is_count else int | float):
                kind = "a whole number" if is_count else "a number"
                raise ConfigError(f"{field.name} must be {kind}, not {value!r}", field.name)
            if not math.isfinite(value) or value < (1 if is_count else 0):
                raise ConfigError(
                    f"{field.name} must be {'at least 1' if is_count else 'finite and not negative'}, "
                    f"not {value!r}",
                    field.name,
                )
        if self.step_base_s == 0:
            raise ConfigError("step_base_s must be more than zero: every step takes time", "step_base_s")
        if self.prefix_hit_share > 1:
            raise ConfigError(
                f"prefix_hit_share must be between 0 and 1, not {self.prefix_hit_share!r}", "prefix_hit_share"
            )
        if self.max_step_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) must not be less than max_num_seqs "
                f"({self.max_num_seqs}): each sequence gets a token in every step",
                "max_step_tokens",
            )


@dataclass(frozen=True, slots=True)
class Step(Generic[Key]):
    """Tokens come when the step has ended, `duration_s` after it began."""

    duration_s: float
    first: tuple[Key, ...]  # the first token of these
    num_cached: tuple[int, ...]  # prompt tokens of each of `first` that were found in the prefix cache
    more: tuple[Key, ...]  # a further token of these
    finished: tuple[Key, ...]  # whose last token it was; each is among `first` or `more`
    num_prefill_tokens: int


class _Sequence(Generic[Key]):
    __slots__ = (
        "decodes_since",
        "key",
        "num_cached",
        "num_generated",
        "num_output_tokens",
        "num_prompt_tokens",
        "num_to_compute",
    )

    def __init__(self, key: Key, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self.key = key
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = num_output_tokens
        self.num_generated = 0  # before it began to decode (again): no step touches each decoding sequence
        self.num_cached: int | None = None  # None: it has not begun
        self.num_to_compute = 0  # of its prompt, and of what it had generated when it was preempted
        self.decodes_since = 0  # number of the step after the one that ended its prompt


class BatchingModel(Generic[Key]):
    """An engine's scheduler and its costs. `next_step` takes time proportional to the batch, if not much.

    What changes between two steps, `submit` and `abort`, counts from the next one on. Whoever is aborted
    while a step is under way may still be told in it. Gauges and counters are those of the end of the step
    that was handed out last.
    """

    def __init__(self, parameters: BatchingParameters | None = None) -> None:
        self.parameters = parameters or BatchingParameters()
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of the requests that have begun, cached ones included
        self.num_generation_tokens = 0
        self.num_prefix_hits = 0  # in tokens, out of num_prompt_tokens
        self.num_kv_tokens = 0  # held by those that run
        # Ordered: of a plain dictionary, finding the first takes longer the more have been taken from it.
        self._waiting: OrderedDict[Key, _Sequence[Key]] = OrderedDict()
        self._prefilling: deque[_Sequence[Key]] = deque()  # by age, and older than all that wait
        self._decoding: dict[Key, _Sequence[Key]] = {}  # by age, and older than all that prefill
        self._ending: dict[int, list[_Sequence[Key]]] = {}  # by the step that will end them

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request_id: Key, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Raises ValueError for what could never run, or runs already."""
        if num_prompt_tokens < 1 or num_output_tokens < 1:
            raise ValueError(f"{request_id!r} needs a prompt and an answer of at least one token each")
        limit = self.parameters.max_kv_tokens
        if limit is not None and num_prompt_tokens + num_output_tokens > limit:
            raise ValueError(f"{request_id!r} needs more than max_kv_tokens ({limit}) for itself alone")
        if self._holds(request_id):
            raise ValueError(f"{request_id!r} has been submitted and has not ended")
        sequence = _Sequence(request_id, num_prompt_tokens, num_output_tokens)
        self._waiting[request_id] = sequence

    def abort(self, request_id: Key) -> bool:
        """Whether it was there."""
        if self._waiting.pop(request_id, None) is not None:
            return True
        if (sequence := self._decoding.pop(request_id, None)) is not None:
            self.num_kv_tokens -= self._context_length(sequence)
            return True
        for sequence in self._prefilling:
            if sequence.key == request_id:
                self._prefilling.remove(sequence)
                self.num_kv_tokens -= self._context_length(sequence)
                return True
        return False

    def next_step(self) -> Step[Key] | None:
        """The step that begins now; None if there is nothing to do."""
        if not (self._decoding or self._prefilling or self._waiting):
            return None
        parameters = self.parameters
        self._make_room()
        more = tuple(self._decoding)
        begun, num_prefill_tokens = self._prefill(parameters.max_step_tokens - len(more))
        duration_s = (
            parameters.step_base_s
            + len(more)
            * parameters.step_per_sequence_s
            * (1 + parameters.decode_slowdown_per_prefill_token * num_prefill_tokens)
            + num_prefill_tokens * parameters.step_per_prefill_token_s
        )
        self.num_steps += 1
        self.num_kv_tokens += len(more)
        self.num_generation_tokens += len(more) + len(begun)
        for sequence in begun:
            self._begin_decoding(sequence)
        first = [sequence for sequence in begun if sequence.num_generated == 1]
        if len(first) < len(begun):  # some were preempted: their clients have had a first token
            more += tuple(sequence.key for sequence in begun if sequence.num_generated > 1)
        return Step(
            duration_s,
            tuple(sequence.key for sequence in first),
            tuple(sequence.num_cached or 0 for sequence in first),
            more,
            self._end(),
            num_prefill_tokens,
        )

    def _holds(self, request_id: Key) -> bool:
        return (
            request_id in self._waiting
            or request_id in self._decoding
            or any(sequence.key == request_id for sequence in self._prefilling)
        )

    def _make_room(self) -> None:
        """Preempts the youngest until each decoding sequence has room for its next token."""
        limit = self.parameters.max_kv_tokens
        while limit is not None and self.num_kv_tokens + len(self._decoding) > limit:
            if self._prefilling:
                sequence = self._prefilling.pop()
            else:
                _, sequence = self._decoding.popitem()
                sequence.num_generated = self._generated(sequence)
                sequence.decodes_since = 0
            self.num_kv_tokens -= sequence.num_prompt_tokens + sequence.num_generated
            self.num_preemptions += 1
            self._waiting[sequence.key] = sequence
            self._waiting.move_to_end(sequence.key, last=False)

    def _prefill(self, num_tokens: int) -> tuple[list[_Sequence[Key]], int]:
        """Whose prompts are computed to the end, and how many tokens were computed in all."""
        begun, num_left = [], num_tokens
        while num_left:
            if not self._prefilling and not self._admit():
                break
            sequence = self._prefilling[0]
            num_computed = min(num_left, sequence.num_to_compute)
            sequence.num_to_compute -= num_computed
            num_left -= num_computed
            if sequence.num_to_compute == 0:
                begun.append(self._prefilling.popleft())
                # It keeps its slot while others are admitted to the same step.
                self._decoding[sequence.key] = sequence
        return begun, num_tokens - num_left

    def _admit(self) -> bool:
        """Whether the first that waits has begun."""
        parameters = self.parameters
        if not self._waiting or self.num_running >= parameters.max_num_seqs:
            return False
        sequence = next(iter(self._waiting.values()))
        context_length = sequence.num_prompt_tokens + sequence.num_generated
        if (
            parameters.max_kv_tokens is not None
            # The token after it, and those of this step, need room as well.
            and self.num_kv_tokens + len(self._decoding) + context_length + 1 > parameters.max_kv_tokens
        ):
            return False
        self._waiting.popitem(last=False)
        sequence.num_to_compute = context_length
        if sequence.num_cached is None:  # one that was preempted is computed whole
            sequence.num_cached = self._look_up(sequence.num_prompt_tokens)
            sequence.num_to_compute -= sequence.num_cached
        self.num_kv_tokens += context_length
        self._prefilling.append(sequence)
        return True

    def _look_up(self, num_prompt_tokens: int) -> int:
        """How many of a prompt's tokens are found in the prefix cache: all but one at the most.

        Fractions are carried over, so that the share comes out right for prompts of any length.
        """
        self.num_prompt_tokens += num_prompt_tokens
        due = math.floor(self.parameters.prefix_hit_share * self.num_prompt_tokens + 1e-9)
        num_cached = min(due - self.num_prefix_hits, num_prompt_tokens - 1)
        self.num_prefix_hits += num_cached
        return num_cached

    def _begin_decoding(self, sequence: _Sequence[Key]) -> None:
        """With the token that its prompt's last chunk has brought."""
        sequence.num_generated += 1
        self.num_kv_tokens += 1
        sequence.decodes_since = self.num_steps + 1
        num_left = sequence.num_output_tokens - sequence.num_generated
        self._ending.setdefault(self.num_steps + num_left, []).append(sequence)

    def _end(self) -> tuple[Key, ...]:
        """Those whose last token came with this step. Of who was aborted or preempted, the entry is stale."""
        finished = []
        for sequence in self._ending.pop(self.num_steps, ()):
            if self._decoding.get(sequence.key) is not sequence:
                continue
            if self._generated(sequence) != sequence.num_output_tokens:
                continue
            del self._decoding[sequence.key]
            self.num_kv_tokens -= sequence.num_prompt_tokens + sequence.num_output_tokens
            finished.append(sequence.key)
        return tuple(finished)

    def _generated(self, sequence: _Sequence[Key]) -> int:
        since = sequence.decodes_since
        return sequence.num_generated + (self.num_steps - since + 1 if since else 0)

    def _context_length(self, sequence: _Sequence[Key]) -> int:
        return sequence.num_prompt_tokens + self._generated(sequence)
