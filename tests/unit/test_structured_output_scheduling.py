"""Grammars in the scheduler: who waits for one, when it advances, and what ends with it. Fake model."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine_service.refusal import Refusal
from engine_service.step_loop import StepLoop
from engine_service.structured_output.grammar import refused
from engine_service.structured_output.grammar_desk import COMPILE_TIMEOUT_S, GrammarDesk
from engine_service.transport.inbox import DrainRequested, GatewayAddress, Inbox, SubmitReceived
from shared.identifiers import EngineEpoch
from tests.unit.grammar_worlds import WAIT_S, CountGrammar, ToldCompiler, form, run_to_the_end
from tests.unit.worlds import EOS, World, expected_output, make_prompt, make_submit, make_world


class Desk:
    """A world whose grammars come when the test says so."""

    def __init__(self, **options) -> None:
        self.compiler = ToldCompiler()
        self.grammars = GrammarDesk(self.compiler)
        self.world: World = make_world(grammars=self.grammars, **options)
        self._woken = threading.Semaphore(0)
        self.world.engine.wake_with(self._woken.release)

    def give(self, text: str, result) -> None:
        """Lets the compilation of this text end, and waits until the desk has the result."""
        assert self.compiler.asked.get(timeout=WAIT_S).text == text
        self.compiler.tell(text, result)
        assert self._woken.acquire(timeout=WAIT_S)

    def prepare(self, text: str, length: int) -> CountGrammar:
        """A compiled grammar of so many tokens."""
        grammar = CountGrammar(length)
        self.world.add("first", [1], structured_output=form("grammar", text))
        self.give(text, grammar)
        self.world.run()
        grammar.states.clear()
        return grammar


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.grammars.close()


def test_a_sequence_without_its_grammar_is_passed_by_and_runs_when_it_has_come(desk):
    world = desk.world
    world.add("waits", make_prompt(6), max_tokens=20, structured_output=form("grammar", "slow"))
    behind = world.add("behind", make_prompt(6, 100), max_tokens=5)
    for _ in range(5):
        world.step()
    assert world.output["behind"] == expected_output(behind)
    assert world.output["waits"] == []
    assert world.engine.only_awaits_grammars
    assert world.engine.load().num_waiting == 1
    desk.give("slow", CountGrammar(3))
    world.run()
    assert len(world.output["waits"]) == 3
    assert world.last_update["waits"].finish_reason == "stop"
    world.assert_idle()


def test_a_slow_compilation_costs_other_sequences_no_step(desk):
    world = desk.world
    running = world.add("running", make_prompt(5), max_tokens=12)
    world.step()
    world.add("waits", make_prompt(6), structured_output=form("grammar", "slow"))
    for _ in range(11):
        (update,) = world.step()
        assert len(update.new_token_ids) == 1
    assert world.output["running"] == expected_output(running)
    desk.give("slow", CountGrammar(1))
    world.run()


def test_a_grammar_that_never_comes_is_refused_in_time_and_the_others_finish(desk):
    world = desk.world
    world.add("never", make_prompt(6), structured_output=form("grammar", "never"))
    other = world.add("other", make_prompt(6, 100))
    assert desk.compiler.asked.get(timeout=WAIT_S).text == "never"
    world.step()
    world.clock.now_s += COMPILE_TIMEOUT_S
    world.run()
    assert world.refusals["never"].code == "invalid_request"
    assert world.refusals["never"].param == "response_format"
    assert world.output["other"] == expected_output(other)
    world.assert_idle()


def test_whoever_only_queued_for_a_worker_is_told_to_come_again(desk):
    world = desk.world
    for name in ("one", "two", "three"):
        world.add(name, [1], structured_output=form("grammar", name))
    assert {desk.compiler.asked.get(timeout=WAIT_S).text for _ in range(2)} == {"one", "two"}
    world.clock.now_s += COMPILE_TIMEOUT_S
    world.step()
    assert {name: refusal.code for name, refusal in world.refusals.items()} == {
        "one": "invalid_request",
        "two": "invalid_request",
        "three": "queue_full",
    }


def test_a_bad_form_ends_its_own_request_and_is_remembered(desk):
    world = desk.world
    world.add("bad", make_prompt(6), structured_output=form("grammar", "bad"))
    other = world.add("other", make_prompt(6, 100))
    desk.give("bad", refused("it makes no sense"))
    world.run()
    assert world.refusals["bad"].message == "it makes no sense"
    assert world.output["other"] == expected_output(other)
    with pytest.raises(Refusal, match="it makes no sense"):
        world.add("again", make_prompt(6), structured_output=form("grammar", "bad"))
    assert desk.compiler.asked.empty()
    world.assert_idle()


def test_a_compiler_that_fails_ends_the_request_and_not_the_worker(desk):
    class Panic(BaseException):
        pass

    world = desk.world
    for number in range(5):  # more than there are workers
        world.add(f"r{number}", [1], structured_output=form("grammar", "x"))
        desk.give("x", Panic())
        world.run()
        assert world.refusals[f"r{number}"].code == "internal_error"


def test_one_compilation_serves_all_who_wait_for_it(desk):
    world = desk.world
    for number in range(4):
        world.add(f"r{number}", make_prompt(4, number), seed=number, structured_output=form("grammar", "x"))
    grammar = CountGrammar(3)
    desk.give("x", grammar)
    world.run()
    assert len(grammar.states) == 4
    assert desk.compiler.asked.empty()
    for number in range(4):
        assert len(world.output[f"r{number}"]) == 3


def test_an_aborted_request_waits_for_nothing_and_its_grammar_is_kept(desk):
    world = desk.world
    world.add("gone", make_prompt(6), structured_output=form("grammar", "x"))
    assert world.abort("gone")
    world.assert_idle()
    world.add("stays", make_prompt(6), structured_output=form("grammar", "x"))
    while world.engine.has_work:
        desk.compiler.tell("x", CountGrammar(2))
        world.step()
    assert len(world.output["stays"]) == 2


def test_a_deferred_request_that_expires_is_dropped(desk):
    world = desk.world
    world.add("late", make_prompt(6), timeout_s=1.0, structured_output=form("grammar", "x"))
    world.clock.now_s += 1.0
    (update,) = world.step()
    assert update.finish_reason == "abort"
    world.assert_idle()


def test_deferred_requests_count_as_queued(desk):
    desk = Desk(max_queued_requests=2)
    for name in ("one", "two"):
        desk.world.add(name, [1], structured_output=form("grammar", name))
    with pytest.raises(Refusal) as refusal:
        desk.world.add("three", [1], structured_output=form("grammar", "three"))
    assert refusal.value.code == "queue_full"
    desk.grammars.close()


@pytest.mark.parametrize("preempt_every", [0, 2, 3])
def test_the_state_takes_each_token_once_whatever_is_preempted(preempt_every):
    desk = Desk(num_blocks=10, force_preemption_every=preempt_every, max_num_batched_tokens=7)
    grammar = desk.prepare("x", 9)
    for number in range(4):
        desk.world.add(
            f"r{number}", make_prompt(8, 10 * number), max_tokens=20, structured_output=form("grammar", "x")
        )
    run_to_the_end(desk.world)
    accepted = sorted(state.accepted for state in grammar.states)
    assert accepted == sorted(desk.world.output[f"r{number}"] for number in range(4))
    if preempt_every:
        assert desk.world.scheduler.num_preemptions > 0
    desk.grammars.close()


def test_the_state_is_not_advanced_after_the_end(desk):
    """Neither by the token that ends the sequence, nor by one that comes for an aborted row."""
    grammar = desk.prepare("x", 50)
    world = desk.world
    one_of_ten = tuple(range(10))
    world.add("stopped", [1], max_tokens=9, stop_token_ids=one_of_ten, structured_output=form("grammar", "x"))
    world.add("aborted", [1], max_tokens=9, structured_output=form("grammar", "x"))
    world.step(aborts=("aborted",))
    world.run()
    assert world.last_update["stopped"].finish_reason == "stop"
    assert [state.accepted for state in grammar.states] == [[], []]


def test_a_continuation_goes_on_where_it_was(desk):
    grammar = desk.prepare("x", 5)
    world = desk.world
    world.add("moved", [1], max_tokens=9, output=[3, 4, 5], structured_output=form("grammar", "x"))
    world.run()
    assert len(world.output["moved"]) == 2
    assert grammar.states[0].accepted == [3, 4, 5, *world.output["moved"]]
    with pytest.raises(Refusal) as refusal:
        world.add("odd", [1], max_tokens=9, output=[3, 77], structured_output=form("grammar", "x"))
    assert refusal.value.code == "invalid_request"
    world.assert_idle()


def test_a_continuation_that_does_not_fit_a_grammar_still_to_come_is_refused(desk):
    world = desk.world
    world.add("odd", [1], max_tokens=9, output=[77], structured_output=form("grammar", "x"))
    other = world.add("other", [2])
    desk.give("x", CountGrammar(4))
    world.run()
    assert world.refusals["odd"].code == "invalid_request"
    assert world.output["other"] == expected_output(other)


def test_a_grammar_that_fails_on_the_way_ends_its_own_sequence(desk):
    class FailingState:
        is_complete = False

        def accept(self, token_id: int) -> None:
            raise refused("it has become too complex")

        def mask(self) -> None:
            return None

    class FailingGrammar:
        def start(self, output_token_ids=()) -> FailingState:
            return FailingState()

    world = desk.world
    world.add("fails", [1], structured_output=form("grammar", "x"))
    other = world.add("other", [2])
    desk.give("x", FailingGrammar())
    world.run()
    assert world.refusals["fails"].message == "it has become too complex"
    assert world.output["other"] == expected_output(other)
    world.assert_idle()


def test_a_form_that_is_complete_at_the_limit_is_a_stop(desk):
    desk.prepare("x", 5)
    world = desk.world
    world.add("exact", [1], max_tokens=5, structured_output=form("grammar", "x"))
    world.add("short", [1], max_tokens=4, structured_output=form("grammar", "x"))
    world.run()
    assert world.last_update["exact"].finish_reason == "stop"
    assert world.last_update["short"].finish_reason == "length"


def test_a_form_ends_before_min_tokens_and_although_eos_is_ignored(desk):
    desk.prepare("x", 3)
    world = desk.world
    world.add(
        "form", [1], max_tokens=9, min_tokens=8, ignore_eos=True, structured_output=form("grammar", "x")
    )
    world.run()
    assert len(world.output["form"]) == 3
    assert world.last_update["form"].finish_reason == "stop"
    assert world.last_update["form"].stop_token_id is None


def test_without_a_desk_structured_output_is_refused():
    world = make_world()
    with pytest.raises(Refusal) as refusal:
        world.add("x", [1], structured_output=form("json_object"))
    assert refusal.value.param == "response_format"
    assert EOS not in world.output


class RecordingOutbox:
    """Stands for the Outbox: keeps what the loop hands out."""

    def __init__(self) -> None:
        self.load: Any = None
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, item: Any) -> None:
        self.items.put(item)


class CountingInbox(Inbox):
    num_takes = 0

    def take(self, *, wait: bool, timeout_s: float | None = None):
        self.num_takes += 1
        return super().take(wait=wait, timeout_s=timeout_s)


def test_the_loop_sleeps_while_all_wait_for_grammars_and_wakes_for_one(desk):
    inbox, outbox = CountingInbox(10), RecordingOutbox()
    loop = StepLoop(desk.world.engine, inbox, outbox, EngineEpoch("e"))  # type: ignore[arg-type]
    thread = threading.Thread(target=loop.run)
    thread.start()
    submit = make_submit("waits", [1], structured_output=form("grammar", "x"))
    inbox.offer(SubmitReceived(GatewayAddress(b"g"), submit, 0.0))
    assert desk.compiler.asked.get(timeout=WAIT_S).text == "x"
    begun = time.monotonic()
    num_takes = inbox.num_takes
    with pytest.raises(queue.Empty):
        outbox.items.get(timeout=0.3)
    assert inbox.num_takes - num_takes <= 2 + (time.monotonic() - begun) / 0.1
    desk.compiler.tell("x", CountGrammar(2))
    for _ in range(2):
        assert outbox.items.get(timeout=WAIT_S).updates[b"g"][0].new_token_ids
    inbox.put(DrainRequested(0.0))
    thread.join(WAIT_S)
    assert desk.compiler.is_closed
