"""LLM: prompts in, outputs out, whatever the engine has to do meanwhile. On the fake model."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine_service import (
    LLM,
    EngineFailedError,
    GenerationError,
    Logprob,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from engine_service.fake_model import load_fake_model
from engine_service.fake_runner import FakeModel
from engine_service.offline.offline_request import OfflineRequest
from engine_service.offline.prompts import EncodedPrompt
from shared.byte_text import byte_text_bundle
from shared.config import ModelConfig
from shared.errors import ConfigError
from shared.sampling import SamplingParams as EngineParams
from shared.tokenizer import Tokenizer

ENDLESS = FakeModel()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("fake:", max_num_seqs=4, max_queued_requests=2, max_model_len=512) as llm:
        yield llm


def generate(llm: LLM, prompts: Any, params: Any = None) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def expected_ids(prompt: str, max_tokens: int, *, seed: int, temperature: float = 1.0) -> list[int]:
    sampling = EngineParams(max_tokens=max_tokens, seed=seed, temperature=temperature)
    return ENDLESS.generate(list(prompt.encode()), max_tokens, sampling)


def text_of(token_ids: list[int]) -> str:
    return bytes(token_ids).decode()


def test_importing_the_package_loads_no_torch():
    code = (
        "import sys, engine_service\n"
        "assert 'pydantic' not in sys.modules\n"
        "from engine_service import LLM, SamplingParams, AsyncLLM\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_outputs_are_in_the_order_of_the_prompts_also_beyond_the_queue_bound(llm):
    prompts = [f"prompt {number}" for number in range(60)]
    params = [SamplingParams(max_tokens=1 + 7 * n % 13, seed=n) for n in range(len(prompts))]
    outputs = generate(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        [choice] = output.outputs
        assert choice.token_ids == expected_ids(prompt, 1 + 7 * number % 13, seed=number)
        assert choice.text == text_of(choice.token_ids)
        assert (choice.finish_reason, choice.stop_reason) == ("length", None)
        assert output.finished
        assert output.prompt_token_ids == list(prompt.encode())
    assert len({output.request_id for output in outputs}) == len(prompts)


def test_every_form_of_a_prompt_is_understood(llm):
    params = SamplingParams(max_tokens=5, temperature=0)
    [from_text] = generate(llm, "water", params)
    token_ids = list(b"water")
    others = generate(llm, [token_ids, {"prompt": "water"}, {"prompt_token_ids": token_ids}], params)
    others += generate(llm, token_ids, params)
    assert [other.outputs[0].text for other in others] == [from_text.outputs[0].text] * 4
    assert [other.prompt for other in others] == [None, "water", None, None]
    assert generate(llm, []) == []


def test_without_parameters_16_tokens_come(llm):
    [output] = generate(llm, "water")
    assert len(output.outputs[0].token_ids) == 16


def test_choices_have_seeds_that_follow_each_other(llm):
    [output] = generate(llm, "water", SamplingParams(n=3, seed=40, max_tokens=6))
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert [choice.token_ids for choice in output.outputs] == [
        expected_ids("water", 6, seed=seed) for seed in (40, 41, 42)
    ]


def test_drawn_seeds_differ_between_requests_and_repeat_with_the_seed_of_the_model():
    def texts(seed: int) -> list[str]:
        with LLM("fake:", seed=seed) as llm:
            return [output.outputs[0].text for output in generate(llm, ["water"] * 3)]

    first = texts(5)
    assert len(set(first)) == 3
    assert texts(5) == first
    assert texts(6) != first


def test_a_stop_string_ends_the_sequence_and_tokens_behind_it_are_not_counted(llm):
    token_ids = expected_ids("water", 100, seed=0, temperature=0)
    text = text_of(token_ids)
    stop = text[20:23]
    assert text.find(stop) == 20, "the fake model repeats itself; choose another place"
    params = {"temperature": 0.0, "max_tokens": 100, "stop": ["never that", stop]}
    [cut] = generate(llm, "water", SamplingParams(**params))[0].outputs
    assert (cut.text, cut.token_ids) == (text[:20], token_ids[:23])
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    [kept] = generate(llm, "water", SamplingParams(**params, include_stop_str_in_output=True))[0].outputs
    assert (kept.text, kept.token_ids, kept.stop_reason) == (text[:23], token_ids[:23], stop)
    [late] = generate(llm, "water", SamplingParams(**params, min_tokens=50))[0].outputs
    assert late.text.startswith(text[:50])


def test_a_stop_token_is_named_and_hidden_from_the_text(llm):
    token_ids = expected_ids("water", 100, seed=0, temperature=0)
    at = next(at for at in range(10, 100) if token_ids[at] not in token_ids[:at])
    params = {"temperature": 0.0, "max_tokens": 100, "stop_token_ids": [token_ids[at]]}
    [choice] = generate(llm, "water", SamplingParams(**params))[0].outputs
    assert (choice.token_ids, choice.text) == (token_ids[: at + 1], text_of(token_ids[:at]))
    assert (choice.finish_reason, choice.stop_reason) == ("stop", token_ids[at])
    [kept] = generate(llm, "water", SamplingParams(**params, include_stop_str_in_output=True))[0].outputs
    assert kept.text == text_of(token_ids[: at + 1])


def test_the_end_of_sequence_has_no_stop_reason():
    with LLM("fake:eos_every=5") as llm:
        [choice] = generate(llm, "water", SamplingParams(max_tokens=200, seed=1))[0].outputs
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert choice.token_ids[-1] == 256
    assert choice.text == text_of(choice.token_ids[:-1])


def test_max_tokens_is_cut_to_the_room_there_is(llm):
    [unlimited, more] = generate(
        llm, ["water"] * 2, [SamplingParams(max_tokens=None), SamplingParams(max_tokens=10**6)]
    )
    assert len(unlimited.outputs[0].token_ids) == len(more.outputs[0].token_ids) == 512 - len("water")
    with LLM("fake:", num_gpu_blocks_override=2, block_size=16) as small:
        [output] = generate(small, "water", SamplingParams(max_tokens=None))
    assert len(output.outputs[0].token_ids) == 2 * 16 + 1 - len("water")


def test_a_repeated_prompt_is_found_in_the_cache():
    prompt = "a" * 100
    with LLM("fake:", block_size=16) as llm:
        assert [generate(llm, prompt)[0].num_cached_tokens for _ in range(2)] == [0, 99]
    with LLM("fake:", block_size=16, enable_prefix_caching=False) as llm:
        assert [generate(llm, prompt)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_chat_answers_one_conversation_or_many(llm):
    first = [{"role": "user", "content": "hello"}]
    second = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
    ]
    params = SamplingParams(max_tokens=5, temperature=0)
    [alone] = llm.chat(first, params, use_tqdm=False)
    both = llm.chat([first, second], params, use_tqdm=False)
    assert both[0].outputs == alone.outputs
    assert alone.prompt == "<|user|>hello<|end|><|assistant|>"
    assert both[1].prompt == "<|system|>be short<|end|>" + alone.prompt
    assert generate(llm, [alone.prompt_token_ids], params)[0].outputs == alone.outputs
    with pytest.raises(ValueError, match=r"messages\[1\]: .*unknown role wizard"):
        llm.chat([first, [{"role": "wizard", "content": "hm"}]], use_tqdm=False)


def test_logprobs_come_for_every_token(llm):
    [plain, scored] = generate(
        llm, ["water"] * 2, [SamplingParams(seed=1), SamplingParams(seed=1, logprobs=2)]
    )
    [choice] = scored.outputs
    assert choice.token_ids == plain.outputs[0].token_ids
    assert plain.outputs[0].logprobs is None
    assert plain.outputs[0].cumulative_logprob is None
    assert len(choice.logprobs) == len(choice.token_ids)
    own = [named[token_id] for named, token_id in zip(choice.logprobs, choice.token_ids, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(sum(one.logprob for one in own))
    assert "".join(one.decoded_token for one in own) == choice.text
    assert all(2 <= len(named) <= 3 for named in choice.logprobs)


def test_prompt_logprobs_come_for_every_token_but_the_first(llm):
    prompts = ["water flows " * 5, "a"]
    params = SamplingParams(seed=1, n=3, prompt_logprobs=2)
    for _ in range(2):  # the second time the prefix cache has it
        for output in generate(llm, prompts, params):
            expected = ENDLESS.score_prompt(output.prompt_token_ids, 2)
            assert output.prompt_logprobs[0] is None
            for token_id, named, one in zip(
                output.prompt_token_ids[1:], output.prompt_logprobs[1:], expected, strict=True
            ):
                assert next(iter(named)) == token_id
                assert named[token_id] == Logprob(one.logprob, one.rank, chr(token_id))
                assert {key: entry.logprob for key, entry in named.items()} == dict(
                    [(token_id, one.logprob), *one.top]
                )
            assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3
            assert all(choice.logprobs is None for choice in output.outputs)
    assert generate(llm, "water")[0].prompt_logprobs is None


def test_only_the_first_of_several_choices_asks_for_prompt_logprobs():
    card = load_fake_model(ModelConfig(name="fake", source="fake:")).card
    request = OfflineRequest(
        "r",
        EncodedPrompt(None, [65, 66]),
        SamplingParams(n=3, prompt_logprobs=2),
        card,
        Tokenizer(byte_text_bundle()),
        seed=0,
        on_change=lambda _: None,
    )
    submits = [continuation.submit for continuation in request.continuations.values()]
    assert [submit.sampling.prompt_logprobs for submit in submits] == [2, None, None]


def test_barred_tokens_do_not_come(llm):
    token_ids = expected_ids("water", 20, seed=0, temperature=0)
    greedy = {"temperature": 0.0, "max_tokens": 20}
    [barred, allowed] = generate(
        llm,
        ["water"] * 2,
        [
            SamplingParams(**greedy, bad_words=[chr(token_ids[4])]),
            SamplingParams(**greedy, allowed_token_ids=[65, 66]),
        ],
    )
    assert token_ids[4] not in barred.outputs[0].token_ids
    assert set(allowed.outputs[0].token_ids) == {65, 66}


def test_threads_share_one_engine(llm):
    def ask(number: int) -> list[int]:
        prompts = [f"{number} {index}" for index in range(5)]
        outputs = generate(llm, prompts, SamplingParams(seed=number))
        assert [output.prompt for output in outputs] == prompts
        return outputs[0].outputs[0].token_ids

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, range(12)))
    assert answers == [expected_ids(f"{number} 0", 16, seed=number) for number in range(12)]


def test_structured_output_has_its_form(llm):
    form = StructuredOutputsParams(choice=["copper", "iron"])
    [output] = generate(llm, "metal?", SamplingParams(structured_outputs=form, max_tokens=50))
    assert output.outputs[0].text in ("copper", "iron")


def test_what_can_be_told_before_is_told_before_anything_is_computed(llm):
    for prompts, error, message in (
        (["fine", "x" * 600], ValueError, r"prompts\[1\]: the prompt has 600 tokens"),
        ([[1, 2, 999]], ValueError, r"prompts\[0\]: token id 999"),
        (["fine", ""], ValueError, r"prompts\[1\]: the prompt has no tokens"),
        (["fine", 7], TypeError, r"prompts\[1\]: expected a str"),
        ([{"promt": "x"}], ValueError, r"prompts\[0\]: expected the key prompt"),
        (7, TypeError, "prompts must be"),
    ):
        with pytest.raises(error, match=message):
            generate(llm, prompts)
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        generate(llm, ["a", "b"], [SamplingParams()])
    with pytest.raises(ValueError, match=r"prompts\[0\]: logit_bias"):
        generate(llm, "a", SamplingParams(logit_bias={5000: 1.0}))
    assert generate(llm, "fine")[0].finished


def test_a_request_that_fails_later_takes_no_other_with_it(llm):
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    good = SamplingParams(seed=1, n=2)
    with pytest.raises(GenerationError, match=r"1 of 3 requests failed, first prompts\[1\]") as caught:
        generate(llm, ["one", "two", "three"], [good, bad, good])
    outputs = caught.value.outputs
    assert [output.error is None for output in outputs] == [True, False, True]
    assert [choice.finish_reason for choice in outputs[1].outputs] == ["abort"]
    assert outputs[2].outputs[1].token_ids == expected_ids("three", 16, seed=2)


def test_an_interrupted_call_leaves_nothing_behind():
    class Interrupting:
        def __init__(self, **options: Any) -> None:
            pass

        def set_postfix_str(self, *args: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            pass

    # One at a time and 10 ms a token: what is left of the first call would hold up the second for 40 s.
    with LLM("fake:step_delay_ms=10", max_num_seqs=1) as llm:
        params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=4000)]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], params, use_tqdm=Interrupting)
        assert generate(llm, "c", SamplingParams(max_tokens=1, seed=0))[0].finished


def test_progress_is_told_once_per_prompt(llm):
    bars = []

    class Bar:
        def __init__(self, *, total: int, **options: Any) -> None:
            self.total, self.num_done, self.is_closed = total, 0, False
            bars.append(self)

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            assert text.endswith("tokens/s")

        def update(self, num: int) -> None:
            self.num_done += num

        def close(self) -> None:
            self.is_closed = True

    llm.generate(["a", "b", "c"], use_tqdm=Bar)
    assert [(bar.total, bar.num_done, bar.is_closed) for bar in bars] == [(3, 3, True)]


def test_a_step_that_fails_fails_the_call_and_those_after_it():
    with LLM("fake:die_at_step=3") as llm:
        for _ in range(2):
            with pytest.raises(EngineFailedError, match="step 3 was told to fail"):
                generate(llm, ["a", "b"])


def test_after_shutdown_there_is_no_engine():
    llm = LLM("fake:")
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineFailedError, match="shut down"):
        generate(llm, "a")


def test_an_engine_ends_with_the_last_reference_to_it():
    llm = LLM("fake:")
    finalizer = llm._close
    assert finalizer.alive
    del llm
    gc.collect()
    assert not finalizer.alive


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_modle_len": 3}, "unknown option 'max_modle_len'; did you mean 'max_model_len'"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"dtype": "int8"}, "dtype"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"trust_remote_code": True}, "trust_remote_code"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM("fake:", **options)


def test_a_model_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="nowhere"):
        LLM("/nowhere.gguf")


def test_options_of_vllm_that_change_nothing_are_accepted():
    with LLM(
        "fake:", dtype="auto", enforce_eager=True, tensor_parallel_size=1, disable_log_stats=True
    ) as llm:
        assert generate(llm, "a")[0].finished
    with LLM("fake:", dtype="half") as llm:
        assert generate(llm, "a")[0].finished
