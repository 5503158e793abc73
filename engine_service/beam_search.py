"""Beam search: of all continuations of a prompt, the most probable ones that can be found level by level.

A level adds one token. Each of its beams is an ordinary sequence that ends after one token and tells which
tokens would have been the likeliest. When all of a level have ended, the best extensions become the sequences
of the next one. They find keys and values of the level before in the prefix cache, the tails of its blocks
included, so a level costs about one token for each beam; and since nothing is held between two levels, beams
can be preempted, wait and be recomputed like anybody else. Without prefix caching every level is computed
from the beginning.

The results are those of vLLM (vllm/entrypoints/llm.py, `beam_search`):

- each beam is extended by its `2 * width` likeliest tokens, by the model's own distribution;
- an extension by a token that ends a sequence is a result;
- of the others the `width` with the highest sums of log-probabilities go on;
- at the limit of tokens those that go on become results, too;
- the `width` results with the highest scores are told. A score is the sum, divided by the length to the power
  of `length_penalty`. The length counts the prompt, and leaves out the token that ended it.

What differs: every end-of-sequence token and stop token ends, not only one; a beam is extended by more than
`2 * width` tokens if it needs be, so that always `width` go on; and the search ends as soon as its results
cannot change any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from engine_service.runner import Sampled
from engine_service.scheduler import Scheduler
from engine_service.sequence import Sequence
from shared.identifiers import RequestId
from shared.messages import Beam, FinishReason
from shared.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class _Line:
    """A continuation that goes on, and what its sequence has told of the token after it."""

    sequence: Sequence
    cumulative_logprob: float
    likeliest: list[tuple[int, float]] | None = None  # tokens and their log-probabilities, descending


class _Extension(NamedTuple):
    line: _Line
    token_id: int
    cumulative_logprob: float


class BeamSearch:
    """One request. Gives the scheduler the sequences of each level but the first, and ends them.

    The first level is one sequence, which the scheduler gets from whoever takes the request in. The others
    have its name and a number.
    """

    def __init__(self, scheduler: Scheduler, first: Sequence) -> None:
        """Makes `first`, which has the whole prompt and the request's parameters, the first level."""
        params = first.sampling.beam_search
        assert params is not None, f"{first.request_id} asks for no beam search"
        self.first = first
        self.beams: list[Beam] = []  # the best results so far, best first
        self._scheduler = scheduler
        self._params = params
        self._num_prompt_tokens = first.num_prompt_tokens
        self._final_length = scheduler.final_length_of(first)
        self._end_token_ids = scheduler.end_token_ids_of(first)
        num_likeliest = max(2 * params.width, params.width + len(self._end_token_ids))
        first.sampling = _parameters_of_a_level(first.sampling, num_likeliest)
        first.search_id = first.request_id
        self._level = {first.request_id: _Line(first, 0.0)}  # best first
        self._num_tokens = first.num_tokens  # of each sequence of the level, before it generates one
        self._num_ids = 1
        self._num_preemptions = 0

    @property
    def num_tokens_to_come(self) -> int:
        """Tokens that levels after this one compute, if the search runs to its limit."""
        return self._params.width * (self._final_length - 1 - self._num_tokens) if self._level else 0

    def take(self, sequence: Sequence, sampled: Sampled) -> bool:
        """Takes in the one token of a sequence of this level; whether that was the end of the search."""
        assert sampled.logprobs is not None, f"{sequence.request_id} was to tell the likeliest tokens"
        self._level[sequence.request_id].likeliest = sampled.logprobs.top
        self._num_preemptions += sequence.num_preemptions
        if all(line.likeliest is not None for line in self._level.values()):
            self._end_level()
            if not self._level:
                self._close(self.beams[0].finish_reason)
        return not self._level

    def abort(self) -> None:
        """Ends what still runs or waits. Not to be called when the search has ended."""
        for request_id in self._level:
            self._scheduler.abort(request_id)
        self._close("abort")

    def check(self) -> None:
        """Asserts that the scheduler has what of this level has not ended, and that there is some of it."""
        left = {line.sequence.request_id for line in self._level.values() if line.likeliest is None}
        assert left, f"{self.first.request_id} goes on without a sequence that does"
        for request_id in left:
            line, sequence = self._level[request_id], self._scheduler.get(request_id)
            assert line.sequence is sequence, f"{request_id} has ended and is still waited for"

    def _close(self, reason: FinishReason) -> None:
        """The first sequence stands for the whole search in what is told of it."""
        first = self.first
        if self.beams:
            first.token_ids[self._num_prompt_tokens :] = self.beams[0].token_ids
        first.num_preemptions = self._num_preemptions
        first.finish_reason = reason
        self._scheduler.close_search(first)

    def _end_level(self) -> None:
        best = self._extensions()[: self._params.width]
        if self._num_tokens + 1 >= self._final_length:
            self.beams += [self._beam(extension, "length") for extension in best]
            best = []
        self.beams.sort(key=self._score, reverse=True)
        del self.beams[self._params.width :]
        if best and self._is_settled(best[0].cumulative_logprob):
            best = []
        self._begin_level(best)

    def _extensions(self) -> list[_Extension]:
        """By tokens that end nothing, the best first. The others are results."""
        extensions: list[_Extension] = []
        for line in self._level.values():
            for token_id, logprob in line.likeliest or ():
                extension = _Extension(line, token_id, line.cumulative_logprob + logprob)
                if token_id in self._end_token_ids:
                    self.beams.append(self._beam(extension, "stop"))
                else:
                    extensions.append(extension)
        # Sorting is stable: of equals the one comes first whose line did.
        extensions.sort(key=lambda extension: extension.cumulative_logprob, reverse=True)
        return extensions

    def _begin_level(self, extensions: list[_Extension]) -> None:
        """None: the search is over."""
        ended, self._level = self._level, {}
        for line, token_id, cumulative_logprob in extensions:
            sequence = self._extend(line.sequence, token_id)
            self._level[sequence.request_id] = _Line(sequence, cumulative_logprob)
            ended.pop(line.sequence.request_id, None)
        self._num_tokens += 1
        if self._level:
            self._scheduler.give_up(line.sequence for line in ended.values())
            self._scheduler.go_on(line.sequence for line in self._level.values())

    def _is_settled(self, cumulative_logprob: float) -> bool:
        """Whether nothing that goes on, with this sum at best, can become better than the results.

        A sum only falls from here on. What it is divided by grows or shrinks with the length, so one of
        the two ends is the best that can come.
        """
        if len(self.beams) < self._params.width:
            return False
        lengths = self._num_tokens + 1, self._final_length
        best = max(self._scaled(cumulative_logprob, length) for length in lengths)
        return self._score(self.beams[-1]) >= best

    def _score(self, beam: Beam) -> float:
        length = self._num_prompt_tokens + len(beam.token_ids) - (beam.stop_token_id is not None)
        return self._scaled(beam.cumulative_logprob, length)

    def _scaled(self, cumulative_logprob: float, length: int) -> float:
        divisor: float = length**self._params.length_penalty
        return cumulative_logprob / divisor

    def _beam(self, extension: _Extension, reason: FinishReason) -> Beam:
        output = extension.line.sequence.token_ids[self._num_prompt_tokens : self._num_tokens]
        output.append(extension.token_id)
        stop_token_id = extension.token_id if reason == "stop" else None
        return Beam(output, extension.cumulative_logprob, reason, stop_token_id)

    def _extend(self, sequence: Sequence, token_id: int) -> Sequence:
        """What goes on where the sequence has ended, with a token that need not be the one it generated."""
        first = self.first
        return Sequence(
            request_id=self._unused_id(),
            token_ids=[*sequence.token_ids[: self._num_tokens], token_id],
            num_prompt_tokens=first.num_prompt_tokens,
            sampling=first.sampling,
            tenant=first.tenant,
            priority=first.priority,
            cache_salt=first.cache_salt,
            adapter=first.adapter,
            arrival_s=first.arrival_s,
            deadline_s=first.deadline_s,
            search_id=first.request_id,
            block_hashes=sequence.block_hashes[:-1],  # the last may be of the token that it generated
        )

    def _unused_id(self) -> RequestId:
        """Gateways do not ask for such names, but could."""
        while True:
            self._num_ids += 1
            request_id = RequestId(f"{self.first.request_id}.{self._num_ids}")
            if self._scheduler.get(request_id) is None:
                return request_id


def _parameters_of_a_level(sampling: SamplingParams, num_likeliest: int) -> SamplingParams:
    """What it generates is of no interest, so it is what costs least."""
    return msgspec.structs.replace(sampling, temperature=0.0, logprobs=num_likeliest, beam_search=None)
