"""AsyncLLM: streams that share the batch and leave nothing behind. On the fake model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from engine_service import (
    LLM,
    AsyncLLM,
    EngineFailedError,
    GenerationError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)

LONG = SamplingParams(max_tokens=4000, seed=1)  # 20 s on the slow model
SHORT = SamplingParams(max_tokens=5, seed=1)


@pytest.fixture
def slow() -> Iterator[AsyncLLM]:
    """5 ms a step, two sequences at a time."""
    llm = AsyncLLM("fake:step_delay_ms=5", max_num_seqs=2)
    yield llm
    llm.shutdown()


async def collect(llm: AsyncLLM, prompt: str, params: SamplingParams, request_id: str) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, request_id)]


async def first(llm: AsyncLLM, prompt: str, request_id: str) -> None:
    """Reads one output of a long request, then closes the iterator."""
    stream = llm.generate(prompt, LONG, request_id)
    assert not (await anext(stream)).finished
    await stream.aclose()


async def test_each_output_holds_all_there_is_and_the_last_is_what_the_other_class_gives(slow):
    params = SamplingParams(n=2, max_tokens=20, seed=3)
    outputs = await collect(slow, "water", params, "r")
    assert len(outputs) > 2
    assert {output.request_id for output in outputs} == {"r"}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for earlier, later in itertools.pairwise(outputs):
        for before, after in zip(earlier.outputs, later.outputs, strict=True):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert after.text.startswith(before.text)
    with LLM("fake:") as llm:
        [expected] = llm.generate("water", params, use_tqdm=False)
    assert outputs[-1].outputs == expected.outputs


async def test_requests_share_the_batch(slow):
    events: list[tuple[str, bool]] = []

    async def listen(name: str) -> None:
        async for output in slow.generate(name, SamplingParams(max_tokens=40), name):
            event = (name, output.finished)
            events.append(event)

    await asyncio.gather(listen("a"), listen("b"))
    first_end = next(at for at, (_, is_finished) in enumerate(events) if is_finished)
    assert {name for name, _ in events[:first_end]} == {"a", "b"}


async def test_closing_the_iterator_ends_the_request(slow):
    # Two more than run at once: what went on running would hold up the last one for 20 s.
    await asyncio.gather(*(first(slow, "water", str(number)) for number in range(4)))
    async with asyncio.timeout(10):
        assert (await collect(slow, "next", SHORT, "0"))[-1].finished


async def test_cancelling_the_task_ends_the_request(slow):
    begun = asyncio.Event()

    async def listen(name: str) -> None:
        async for _ in slow.generate("water", LONG, name):
            begun.set()

    tasks = [asyncio.create_task(listen(name)) for name in ("a", "b", "c")]
    await begun.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(10):
        assert (await collect(slow, "next", SHORT, "a"))[-1].finished


async def test_an_abort_by_id_ends_the_stream_with_what_there_is(slow):
    outputs = []
    async with asyncio.timeout(10):
        async for output in slow.generate("water", LONG, "r"):
            outputs.append(output)
            await slow.abort("r")
            await slow.abort("never known")
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert outputs[-1].outputs[0].token_ids


async def test_an_abort_before_the_prompt_is_encoded_counts_too(slow):
    task = asyncio.create_task(collect(slow, "water", LONG, "r"))
    await asyncio.sleep(0)  # lets the task begin
    await slow.abort("r")
    async with asyncio.timeout(10):
        assert (await task)[-1].outputs[0].finish_reason == "abort"


async def test_what_is_wrong_with_one_request_concerns_no_other(slow):
    other = asyncio.create_task(collect(slow, "water", SHORT, "other"))
    with pytest.raises(ValueError, match="no tokens"):
        await collect(slow, "", SHORT, "r")
    with pytest.raises(ValueError, match="5000 tokens"):
        await collect(slow, "x" * 5000, SHORT, "r")
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    with pytest.raises(GenerationError) as caught:
        await collect(slow, "water", bad, "r")
    assert caught.value.outputs[0].error
    assert (await other)[-1].outputs[0].finish_reason == "length"


async def test_a_request_id_is_used_once_at_a_time(slow):
    stream = slow.generate("water", LONG, "r")
    await anext(stream)
    with pytest.raises(ValueError, match="'r' is in use"):
        await collect(slow, "water", SHORT, "r")
    await stream.aclose()


async def test_a_failed_step_and_a_shutdown_fail_what_runs(slow):
    dying = AsyncLLM("fake:die_at_step=3")
    with pytest.raises(EngineFailedError, match="step 3 was told to fail"):
        await collect(dying, "water", LONG, "r")
    stream = slow.generate("water", LONG, "r")
    await anext(stream)
    slow.shutdown()
    with pytest.raises(EngineFailedError, match="shut down"):
        async for _ in stream:
            pass
    with pytest.raises(EngineFailedError, match="shut down"):
        await collect(slow, "water", SHORT, "s")
