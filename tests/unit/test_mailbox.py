"""The mailbox between the engine link and one handler."""

import asyncio
import time

import pytest

from gateway.mailbox import Mailbox, MailboxOverflowError
from shared.identifiers import RequestId
from shared.messages import Beam, SequenceUpdate, TokenLogprobs

A, B = RequestId("a"), RequestId("b")


async def test_updates_merge_while_the_reader_is_busy():
    mailbox = Mailbox({A: 10, B: 10})
    mailbox.put(SequenceUpdate(A, [1, 2], num_cached_tokens=16))
    mailbox.put(SequenceUpdate(B, [7]))
    mailbox.put(SequenceUpdate(A, [3], "stop", 3))
    pending = await mailbox.take()
    assert pending[A].new_token_ids == [1, 2, 3]
    assert (pending[A].finish_reason, pending[A].stop_token_id) == ("stop", 3)
    assert pending[A].num_cached_tokens == 16
    assert pending[B].new_token_ids == [7]


async def test_log_probabilities_merge_like_their_tokens():
    mailbox = Mailbox({A: 10})
    first, second = TokenLogprobs(1, -0.5, 1, [(1, -0.5)]), TokenLogprobs(2, -1.5, 3)
    update = SequenceUpdate(A, [1], logprobs=[first])
    mailbox.put(update)
    mailbox.put(SequenceUpdate(A, [2], logprobs=[second]))
    assert (await mailbox.take())[A].logprobs == [first, second]
    assert update.logprobs == [first], "the update itself is left as it came"


async def test_what_came_before_a_failure_is_delivered_before_it():
    mailbox = Mailbox({A: 10})
    mailbox.put(SequenceUpdate(A, [1]))
    mailbox.fail(ConnectionError("engine lost"))
    assert (await mailbox.take())[A].new_token_ids == [1]
    with pytest.raises(ConnectionError):
        await mailbox.take()


async def test_the_beams_of_a_search_come_with_its_end():
    mailbox = Mailbox({A: 2})
    beam = Beam([1, 2], -0.5, "stop", 2)
    mailbox.put(SequenceUpdate(A, [], num_cached_tokens=16))
    mailbox.put(SequenceUpdate(A, [], "stop", beams=[beam, beam]))
    pending = (await mailbox.take())[A]
    assert (pending.beams, pending.finish_reason, pending.num_cached_tokens) == ([beam] * 2, "stop", 16)


@pytest.mark.parametrize(
    "update",
    [SequenceUpdate(A, [1, 2, 3]), SequenceUpdate(A, [], "length", beams=[Beam([1, 2, 3], -0.5, "length")])],
)
async def test_an_engine_that_sends_more_than_was_asked_for_fails_the_request(update):
    mailbox = Mailbox({A: 2})
    mailbox.put(update)
    with pytest.raises(MailboxOverflowError):
        await mailbox.take()


async def test_take_waits_for_something_to_come():
    mailbox = Mailbox({A: 2})
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    mailbox.put(SequenceUpdate(A, [1]))
    assert (await taking)[A].new_token_ids == [1]


async def test_it_remembers_when_the_first_update_came():
    mailbox = Mailbox({A: 10})
    assert mailbox.first_put_at is None
    before = time.monotonic()
    mailbox.put(SequenceUpdate(A, [1]))
    first = mailbox.first_put_at
    assert before <= first <= time.monotonic()
    await mailbox.take()
    mailbox.put(SequenceUpdate(A, [2]))
    assert mailbox.first_put_at == first
