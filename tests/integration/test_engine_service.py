"""A real engine process over real sockets, with a fake model behind them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.messages import Bye, Dead, Heartbeat, Reject, StepResult
from tests.integration.engine_peer import (
    engine,
    expected_tokens,
    is_alive,
    peer,
    stop,
    wait_until,
)

SLOW = "fake:step_delay_ms=50"


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine.sock"


@pytest.fixture(params=[(), ("--async-scheduling",)], ids=["plain", "overlap"])
def overlap(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Flags of an engine, for what must be so with and without overlapped steps."""
    flags: tuple[str, ...] = request.param
    return flags


def test_a_submitted_request_gets_its_tokens(address: str, overlap: tuple[str, ...]) -> None:
    with engine(address, *overlap), peer(address) as gateway:
        card = gateway.hello().model
        submits = [gateway.submit(f"r{number}", [number + 40] * 40, max_tokens=8) for number in range(20)]
        gateway.wait_until_finished(*(submit.request_id for submit in submits))
        for submit in submits:
            assert gateway.tokens(submit.request_id) == expected_tokens(submit)
        gateway.wait_until_idle()
        assert card.architecture == "FakeModel"


def test_one_message_per_step_holds_all_requests_of_a_gateway(address: str) -> None:
    with engine(address, source=SLOW), peer(address) as gateway:
        gateway.hello()
        for number in range(4):
            gateway.submit(f"r{number}", max_tokens=6)
        gateway.wait_until_finished("r0", "r1", "r2", "r3")
        steps = [message for message in gateway.messages if isinstance(message, StepResult)]
        assert len(steps) <= 8
        assert max(len(step.updates) for step in steps) == 4


def test_the_text_bundle_is_sent_only_to_those_who_lack_it(address: str) -> None:
    with engine(address), peer(address) as gateway:
        first = gateway.hello()
        assert first.text_bundle is not None
        assert first.text_bundle.content_hash == first.text_bundle_hash
        with peer(address, "gateway-b") as other:
            assert other.hello(known_bundles=(first.text_bundle_hash,)).text_bundle is None


def test_a_gateway_of_another_protocol_version_is_told_and_not_served(address: str) -> None:
    with engine(address) as process:
        with peer(address) as gateway:
            gateway.hello(version=999)
            gateway.submit("r")
            assert gateway.wait_for_reject("r").code == "internal_error"
        stop(process)
        assert process.stderr is not None
        assert "protocol version 999" in process.stderr.read()


def test_what_cannot_run_is_rejected_and_the_rest_goes_on(address: str) -> None:
    with engine(address), peer(address) as gateway:
        gateway.hello()
        gateway.submit("good", max_tokens=20)
        gateway.submit("bad", [99_999])
        gateway.submit("long", [65] * 5000)
        gateway.socket.send_multipart([b"\x02", b"not msgpack"])
        gateway.socket.send_multipart([b"\xff", b"no such type", b"and a frame too many"])
        assert gateway.wait_for_reject("bad").param == "prompt"
        assert gateway.wait_for_reject("long").code == "context_length_exceeded"
        gateway.wait_until_finished("good")


def test_an_abort_ends_a_request_within_a_second(address: str, overlap: tuple[str, ...]) -> None:
    with engine(address, *overlap, source=SLOW), peer(address) as gateway:
        gateway.hello()
        gateway.submit("r", max_tokens=2000)
        gateway.submit("aborted before it is seen", max_tokens=2000)
        gateway.abort("aborted before it is seen")
        gateway.wait_for(StepResult)
        aborted_s = time.monotonic()
        gateway.abort("r")
        gateway.wait_until_idle()
        assert time.monotonic() - aborted_s < 1.0
        gateway.abort("r", "unknown")  # idempotent
        gateway.submit("next")
        gateway.wait_until_finished("next")


def test_an_abort_may_name_one_request_twice_and_requests_that_are_none(address: str) -> None:
    with engine(address, source=SLOW), peer(address) as gateway:
        gateway.hello()
        gateway.submit("twice", max_tokens=1000)
        gateway.wait_for(StepResult)
        gateway.abort("twice", "none", "twice", "")
        gateway.abort("twice", "twice")
        gateway.submit("after", max_tokens=3)
        gateway.wait_until_finished("after")
        assert len(gateway.tokens("after")) == 3


