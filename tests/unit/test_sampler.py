"""Sampling: filters, penalties, and a draw that depends on seed and position alone."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from engine_service.logit_adjustment import may_adjust
from engine_service.randomness import uniforms
from engine_service.sampler import Sampler
from engine_service.sequence import Sequence
from kernels.cpu.sampling import NativeSampling
from shared.errors import InvalidRequest
from shared.identifiers import RequestId, TenantId
from shared.sampling import SamplingParams

VOCAB = 1500  # not a multiple of the chunk in which weights are summed
EOS = 7


def sequence(prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> Sequence:
    prompt, output = prompt or [1, 2, 3], output or []
    sampling = SamplingParams(**({"max_tokens": 1000, "seed": 5, "temperature": 1.0} | params))
    return Sequence(RequestId("r"), prompt + output, len(prompt), sampling, TenantId("t"))


def logits_of(**values: float) -> torch.Tensor:
    """One row, -20 except at the given tokens, e.g. t5=1.0."""
    row = torch.full((1, VOCAB), -20.0)
    for name, value in values.items():
        row[0, int(name.removeprefix("t"))] = value
    return row


@pytest.fixture(params=["torch", "native"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return Sampler([EOS], NativeSampling() if request.param == "native" else None)


def sample(sampler: Sampler, logits: torch.Tensor, *sequences: Sequence) -> list[int]:
    return sampler.sample(logits.clone(), sequences)


def drawn(sampler: Sampler, logits: torch.Tensor, num_draws: int, **params: Any) -> Counter[int]:
    """How often each token comes over many seeds."""
    sequences = [sequence(seed=seed, **params) for seed in range(num_draws)]
    return Counter(sample(sampler, logits.expand(num_draws, -1), *sequences))


def test_greedy_takes_the_largest_and_the_first_of_equals(sampler: Sampler) -> None:
    assert sample(sampler, logits_of(t9=2.0, t4=2.0, t5=1.0), sequence(temperature=0.0)) == [4]


def test_frequencies_follow_the_probabilities(sampler: Sampler) -> None:
    counts = drawn(sampler, logits_of(t0=0.0, t600=1.0, t1499=2.0), 3000)
    shares = torch.tensor([0.0, 1.0, 2.0]).softmax(0).tolist()
    for token, share in zip((0, 600, 1499), shares, strict=True):
        deviation = (3000 * share * (1 - share)) ** 0.5
        assert abs(counts[token] - 3000 * share) < 4 * deviation


def test_a_row_draws_the_same_token_in_any_batch(sampler: Sampler) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, VOCAB) * 2
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.5},
        {"top_k": 7},
        {"min_p": 0.1, "temperature": 0.7},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    ]
    sequences = [sequence(seed=seed, output=[4, 4], **params) for seed, params in enumerate(options)]
    together = sample(sampler, logits, *sequences)
    alone = [sample(sampler, logits[row : row + 1], sequences[row])[0] for row in range(6)]
    backwards = sample(sampler, logits.flip(0), *reversed(sequences))
    assert together == alone == backwards[::-1]


def test_a_draw_depends_on_the_position_and_not_on_where_tokens_were_generated(sampler: Sampler) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, VOCAB)
    moved = sequence(prompt=[1, 2, 3, 4, 5])  # as if output were handed over as prompt
    here = sequence(prompt=[1, 2, 3], output=[4, 5])
    assert sample(sampler, logits, here) == sample(sampler, logits, moved)
    tokens = {sample(sampler, logits, sequence(output=[0] * length))[0] for length in range(20)}
    assert len(tokens) > 10


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {10, 11}),
        ({"top_k": 1}, {10}),
        ({"top_k": -1, "top_p": 0.6}, {10, 11}),  # shares 0.51, 0.31, 0.11, 0.07
        ({"top_p": 1e-9}, {10}),
        ({"min_p": 0.5}, {10, 11}),
        ({"min_p": 1.0}, {10}),
        ({"top_k": 3, "top_p": 0.9}, {10, 11, 12}),
        ({"top_k": 2, "top_p": 0.9, "min_p": 0.9}, {10}),
    ],
)
def test_filters_leave_exactly_the_allowed_tokens(
    sampler: Sampler, params: dict[str, Any], allowed: set[int]
) -> None:
    logits = logits_of(t10=2.0, t11=1.5, t12=0.5, t13=0.0)
    assert set(drawn(sampler, logits, 300, **params)) == allowed


def test_top_p_over_a_flat_distribution_looks_past_its_first_candidates(sampler: Sampler) -> None:
    counts = drawn(sampler, torch.zeros(1, VOCAB), 2000, top_p=0.5)
    assert max(counts) < VOCAB // 2  # of equals the lower ids stay
    assert max(counts) > VOCAB // 2 - 30


def test_equal_weights_at_the_border_of_top_k_all_stay(sampler: Sampler) -> None:
    assert set(drawn(sampler, logits_of(t3=1.0, t4=1.0, t5=1.0), 200, top_k=2)) == {3, 4, 5}


def test_tiny_temperature_is_greedy_and_never_nan(sampler: Sampler) -> None:
    logits = logits_of(t3=1.0, t4=1.0001)
    for temperature in (1e-300, 1e-6, 1e-4):
        assert sample(sampler, logits * 1000, sequence(temperature=temperature)) == [4]


def test_repetition_penalty_counts_prompt_and_output_and_both_signs(sampler: Sampler) -> None:
    logits = logits_of(t1=2.0, t50=1.5, t2=-1.0)
    greedy: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.5}
    assert sample(sampler, logits, sequence(prompt=[1], **greedy)) == [50]
    assert sample(sampler, logits, sequence(prompt=[9], output=[1], **greedy)) == [50]
    below_zero = torch.full((1, VOCAB), -3.0)
    below_zero[0, 2], below_zero[0, 5] = -1.0, -1.4
    assert sample(sampler, below_zero, sequence(prompt=[2], **greedy)) == [5]


def test_presence_and_frequency_count_output_only(sampler: Sampler) -> None:
    logits = logits_of(t1=2.0, t50=1.0)
    greedy: dict[str, Any] = {"temperature": 0.0, "prompt": [1, 1, 1]}
    assert sample(sampler, logits, sequence(**greedy, presence_penalty=1.5)) == [1]
    assert sample(sampler, logits, sequence(**greedy, output=[1], presence_penalty=1.5)) == [50]
    assert sample(sampler, logits, sequence(**greedy, output=[1], frequency_penalty=0.6)) == [1]
    assert sample(sampler, logits, sequence(**greedy, output=[1, 1], frequency_penalty=0.6)) == [50]


def test_logit_bias_bans_and_forces(sampler: Sampler) -> None:
    logits = logits_of(t1=2.0, t50=1.0)
    assert sample(sampler, logits, sequence(temperature=0.0, logit_bias={1: -100.0})) == [50]
    assert set(drawn(sampler, logits, 50, logit_bias={1234: 100.0})) == {1234}


def test_min_tokens_bans_every_token_that_would_end_the_sequence(sampler: Sampler) -> None:
    logits = logits_of(**{f"t{EOS}": 5.0, "t30": 4.0, "t31": 3.0})
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (30,)}
    assert sample(sampler, logits, sequence(**params)) == [31]
    assert sample(sampler, logits, sequence(output=[31], **params)) == [31]
    assert sample(sampler, logits, sequence(output=[31, 31], **params)) == [EOS]


def test_only_allowed_tokens_come_whatever_else_is_asked(sampler: Sampler) -> None:
    logits = logits_of(t1=9.0, t50=2.0, t60=1.0)
    greedy: dict[str, Any] = {"temperature": 0.0, "allowed_token_ids": (60, 50)}
    assert sample(sampler, logits, sequence(**greedy)) == [50]
    assert sample(sampler, logits, sequence(**greedy, logit_bias={1: 100.0})) == [50]
    assert sample(sampler, logits, sequence(**greedy, output=[50], frequency_penalty=2.0)) == [60]
    assert set(drawn(sampler, logits, 200, allowed_token_ids=(50, 60))) == {50, 60}
    for value in (float("nan"), float("-inf")):
        assert sample(sampler, torch.full((1, VOCAB), value), sequence(**greedy))[0] in (50, 60)


def test_a_bad_word_is_barred_where_it_would_be_completed(sampler: Sampler) -> None:
    logits = logits_of(t1=2.0, t50=1.0)
    greedy: dict[str, Any] = {"temperature": 0.0, "prompt": [8, 9]}
    assert sample(sampler, logits, sequence(**greedy, bad_words=((1,),))) == [50]
    assert sample(sampler, logits, sequence(**greedy, output=[8, 9], bad_words=((8, 9, 1),))) == [50]
    assert sample(sampler, logits, sequence(**greedy, output=[3, 8, 9], bad_words=((8, 9, 1),))) == [50]
    assert sample(sampler, logits, sequence(**greedy, output=[8, 9, 3], bad_words=((8, 9, 1),))) == [1]
    assert sample(sampler, logits, sequence(**greedy, output=[9], bad_words=((8, 9, 1),))) == [1]
    in_prompt = sequence(**greedy, bad_words=((8, 9, 1),))
    assert sample(sampler, logits, in_prompt) == [1], "the prompt does not count"
    both = sequence(**greedy, output=[4], bad_words=((1,), (4, 50), (7, 1)))
    assert sample(sampler, logits_of(t1=3.0, t50=2.0, t51=1.0), both) == [51]


def test_where_all_that_is_allowed_is_barred_the_allowed_tokens_have_the_last_word(sampler: Sampler) -> None:
    logits = logits_of(**{"t1": 9.0, f"t{EOS}": 1.0, "t60": 0.0})
    greedy = sequence(allowed_token_ids=(EOS, 60), min_tokens=3, temperature=0.0)
    assert sample(sampler, logits, greedy) == [60]
    assert sample(sampler, logits, sequence(allowed_token_ids=(EOS,), min_tokens=3)) == [EOS]
    assert sample(sampler, logits, sequence(allowed_token_ids=(60,), bad_words=((60,),))) == [60]


def test_rows_without_penalties_are_untouched_by_their_neighbours(sampler: Sampler) -> None:
    logits = logits_of(t1=2.0, t50=1.5).repeat(2, 1)
    penalised = sequence(prompt=[1], temperature=0.0, repetition_penalty=2.0)
    assert sample(sampler, logits, penalised, sequence(prompt=[1], temperature=0.0)) == [50, 1]


def test_only_rows_that_are_adjusted_change(sampler: Sampler) -> None:
    """Log-probabilities are told of the others as they are, without a copy."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4))
    sequences = [
        sequence(top_k=5, top_p=0.5),
        sequence(temperature=0.0, repetition_penalty=1.5),
        sequence(temperature=0.0),
        sequence(min_p=0.1, bad_words=((4,),)),
    ]
    before = logits.clone()
    sampler.sample(logits, sequences)
    changed = [not torch.equal(row, old) for row, old in zip(logits, before, strict=True)]
    assert changed == [may_adjust(each) for each in sequences] == [False, True, False, True]


