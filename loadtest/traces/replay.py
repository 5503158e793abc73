"""Makes prompts and due times out of a trace."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.arrivals import NANOSECONDS_PER_SECOND
from loadtest.datasets.prompt import Prompt
from loadtest.datasets.random_prompts import random_ids, random_words
from loadtest.traces.trace_request import TraceRequest


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    takes_ids: bool
    vocab_size: int = 30_000
    block_size: int = 512  # tokens for each of a request's hashes
    time_scale: float = 1.0  # 0.5: twice as fast
    start_s: float = 0.0  # what lies before is left out; seconds of the trace's own time
    duration_s: float | None = None  # of the replay, after scaling
    max_input_len: int | None = None
    max_output_len: int | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    prompts: list[Prompt]
    offsets_ns: list[int]
    prefix_hit_share: float  # of the prompt tokens: what an endless prefix cache finds


def replay_trace(
    trace: Sequence[TraceRequest], settings: ReplaySettings, num_prompts: int | None, nonce: Sequence[int]
) -> Replay:
    """The first `num_prompts` from `start_s` on, as far as `duration_s` goes.

    Equal block hashes become equal tokens, so that prompts share what those of the trace have shared.
    """
    first = bisect.bisect_left(trace, trace[0].at_s + settings.start_s, key=lambda one: one.at_s)
    chosen = list(trace[first:] if num_prompts is None else trace[first : first + num_prompts])
    offsets_ns = [
        int((one.at_s - chosen[0].at_s) * settings.time_scale * NANOSECONDS_PER_SECOND) for one in chosen
    ]
    if settings.duration_s is not None:
        count = bisect.bisect_right(offsets_ns, int(settings.duration_s * NANOSECONDS_PER_SECOND))
        chosen, offsets_ns = chosen[:count], offsets_ns[:count]
    writer = _PromptWriter(settings, nonce)
    prompts = [writer.prompt(request) for request in chosen]
    return Replay(prompts, offsets_ns, writer.hit_share)


class _PromptWriter:
    """Remembers the tokens of each hash, and which of them have been sent before."""

    def __init__(self, settings: ReplaySettings, nonce: Sequence[int]) -> None:
        self._settings = settings
        self._nonce = list(nonce)
        self._rng = np.random.default_rng([*nonce, 0])
        self._sent: set[tuple[int, int]] = set()  # a hash, and how many of its tokens
        self._shared: dict[str, list[int] | list[str]] = {}  # by tenant
        self._longest_sent: dict[str, int] = {}
        self._num_hits = 0
        self._num_tokens = 0

    @property
    def hit_share(self) -> float:
        return self._num_hits / max(1, self._num_tokens)

    def prompt(self, request: TraceRequest) -> Prompt:
        settings = self._settings
        num_input_tokens = request.num_input_tokens
        if settings.max_input_len is not None:
            num_input_tokens = min(num_input_tokens, settings.max_input_len)
        num_output_tokens = request.num_output_tokens
        if settings.max_output_len is not None:
            num_output_tokens = min(num_output_tokens, settings.max_output_len)
        self._num_tokens += num_input_tokens
        if request.block_hashes:
            content = self._of_blocks(request.block_hashes, num_input_tokens)
        else:
            shared = min(request.num_shared_tokens, num_input_tokens)
            content = self._of_tenant(request.tenant, shared)
            content = content + self._some(num_input_tokens - shared, self._rng)  # type: ignore[operator]
        text = content if settings.takes_ids else " ".join(content)  # type: ignore[arg-type]
        return Prompt(text, num_output_tokens, tenant=request.tenant)  # type: ignore[arg-type]

    def _of_blocks(self, hashes: Sequence[int], num_tokens: int) -> list[int] | list[str]:
        content: list[int] | list[str] = []
        is_hit = True
        for block_hash in hashes:
            size = min(self._settings.block_size, num_tokens - len(content))
            if size <= 0:
                break
            rng = np.random.default_rng([*self._nonce, 1, abs(block_hash)])
            content = content + self._some(size, rng)  # type: ignore[operator]
            is_hit = is_hit and (block_hash, size) in self._sent
            self._num_hits += size if is_hit else 0
            self._sent.add((block_hash, size))
        return content + self._some(num_tokens - len(content), self._rng)  # type: ignore[operator]

    def _of_tenant(self, tenant: str, num_shared_tokens: int) -> list[int] | list[str]:
        """The beginning that all prompts of a tenant have in common, as long as asked."""
        known = self._shared.get(tenant, [])
        if len(known) < num_shared_tokens:
            seed = [*self._nonce, 2, *tenant.encode()]
            known = self._some(2 * num_shared_tokens, np.random.default_rng(seed))
            self._shared[tenant] = known
        self._num_hits += min(num_shared_tokens, self._longest_sent.get(tenant, 0))
        self._longest_sent[tenant] = max(num_shared_tokens, self._longest_sent.get(tenant, 0))
        return known[:num_shared_tokens]

    def _some(self, count: int, rng: np.random.Generator) -> list[int] | list[str]:
        if not self._settings.takes_ids:
            return random_words(max(0, count), rng)
        ids: list[int] = random_ids(max(0, count), self._settings.vocab_size, rng).tolist()
        return ids