def test_an_abort_during_a_step_drops_what_the_step_has_computed(
    address: str, overlap: tuple[str, ...]
) -> None:
    with engine(address, *overlap, source="fake:step_delay_ms=1800"), peer(address) as gateway:
        gateway.hello()
        gateway.submit("r", max_tokens=2000)
        gateway.wait_for(Heartbeat)
        gateway.wait_for(Heartbeat)  # at least half a second after the first; the step still runs
        gateway.abort("r")
        gateway.wait_for(Heartbeat, lambda beat: beat.load.num_steps == 1)
        gateway.wait_until_idle()
        assert gateway.tokens("r") == []


def test_gateways_get_only_what_is_theirs_and_abort_only_what_is_theirs(address: str) -> None:
    with engine(address), peer(address, "gateway-a") as a, peer(address, "gateway-b") as b:
        a.hello()
        b.hello()
        ours = [a.submit(f"a{number}", [50 + number], max_tokens=30) for number in range(5)]
        theirs = [b.submit(f"b{number}", [70 + number], max_tokens=30) for number in range(5)]
        b.abort(*(submit.request_id for submit in ours))
        a.wait_until_finished(*(submit.request_id for submit in ours))
        b.wait_until_finished(*(submit.request_id for submit in theirs))
        assert a.finished() == {submit.request_id for submit in ours}
        assert b.finished() == {submit.request_id for submit in theirs}
        for submit in ours:
            assert a.tokens(submit.request_id) == expected_tokens(submit)


def test_the_requests_of_a_gateway_that_vanishes_are_aborted(address: str) -> None:
    with engine(address, source=SLOW), peer(address, "stays") as stays:
        stays.hello()
        with peer(address, "vanishes") as vanishes:
            vanishes.hello()
            for number in range(10):
                vanishes.submit(f"r{number}", max_tokens=2000)
            vanishes.wait_for(StepResult)
            stays.wait_for(Heartbeat, lambda beat: beat.load.num_running == 10)
        stays.wait_until_idle()


def test_a_gateway_that_connects_again_under_its_name_starts_anew(address: str) -> None:
    with engine(address, source=SLOW):
        with peer(address, "same") as before:
            before.hello()
            before.submit("old", max_tokens=2000)
            before.wait_for(StepResult)
        with peer(address, "same") as after:
            after.hello()
            after.submit("new")
            after.wait_until_finished("new")
            after.wait_until_idle()
            assert len(after.tokens("old")) <= 2  # what was on its way; a gateway knows no such request


def test_heartbeats_come_during_a_long_step(address: str) -> None:
    with engine(address, source="fake:step_delay_ms=2500"), peer(address) as gateway:
        gateway.hello()
        gateway.submit("r", max_tokens=1)
        gateway.wait_until_finished("r")
        assert sum(isinstance(message, Heartbeat) for message in gateway.messages) >= 4


# ---------------------------------------------------------------------- ends


def test_sigterm_lets_the_running_finish_and_refuses_the_new(address: str, overlap: tuple[str, ...]) -> None:
    with engine(address, *overlap, source=SLOW) as process, peer(address) as gateway:
        gateway.hello()
        submit = gateway.submit("running", max_tokens=20)
        gateway.wait_for(StepResult)
        process.send_signal(signal.SIGTERM)
        gateway.wait_for(Bye)
        gateway.submit("late")
        assert gateway.wait_for_reject("late").code == "draining"
        with peer(address, "newcomer") as newcomer:
            newcomer.hello()
            newcomer.wait_for(Bye)
            gateway.wait_until_finished("running")
        assert gateway.tokens("running") == expected_tokens(submit)
        assert process.wait(10) == 0
        assert not Path(address.removeprefix("ipc://")).exists()


