"""What an engine must do, as plainly as it can be said: the reference of test_engine_model_based.py.

It knows what each request must say (the fake model's function and the rules of an end) and the rules that
hold for any scheduler: budgets, turns, deadlines, refusals, and how much of a prompt can have been cached.
It plans nothing: it looks at each plan and each update, and says what is wrong with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine_service.fake_runner import FakeModel, digest_of
from engine_service.sequence import ScheduledRow, Sequence, SequenceState
from shared.messages import FinishReason, SequenceUpdate, Submit
from tests.unit.worlds import EOS

Refused = tuple[str, str | None]  # code and field


@dataclass(frozen=True)
class Rules:
    """How the engine is configured, as far as it can be seen from outside."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_queued_requests: int
    max_queued_tokens: int | None
    long_prefill_token_threshold: int | None
    enable_prefix_caching: bool
    in_order_of_arrival: bool  # nobody begins before those who came earlier
    newest_yields: bool  # whoever runs came before all who wait
    classes_in_order: bool  # nobody begins before those of a higher class


@dataclass(frozen=True)
class Answer:
    """What a request must say, and why it ends there."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_token_id: int | None


def answer_to(submit: Submit, model: FakeModel, max_model_len: int) -> Answer:
    """One token after the other, from the whole history each time."""
    sampling = submit.sampling
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
    prompt, output = submit.prompt_token_ids, list(submit.output_token_ids)
    while True:
        history = prompt + output
        allowed = _left_by_bad_words(submit, output, model)
        output.append(model.next_token(digest_of(history), len(history) - 1, sampling, allowed))
        new = output[len(submit.output_token_ids) :]
        if output[-1] in stops and len(output) >= sampling.min_tokens:
            return Answer(new, "stop", output[-1])
        if len(output) == sampling.max_tokens or len(prompt) + len(output) == max_model_len:
            return Answer(new, "length", None)


def _left_by_bad_words(submit: Submit, output: list[int], model: FakeModel) -> list[int] | None:
    """None where there are no bad words."""
    sampling = submit.sampling
    if not sampling.bad_words:
        return None
    barred = {
        word[-1]
        for word in sampling.bad_words
        if len(word) - 1 <= len(output) and tuple(output[len(output) - len(word) + 1 :]) == word[:-1]
    }
    if len(output) < sampling.min_tokens:
        barred |= {*sampling.stop_token_ids, EOS}
    return [token_id for token_id in model.token_ids if token_id not in barred]


def num_shared(a: list[int], b: list[int]) -> int:
    """Tokens that two histories have in common from the beginning."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(eq=False)
class Asked:
    """A request that was accepted, and what is known of it from outside."""

    submit: Submit
    answer: Answer
    number: int  # in order of arrival
    deadline_s: float | None
    final_length: int  # tokens, if nothing ends it before
    is_follower: bool  # it waits for the first token of another one, outside of the queue
    sequence: Sequence  # looked at only for whether it runs
    num_said: int = 0
    num_expected: int = 0  # tokens that it is about to say: rows of steps that are under way sample them
    next_start: int | None = None  # where its next row goes on, unless it starts over; None: it had none
    num_preemptions: int = 0  # at its last row
    num_found: int = 0  # where its first row began
    num_written: int = 0  # tokens that a step has computed, or will before any other reads them
    num_published: int = 0  # of these, what must be found unless it was evicted: whole blocks of them
    may_skip_to: int = 0  # it ran when so much of it could be found, and may have gone there without a row
    cut_at: int | None = None  # preemptions at a reset while it ran: until the next it publishes nothing

    @property
    def name(self) -> str:
        return self.submit.request_id

    @property
    def token_ids(self) -> list[int]:
        """All that it has, or will have."""
        return self.submit.prompt_token_ids + self.submit.output_token_ids + self.answer.token_ids

    @property
    def is_scored(self) -> bool:
        """Whether something is to be told of each token of its prompt, so that each has to be computed."""
        return self.submit.sampling.prompt_logprobs is not None and len(self.submit.prompt_token_ids) > 1

    @property
    def num_known(self) -> int:
        return len(self.submit.prompt_token_ids) + len(self.submit.output_token_ids) + self.num_said

    @property
    def num_missing(self) -> int:
        """Tokens that no row has computed, of one that runs. The last token of all is never computed."""
        return min(self.num_known + self.num_expected, self.final_length - 1) - (self.next_start or 0)

    @property
    def runs(self) -> bool:
        return self.sequence.state is SequenceState.RUNNING

    @property
    def waits(self) -> bool:
        return self.sequence.state is SequenceState.WAITING

    @property
    def publishes(self) -> bool:
        return self.cut_at is None or self.num_preemptions > self.cut_at