def test_uniform_numbers_are_even_and_unrelated_between_neighbours() -> None:
    pairs = list(itertools.product(range(100), range(100)))
    numbers = uniforms([seed for seed, _ in pairs], [position for _, position in pairs]).reshape(100, 100)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert len(np.unique(numbers)) == 10_000
    for left, right in ((numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.04


def test_uniform_numbers_never_change() -> None:
    """Replays and continuations on another engine rest on these values."""
    expected = [0.6524484863740322, 0.44715182605341497, 0.6895452185994594]  # by Python's integers
    assert uniforms([0, 42, 2**63 - 1], [0, 17, 2**31]).tolist() == expected


EXTREMES: dict[str, list[Any]] = {
    "temperature": [0.0, 1e-9, 1e-5, 2.0],
    "top_k": [0, 1, 2**31 - 1],
    "top_p": [1e-300, 1.0],
    "min_p": [0.0, 1.0],
    "repetition_penalty": [0.01, 10.0],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "logit_bias": [{}, {4: 100.0, EOS: -100.0}],
    "seed": [0, 2**63 - 1],
    "allowed_token_ids": [(), (4,), (EOS, 9)],
    "bad_words": [(), ((4,), (4, EOS, 9)), tuple((token,) for token in range(256))],
    "min_tokens": [0, 1000],
}


def test_every_mix_of_extreme_values_that_is_allowed_gives_a_token(sampler: Sampler) -> None:
    rng = np.random.default_rng(5)
    for _ in range(400):
        params = {name: values[rng.integers(len(values))] for name, values in EXTREMES.items()}
        one = sequence(output=[4, 4, EOS], **params)
        one.sampling.check(VOCAB)
        logits = torch.from_numpy(rng.normal(0, 50, (1, VOCAB)).astype(np.float32))
        [token] = sample(sampler, logits, one)
        assert 0 <= token < VOCAB


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38, -3e38])
def test_logits_that_are_no_numbers_do_not_end_the_step_of_the_other_rows(
    sampler: Sampler, value: float
) -> None:
    good = logits_of(t9=30.0)
    bad = torch.full((1, VOCAB), value)
    mixed = logits_of(t5=value, t9=1.0)
    tokens = sample(sampler, torch.cat([bad, mixed, good]), *(sequence(seed=seed) for seed in range(3)))
    assert all(0 <= token < VOCAB for token in tokens)
    assert tokens[2] == 9


def test_a_penalty_that_would_make_logits_infinite_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(max_tokens=1, seed=0, repetition_penalty=1e-38).check(VOCAB)
    assert caught.value.param == "repetition_penalty"