def test_what_is_not_done_at_the_drain_limit_is_given_back(address: str) -> None:
    with engine(address, "--drain-timeout", "0.5", source=SLOW) as process, peer(address) as gateway:
        gateway.hello()
        gateway.submit("endless", max_tokens=3000)
        gateway.wait_for(StepResult)
        process.send_signal(signal.SIGTERM)
        assert gateway.wait_for_reject("endless").code == "draining"
        assert process.wait(10) == 0


def test_a_step_that_fails_is_told_to_all_and_ends_the_process(
    address: str, overlap: tuple[str, ...]
) -> None:
    with engine(address, *overlap, source="fake:die_at_step=3") as process:
        with peer(address, "a") as a, peer(address, "b") as b:
            b.hello()
            a.hello()
            a.submit("r", max_tokens=100)
            assert "told to fail" in a.wait_for(Dead).reason
            b.wait_for(Dead)
            assert len(a.tokens("r")) == 2
        assert process.wait(10) == 1


def test_an_engine_starts_again_where_another_was_killed(address: str) -> None:
    with engine(address, source=SLOW) as first, peer(address) as gateway:
        epoch = gateway.hello().epoch
        gateway.submit("r", max_tokens=1000)
        gateway.wait_for(StepResult)
        first.kill()
        first.wait()
    assert Path(address.removeprefix("ipc://")).exists()
    with engine(address), peer(address) as gateway:
        assert gateway.hello().epoch != epoch
        gateway.submit("r")
        gateway.wait_until_finished("r")


def test_two_engines_do_not_share_an_address(address: str) -> None:
    with engine(address), peer(address) as gateway:
        gateway.hello()
        with engine(address) as second:
            assert second.wait(10) == 2
            assert second.stderr is not None
            assert "another process listens" in second.stderr.read()
        gateway.submit("r")
        gateway.wait_until_finished("r")


def test_an_engine_dies_with_its_parent(address: str) -> None:
    program = (
        "import os, sys, subprocess, time\n"
        "command = [sys.executable, '-m', 'engine_service', '--source', 'fake:',"
        " '--bind', sys.argv[1], '--parent-pid', str(os.getpid())]\n"
        "print(subprocess.Popen(command).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program, address]
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        engine_pid = int(parent.stdout.readline())
        with peer(address) as gateway:
            gateway.hello()
            parent.kill()
            wait_until(lambda: not is_alive(engine_pid), timeout_s=5)


def test_an_engine_that_is_not_its_parents_child_any_more_does_not_start(address: str) -> None:
    with engine(address, "--parent-pid", str(os.getppid())) as process:
        assert process.wait(10) == 1


@pytest.mark.parametrize("bind", ["udp://x", "tcp://nowhere", "ipc:///" + "x" * 120, "tcp://256.0.0.1:5"])
def test_a_wrong_address_is_a_configuration_error(bind: str) -> None:
    with engine(bind) as process:
        assert process.wait(10) == 2


def test_requests_beyond_the_queue_are_rejected(tmp_path: Path, address: str) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(
        '[[models]]\nname = "tiny"\nsource = "fake:step_delay_ms=50"\n'
        "max_num_seqs = 1\nmax_queued_requests = 3\nmax_model_len = 100\n"
    )
    with engine(address, "--config", str(config), source=None), peer(address) as gateway:
        assert gateway.hello().model.name == "tiny"
        gateway.submit("running", max_tokens=20)
        gateway.wait_for(StepResult)
        for number in range(8):
            gateway.submit(f"r{number}", max_tokens=1)
        rejects = [gateway.wait_for(Reject) for _ in range(5)]
        assert {reject.code for reject in rejects} == {"queue_full"}
        assert [reject.request_id for reject in rejects] == ["r3", "r4", "r5", "r6", "r7"]
        gateway.wait_until_finished("running", "r0", "r1", "r2")


def test_start_to_hello_takes_less_than_two_seconds_without_weights(address: str) -> None:
    started_s = time.monotonic()
    with engine(address, source="fake:", fresh=True), peer(address) as gateway:
        gateway.hello()
        assert time.monotonic() - started_s < 2.0


def test_a_dealer_that_never_says_hello_is_told_so(address: str) -> None:
    with engine(address), peer(address) as stranger:
        stranger.submit("r")
        assert stranger.wait_for_reject("r").code == "internal_error"