class NaiveEngine:
    """Follows an engine and checks what it does. `seen` counts what happened."""

    def __init__(self, rules: Rules, model: FakeModel, seen: Counter[str]) -> None:
        self.rules = rules
        self.live: dict[str, Asked] = {}
        self.ended: dict[str, Asked] = {}
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.may_have_evicted = False  # since the last reset
        self._model = model
        self._seen = seen

    def everyone(self) -> Iterator[Asked]:
        yield from self.live.values()
        yield from self.ended.values()

    # ------------------------------------------------------------------ asking and ending

    def refusal_of(self, submit: Submit) -> Refused | None:
        """Code and field of the refusal that the rules want; None: it has to be accepted."""
        rules, sampling = self.rules, submit.sampling
        num_tokens = len(submit.prompt_token_ids) + len(submit.output_token_ids)
        if sampling.min_tokens > sampling.max_tokens:
            return "invalid_request", "min_tokens"
        if submit.request_id in self.live:
            return "invalid_request", "request_id"
        if len(submit.output_token_ids) >= sampling.max_tokens:
            return "invalid_request", "output_token_ids"
        if num_tokens >= rules.max_model_len:
            return "context_length_exceeded", "prompt"
        if self._final_length(submit) - 1 > rules.num_blocks * rules.block_size:
            return "context_length_exceeded", "max_tokens"
        waiting = [asked for asked in self.live.values() if asked.waits]
        if len(waiting) >= rules.max_queued_requests:
            return "queue_full", None
        num_queued = sum(asked.num_known for asked in waiting)
        if waiting and rules.max_queued_tokens and num_queued + num_tokens > rules.max_queued_tokens:
            return "queue_full", None
        return None

    def accept(self, submit: Submit, sequence: Sequence, now_s: float) -> None:
        leader = self.live.get(submit.shares_prompt_with or "")
        self.live[submit.request_id] = Asked(
            submit,
            answer_to(submit, self._model, self.rules.max_model_len),
            number=len(self.live) + len(self.ended),
            deadline_s=None if submit.timeout_s is None else now_s + submit.timeout_s,
            final_length=self._final_length(submit),
            is_follower=leader is not None and leader.num_said == 0,
            sequence=sequence,
        )
        self._seen["follows another"] += self.live[submit.request_id].is_follower

    def end(self, name: str) -> None:
        self.ended[name] = self.live.pop(name)

    def late(self, now_s: float) -> set[str]:
        return {a.name for a in self.live.values() if a.deadline_s is not None and a.deadline_s <= now_s}

    def reset(self) -> None:
        """The prefix cache was reset: nothing that was computed or is under way may be found."""
        for asked in self.live.values():
            if asked.runs:
                asked.may_skip_to = max(asked.may_skip_to, self._most_to_find(asked))
        for asked in self.everyone():
            asked.num_written = asked.num_published = 0
            asked.cut_at = asked.num_preemptions if asked.runs else None
            self._seen["reset while some ran"] += asked.runs
        self.may_have_evicted = False

    # ------------------------------------------------------------------ one plan

    def see_plan(self, rows: Iterable[ScheduledRow]) -> None:
        """Each row in turn: what it computes may be found by those behind it."""
        rules = self.rules
        rows = list(rows)
        assert len({row.sequence.request_id for row in rows}) == len(rows) <= rules.max_num_seqs
        assert sum(row.num_tokens for row in rows) <= rules.max_num_batched_tokens
        for row in rows:
            name = row.sequence.request_id
            assert name in self.live, f"{name} is computed, and has ended"
            asked = self.live[name]
            if asked.next_start is None or row.num_preemptions > asked.num_preemptions:
                asked.num_expected = asked.may_skip_to = 0
                self._check_start(asked, row.start)
            else:
                self._check_next_start(asked, asked.next_start, row.start)
            asked.next_start = row.start
            assert 0 < row.num_tokens <= asked.num_missing, f"{name} computes what it does not have"
            assert row.samples == (row.num_tokens == asked.num_missing)
            if rules.long_prefill_token_threshold and len(self.live) > 1:
                assert row.num_tokens <= rules.long_prefill_token_threshold
            asked.next_start += row.num_tokens
            asked.num_expected += row.samples
            asked.num_preemptions = row.num_preemptions
            if asked.publishes:
                asked.num_written = max(asked.num_written, asked.next_start)
                self._publish(asked)

    def _check_start(self, asked: Asked, start: int) -> None:
        """A sequence begins, or starts over, behind what others have computed, and behind all of it if
        nothing was evicted. Never behind its last token: that gives the next one."""
        is_first = asked.next_start is None
        token_ids = asked.token_ids[: asked.num_known - 1]
        others = [other for other in self._of_the_same_salt(asked) if not (is_first and other is asked)]
        most = self._most_to_find(asked)
        if not self.rules.enable_prefix_caching:
            most = 0
        assert start <= most, f"{asked.name} found {start} tokens, and {most} exist"
        if is_first and asked.is_scored:
            assert start == 0, f"{asked.name} has to score what it found"
        elif self.rules.enable_prefix_caching and not (self.may_have_evicted or asked.is_scored):
            ends = (num_shared(token_ids, each.token_ids[: each.num_published]) for each in others)
            least = max(ends, default=0) // self.rules.block_size * self.rules.block_size
            assert start >= least, f"{asked.name} found {start} tokens of {least}"
        if is_first:
            asked.num_found = start
            self._seen["found a prefix"] += start > 0
            self._seen["found a part of a block"] += start % self.rules.block_size > 0
            if self.rules.in_order_of_arrival and not asked.is_follower:
                passed = [
                    each.name
                    for each in self.live.values()
                    if each.number < asked.number and each.next_start is None and not each.is_follower
                ]
                assert not passed, f"{asked.name} has overtaken {passed}"

    def _check_next_start(self, asked: Asked, before: int, start: int) -> None:
        """A sequence goes on where it was, or behind whole blocks that are there already: another one has
        computed them meanwhile, or it has itself, before it started over."""
        if start == before:
            return
        assert start > before, f"{asked.name} goes back from {before} to {start}"
        assert self.rules.enable_prefix_caching
        is_being_scored = asked.is_scored and before < len(asked.submit.prompt_token_ids) - 1
        assert not is_being_scored or asked.num_preemptions, f"{asked.name} skips what it has to score"
        assert before % self.rules.block_size == start % self.rules.block_size == 0
        most = max(asked.may_skip_to, self._most_to_find(asked))
        assert start <= most, f"{asked.name} skips to {start}, and {most} exist"
        self._seen["skipped blocks of another"] += 1

    def check_turns(self, computed: set[str], decoding: list[Asked], waited: list[Asked]) -> None:
        """Whose turn it was. `decoding`, `waited`: those who did so before the plan that is on its way."""
        rules = self.rules
        live = self.live.values()
        decoding = [asked for asked in decoding if asked.name in self.live and asked.runs]
        if len(decoding) <= rules.max_num_batched_tokens:
            missed = [asked.name for asked in decoding if asked.name not in computed]
            assert not missed, f"{missed} run and had no turn"
        running = [asked.number for asked in live if asked.runs]
        waiting = [asked.number for asked in live if asked.waits]
        if rules.newest_yields and running and waiting and not any(asked.is_follower for asked in live):
            assert max(running) < min(waiting), "a newer one runs while an older one waits"
        admitted = [asked.submit.priority for asked in waited if asked.name in computed]
        left = [asked for asked in waited if asked.waits and not asked.is_follower]
        if rules.classes_in_order and admitted:
            assert all(asked.submit.priority >= max(admitted) for asked in left), "a higher class waits"

    def who_might_run(self, num_free_blocks: int) -> list[Asked]:
        """Those who wait in the queue, if whoever waits has room, without help from the cache."""
        waiting = [asked for asked in self.live.values() if asked.waits]
        num_running = sum(asked.runs for asked in self.live.values())
        most = max((asked.num_known for asked in waiting), default=0)
        num_left = num_free_blocks - -(-most // self.rules.block_size)
        # One block is kept for each that runs, lest the next step throws out whom this one admits.
        has_room = num_left >= num_running < self.rules.max_num_seqs
        return [asked for asked in waiting if has_room and not asked.is_follower]

    def check_that_budget_is_used(self, rows: list[ScheduledRow], passed_over: list[Asked]) -> None:
        """`passed_over` might have run and wait still. There is no budget left for them, or one of them waits
        for the next step, which takes its prompt whole, where the end of another one has left too little."""
        budget = self.rules.max_num_batched_tokens - sum(row.num_tokens for row in rows)
        only_parts_fit = any(asked.num_known > budget for asked in passed_over)
        everyone_decodes = all(asked.num_missing <= 1 for asked in self.live.values() if asked.runs)
        ends_a_prompt = any(row.num_tokens > 1 for row in rows)
        waits_to_be_whole = only_parts_fit and everyone_decodes and ends_a_prompt
        assert budget == 0 or waits_to_be_whole, "nobody was admitted to what is free"
        self._seen["waited to be taken whole"] += budget > 0

    # ------------------------------------------------------------------ one update

    def hear(self, update: SequenceUpdate) -> None:
        name = update.request_id
        assert name in self.live, f"{name} has ended already"
        asked = self.live[name]
        answer = asked.answer
        prompt = asked.submit.prompt_token_ids
        num_top = asked.submit.sampling.prompt_logprobs
        if asked.num_said == 0:
            self.num_prompt_tokens += len(prompt)
            assert update.num_cached_tokens == min(asked.num_found, len(prompt))
            scores = [] if num_top is None else self._model.score_prompt(prompt, num_top)
            assert update.prompt_logprobs == scores, f"{name} scores its prompt otherwise"
        else:
            assert update.num_cached_tokens == 0, f"{name} tells twice what was cached"
            assert not update.prompt_logprobs, f"{name} tells twice of its prompt"
        new = update.new_token_ids
        assert len(new) == 1 <= asked.num_expected, f"{name} says {new}, which no row has sampled"
        assert new == answer.token_ids[asked.num_said : asked.num_said + 1], f"{name} says something else"
        asked.num_expected -= 1
        asked.num_said += 1
        self.num_generated_tokens += 1
        if asked.publishes:
            self._publish(asked)
        ends = asked.num_said == len(answer.token_ids)
        told = (update.finish_reason, update.stop_token_id)
        assert told == ((answer.finish_reason, answer.stop_token_id) if ends else (None, None))
        if ends:
            self._seen[f"finished: {answer.finish_reason}"] += 1
            self.end(name)

    # ------------------------------------------------------------------ inside

    def _final_length(self, submit: Submit) -> int:
        return min(len(submit.prompt_token_ids) + submit.sampling.max_tokens, self.rules.max_model_len)

    def _of_the_same_salt(self, asked: Asked) -> list[Asked]:
        return [each for each in self.everyone() if each.submit.cache_salt == asked.submit.cache_salt]

    def _most_to_find(self, asked: Asked) -> int:
        """Tokens of it that anybody has computed, itself included. The last one is of no use to it."""
        token_ids = asked.token_ids[: asked.num_known - 1]
        alike = self._of_the_same_salt(asked)
        return max(num_shared(token_ids, each.token_ids[: each.num_written]) for each in alike)

    def _publish(self, asked: Asked) -> None:
        known_and_computed = min(asked.next_start or 0, asked.num_known)
        asked.num_published = max(asked.num_published, known_and_computed)
