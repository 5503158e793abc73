"""Log-probabilities, from the logits to the updates: the model's own, whatever is done with them."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models

from engine_service.raw_logprobs import LOWEST_LOGPROB, RawLogprobs, look_up_on_cpu, look_up_on_device
from engine_service.sampler import Sampler
from engine_service.sequence import Sequence
from gateway.scored_token import score
from kernels.cpu.sampling import NativeSampling
from shared.byte_text import byte_text_bundle
from shared.errors import InvalidRequest
from shared.identifiers import RequestId, TenantId
from shared.messages import EngineLoad, SequenceUpdate, StepResult, TokenLogprobs, decode, encode
from shared.sampling import SamplingParams
from shared.text_bundle import TextBundle
from shared.tokenizer import Tokenizer
from tests.unit.worlds import make_prompt, make_world

VOCAB = 500
EOS = 7


def sequence(**params: Any) -> Sequence:
    sampling = SamplingParams(**({"max_tokens": 100, "seed": 5, "temperature": 0.0} | params))
    return Sequence(RequestId("r"), [1, 2, 3, 4], 3, sampling, TenantId("t"))


@pytest.fixture(params=["torch", "native"])
def native(request: pytest.FixtureRequest) -> NativeSampling | None:
    return NativeSampling() if request.param == "native" else None


def logprobs_of(
    native: NativeSampling | None, logits: torch.Tensor, *sequences: Sequence
) -> list[TokenLogprobs | None]:
    """As a runner does it: kept before the sampler, told after it."""
    logits = logits.clone()
    raw = RawLogprobs(logits, sequences, native)
    return raw.of(Sampler([EOS], native).sample(logits, sequences))


def random_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 3


def test_they_are_those_of_the_raw_distribution_whatever_the_sampler_does(
    native: NativeSampling | None,
) -> None:
    logits = random_logits(4)
    [told, *_] = logprobs_of(native, logits[:1], sequence(logprobs=5))
    assert told is not None
    others: list[dict[str, Any]] = [
        {"temperature": 1.7, "top_p": 0.4},
        {"allowed_token_ids": (4, 9)},
        {"repetition_penalty": 5.0, "logit_bias": {50: 100.0}, "bad_words": ((told.token_id,),)},
        {"temperature": 2.0, "min_p": 0.001},
    ]
    rows = logprobs_of(native, logits, *(sequence(logprobs=5, **options) for options in others))
    expected = logits.log_softmax(-1)
    for row, one in enumerate(rows):
        assert one is not None
        values, ids = expected[row].sort(descending=True)
        assert one.logprob == pytest.approx(expected[row, one.token_id].item(), abs=1e-5)
        assert one.rank == ids.tolist().index(one.token_id) + 1
        assert [token for token, _ in one.top] == ids[:5].tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(values[:5].tolist(), abs=1e-5)


def test_a_greedy_choice_has_rank_one_and_leads_the_alternatives(native: NativeSampling | None) -> None:
    for one in logprobs_of(native, random_logits(3), *(sequence(logprobs=2) for _ in range(3))):
        assert one is not None
        assert one.rank == 1
        assert one.top[0] == (one.token_id, one.logprob)
    [tied] = logprobs_of(native, torch.zeros(1, VOCAB), sequence(logprobs=0))
    assert tied is not None
    assert tied.rank == 1


def test_only_rows_that_ask_get_them_and_as_many_as_they_ask_for(native: NativeSampling | None) -> None:
    wanted = (None, 0, 20, None, 3)
    rows = logprobs_of(native, random_logits(5), *(sequence(logprobs=number) for number in wanted))
    assert [None if row is None else len(row.top) for row in rows] == list(wanted)
    assert logprobs_of(native, random_logits(1), sequence()) == [None]
    [few] = logprobs_of(native, torch.zeros(1, 9), sequence(logprobs=20))
    assert few is not None
    assert len(few.top) == 9


def test_both_ways_of_looking_up_agree() -> None:
    logits = random_logits(4)
    chosen = [0, 100, 250, int(logits[3].argmax())]
    for num_top in (0, 1, 20):
        on_device = list(look_up_on_device(logits, chosen, num_top))
        for one, other in zip(look_up_on_cpu(logits.numpy(), chosen, num_top), on_device, strict=True):
            assert (one.rank, one.top_ids) == (other.rank, other.top_ids)
            assert [one.chosen, *one.top] == pytest.approx([other.chosen, *other.top], abs=1e-5)
    assert on_device[3].rank == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_a_model_that_overflows_still_gives_numbers(native: NativeSampling | None, value: float) -> None:
    logits = random_logits(2)
    logits[0, :10] = value
    for one in logprobs_of(native, logits, sequence(logprobs=VOCAB), sequence(logprobs=2)):
        assert one is not None
        assert all(LOWEST_LOGPROB <= logprob <= 0 for logprob in (one.logprob, *(p for _, p in one.top)))


def test_an_update_carries_one_for_each_token_and_none_unasked() -> None:
    world = make_world()
    world.add("asks", make_prompt(5), max_tokens=6, logprobs=3)
    world.add("does not", make_prompt(5, start=300), max_tokens=6)
    world.run()
    assert [one.token_id for one in world.logprobs["asks"]] == world.output["asks"]
    assert all(len(one.top) == 3 and one.rank == 1 for one in world.logprobs["asks"])
    assert world.logprobs["does not"] == []


def test_preemption_chunks_and_another_engine_change_nothing() -> None:
    options: dict[str, Any] = {"max_tokens": 12, "logprobs": 2, "temperature": 1.0}
    calm = make_world()
    calm.add("a", make_prompt(11), **options)
    calm.run()
    tossed = make_world(force_preemption_every=3, max_num_batched_tokens=4)
    tossed.add("a", make_prompt(11), **options)
    tossed.run()
    assert tossed.engine.load().num_preemptions > 0
    assert tossed.logprobs["a"] == calm.logprobs["a"]
    elsewhere = make_world()
    elsewhere.add("a", make_prompt(11), output=calm.output["a"][:5], **options)
    elsewhere.run()
    assert elsewhere.logprobs["a"] == calm.logprobs["a"][5:]


def test_they_cross_the_wire() -> None:
    update = SequenceUpdate(RequestId("a"), [4], logprobs=[TokenLogprobs(4, -0.25, 2, [(9, -0.125)])])
    load = EngineLoad(0, 0, 0, 0, 0)
    assert decode(encode(StepResult([update], load))) == StepResult([update], load)


def test_a_token_is_told_with_its_own_text() -> None:
    tokenizer = Tokenizer(byte_text_bundle())
    one = score(TokenLogprobs(32, -0.5, 1, [(32, -0.5), (256, -2.0), (0xE2, -3.0)]), tokenizer, 7)
    assert (one.text, one.logprob, one.offset) == (" ", -0.5, 7)
    assert one.top == [(" ", -0.5), ("<|end|>", -2.0), ("\ufffd", -3.0)]


def test_a_token_keeps_its_space_where_the_decoder_strips_that_of_a_text() -> None:
    """As tokenisers that come from SentencePiece do."""
    fast = tokenizers.Tokenizer(models.WordLevel({"\u2581the": 0, "<0xE2>": 1, "re": 2}, "re"))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bundle = TextBundle(fast.to_str().encode(), None, {}, None, [])
    tokenizer = Tokenizer(bundle)
    assert tokenizer.decode([0, 2]) == "there"
    assert [tokenizer.text_of_token(token_id) for token_id in (0, 1, 2)] == [" the", "\ufffd", "re"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", -1),
        ("logprobs", 21),
        ("allowed_token_ids", (VOCAB,)),
        ("allowed_token_ids", (-1,)),
        ("allowed_token_ids", (1,) * 4097),
        ("bad_words", ((),)),
        ("bad_words", ((1, VOCAB),)),
        ("bad_words", ((1,) * 1025,)),
        ("bad_words", ((1,),) * 257),
    ],
)
def test_what_no_engine_can_run_is_refused_with_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(max_tokens=1, seed=0, **{field: value}).check(VOCAB)
    assert caught.value.param == field
