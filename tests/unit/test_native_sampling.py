"""Sampling in C++ gives the tokens of sampling by torch, whatever the threads and the other rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_service.logit_adjustment import adjust
from engine_service.randomness import uniforms
from engine_service.raw_logprobs import look_up_on_cpu
from engine_service.sampler import sample_with_torch, weigh
from kernels.cpu import build
from kernels.cpu.sampling import NativeSampling
from kernels.cpu.team import Team, loaded_library
from kernels.sampling_metadata import Draw, LogitAdjustment
from tests.unit.test_kernels_linear import NEEDED_FLAGS, cpu_flags

SIZES = (1, 2, 511, 512, 513, 49152, 151936, 262144)
BLOCK = 512  # tokens whose weights the C++ sums at once
BORDER = 1e-6  # of all weight: so far may a number lie from the token that it is said to fall on
LAST = 1 - 2.0**-53  # the largest number there is
INF, NAN, LARGEST = math.inf, math.nan, float(np.finfo(np.float32).max)

FILTERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-300},
    {"top_k": 50},
    {"top_k": 1},
    {"top_k": 5000},
    {"top_k": -1},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-30},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 700, "min_p": 0.02, "top_p": 0.8},
    {"min_p": 0.01, "top_p": 0.5},
]


@pytest.fixture(
    scope="module",
    params=["native", "avx2", pytest.param("portable", marks=pytest.mark.soak)],
)
def native(request: pytest.FixtureRequest) -> NativeSampling:
    """With registers of as many lanes as the build has: they are what differs."""
    if missing := NEEDED_FLAGS[request.param] - cpu_flags():
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    return sampling_with(2, request.param)


def sampling_with(num_threads: int, instruction_set: str = "native") -> NativeSampling:
    library = loaded_library(build.built_library(instruction_set))
    return NativeSampling(Team(num_threads, library=library), library=library)


def tokens_of(native: NativeSampling, logits: torch.Tensor, draws: Sequence[Draw | None]) -> list[int]:
    return native.sample(logits, [None] * len(draws), draws)


def assert_drawn(native: NativeSampling, logits: torch.Tensor, draws: list[Draw]) -> None:
    """The tokens are those of torch, or their neighbours where a number falls on the border between them."""
    before = logits.clone()
    tokens = tokens_of(native, logits, draws)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32)), "nobody asked for a change"
    expected = sample_with_torch(logits, [None] * len(draws), draws)
    for row, (token, other) in enumerate(zip(tokens, expected, strict=True)):
        if token != other:
            assert distance(logits[row], draws[row], token) < BORDER, (draws[row], token, other)


def distance(row: torch.Tensor, draw: Draw, token: int) -> float:
    """Of the draw's number from the part of all weight that is the token's."""
    weights = weigh(row.clone().unsqueeze(0), [draw])[0].double()
    assert weights[token] > 0, "a token that must not come"
    ends = (weights.cumsum(0) / weights.sum()).tolist()
    begin = ends[token - 1] if token else 0.0
    return max(begin - draw.number, draw.number - ends[token], 0.0)


def numbers(count: int) -> list[float]:
    """Even, and always the same ones."""
    return uniforms([11] * count, list(range(count))).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_any_size_are_drawn_as_torch_draws_them(native: NativeSampling, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for spread in (0.0, 1.0, 6.0):  # all equal; a third of the tokens matter; few do
        logits = torch.randn(len(FILTERS), size, generator=generator) * spread
        pairs = zip(numbers(len(FILTERS)), FILTERS, strict=True)
        assert_drawn(native, logits, [Draw(number, 0.8, **options) for number, options in pairs])


@pytest.mark.parametrize("size", SIZES)
def test_the_largest_is_the_first_of_equals_and_what_is_no_number(native: NativeSampling, size: int) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size))
    logits = torch.cat([logits, (logits * 2).round(), torch.zeros(1, size), torch.full((1, size), -INF)])
    for token in {0, size // 2, size - 1}:
        ties = logits.clone()
        ties[:, token] = ties[:, size - 1] = 50.0
        overflowed = ties.clone()
        overflowed[:, token] = overflowed[:, size - 1] = NAN
        overflowed[:, size // 3] = INF
        for rows in (logits, ties, overflowed):
            assert tokens_of(native, rows, [None] * len(rows)) == rows.argmax(-1).tolist()


@st.composite
def rows_of_logits(draw: st.DrawFn) -> torch.Tensor:
    """With many equals, whose weights are far enough from the others' that no rounding can mix them up."""
    size = draw(st.one_of(st.integers(1, 40), st.integers(500, 530), st.integers(1000, 1400)))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    steps = draw(st.sampled_from([1, 3, 20, 200]))
    logits = generator.integers(-steps, steps + 1, (1, size)).astype(np.float32) / 8
    special = st.sampled_from([NAN, INF, -INF, LARGEST, -LARGEST, LARGEST / 2, 1e30, -90.0, -1e5])
    for value in draw(st.lists(special, max_size=3)):
        logits[0, generator.integers(0, size, draw(st.sampled_from([1, 5, size])))] = value
    return torch.from_numpy(logits)


DRAWS = st.builds(
    Draw,
    number=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, LAST])),
    temperature=st.sampled_from([1e-5, 0.1, 0.7, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-30, 0.05, 0.6, 1.0]),
    top_k=st.sampled_from([0, 0, -1, 1, 2, 7, 50, 511, 1100, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 1.0, 1e-300, 0.1, 0.5, 0.9, 0.999]),
)


@settings(max_examples=300, deadline=None)
@given(logits=rows_of_logits(), draw=DRAWS)
@example(logits=torch.full((1, 600), -INF), draw=Draw(LAST))
@example(logits=torch.full((1, 600), NAN), draw=Draw(0.5, top_p=0.5))
@example(logits=torch.full((1, 600), -LARGEST), draw=Draw(0.5, top_k=5, top_p=0.5))
def test_any_row_and_any_filters_are_drawn_as_torch_draws_them(
    native: NativeSampling, logits: torch.Tensor, draw: Draw
) -> None:
    assert_drawn(native, logits, [draw])


@pytest.mark.parametrize("size", [1, 511, 513, 5000])
def test_of_equals_top_k_keeps_all_and_top_p_the_first(native: NativeSampling, size: int) -> None:
    """The last number there is falls on the last token that stays."""
    flat = torch.zeros(1, size)
    half = -(-size // 2) - 1
    for options, last in (
        ({}, size - 1),
        ({"top_k": 3}, size - 1),
        ({"top_p": 0.5}, half),
        ({"top_p": 1e-9}, 0),
        ({"top_k": 3, "top_p": 0.5}, half),
        ({"min_p": 1.0, "top_p": 0.5}, half),
    ):
        assert tokens_of(native, flat, [Draw(LAST, 1.0, **options)]) == [last], options
    if size > BLOCK:
        steps = flat - 1.0
        steps[0, [3, size - 2]] = 1.0
        assert tokens_of(native, steps, [Draw(LAST, 1.0, top_k=2)]) == [size - 2]
        assert tokens_of(native, steps, [Draw(LAST, 1.0, top_k=3)]) == [size - 1]
        share = 2 / (2 + (size - 2) * math.exp(-2))
        assert tokens_of(native, steps, [Draw(LAST, 1.0, top_p=share * 0.49)]) == [3]
        # Beside the two best one more, the first of the others. It has a lower id than the last of the two.
        assert tokens_of(native, steps, [Draw(0.0, 1.0, top_p=share + 1e-4)]) == [0]
        assert tokens_of(native, steps, [Draw(LAST, 1.0, top_p=share + 1e-4)]) == [size - 2]


def test_a_nucleus_goes_on_behind_the_heaviest_tokens_of_the_registers(native: NativeSampling) -> None:
    """Where the C++ first looks for it: 16 tokens of a block, which have half of all weight here."""
    logits = torch.full((1, 20 * BLOCK), -math.log(40.0))
    logits.view(-1, BLOCK)[:, :16] = 0.0
    for top_p in (0.4, 0.6, 0.9, 0.999):
        for number in (*numbers(10), LAST):
            assert_drawn(native, logits, [Draw(number, top_p=top_p)])


@pytest.mark.parametrize("options", [{}, {"top_p": 0.999999}, {"min_p": 1e-9}])
def test_the_last_number_falls_on_a_token_with_weight(
    native: NativeSampling, options: dict[str, Any]
) -> None:
    """Though sums of parts and of their tokens round differently."""
    logits = torch.randn(200, 1000, generator=torch.Generator().manual_seed(2)) * 6
    logits[:, 900:] = -INF
    assert_drawn(native, logits, [Draw(LAST, **options)] * len(logits))


@pytest.mark.parametrize("options", FILTERS)
@pytest.mark.parametrize("num_draws", [15_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_frequencies_follow_the_probabilities(
    native: NativeSampling, options: dict[str, Any], num_draws: int
) -> None:
    """Chi-square against shares that are found by a sort, in float64."""
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(1)) * 2
    draws = [Draw(number, 0.9, **options) for number in numbers(num_draws)]
    tokens = tokens_of(native, logits.expand(num_draws, -1), draws)
    counts = np.bincount(tokens, minlength=700)
    expected = num_draws * shares(logits[0].double().numpy(), draws[0])
    assert not counts[expected == 0].any()
    rare = (expected > 0) & (expected < 20)
    seen = np.append(counts[expected >= 20], counts[rare].sum())
    wanted = np.append(expected[expected >= 20], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    chi_square, freedom = ((seen - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    assert chi_square <= freedom + 5 * math.sqrt(
        2 * freedom
    )  # the numbers never change: it holds or it does not


def shares(logits: np.ndarray, draw: Draw) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / draw.temperature)
    order = np.argsort(-weights, kind="stable")
    ranked = weights[order]
    ranked[ranked < draw.min_p] = 0
    if 0 < draw.top_k < len(ranked):
        ranked[ranked < ranked[draw.top_k - 1]] = 0
    ranked[np.cumsum(ranked) - ranked >= draw.top_p * ranked.sum()] = 0
    weights[order] = ranked / ranked.sum()
    return weights


def test_threads_and_neighbours_leave_no_trace_in_a_row() -> None:
    """Few large rows are shared by the threads, many are not; small ones are the calling thread's alone."""
    for size in (3000, 151936):
        logits = torch.randn(28, size, generator=torch.Generator().manual_seed(size)) * 2
        draws: list[Draw | None] = [Draw(number, 0.9, **FILTERS[0]) for number in numbers(28)]
        draws[14:] = [Draw(number, 1.3, **each) for number, each in zip(numbers(14), FILTERS, strict=True)]
        draws[3] = None
        penalties = LogitAdjustment(token_ids=[5, 5, 7], repetition_penalty=1.5, frequency_penalty=0.5)
        adjustments = [penalties if row % 2 else None for row in range(28)]
        results = []
        for num_threads in (1, 2, 3):
            native = sampling_with(num_threads)
            for rows_at_once in (1, 5, 28):
                tokens: list[int] = []
                for start in range(0, 28, rows_at_once):
                    part = slice(start, start + rows_at_once)
                    tokens += native.sample(logits[part].clone(), adjustments[part], draws[part])
                results.append(tokens)
            backwards = native.sample(logits.flip(0), adjustments[::-1], draws[::-1])
            results.append(backwards[::-1])
        assert all(tokens == results[0] for tokens in results)


SIZE = 900
TOKENS = st.lists(st.integers(0, SIZE - 1), max_size=30)


@st.composite
def adjustments(draw: st.DrawFn) -> LogitAdjustment:
    token_ids = draw(TOKENS)
    mask = None
    if draw(st.booleans()):
        generator = np.random.default_rng(draw(st.integers(0, 100)))
        mask = generator.integers(0, 256, draw(st.sampled_from([SIZE // 8 + 1, 60, 1])), dtype=np.uint8)
    return LogitAdjustment(
        logit_bias=draw(st.dictionaries(st.integers(0, SIZE - 1), st.floats(-100, 100), max_size=5)),
        token_ids=token_ids,
        num_prompt_tokens=draw(st.integers(0, len(token_ids))),
        repetition_penalty=draw(st.sampled_from([1.0, 1.1, 0.01, 10.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3, 2.0])),
        allowed=draw(st.none() | st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=9)),
        barred=tuple(draw(TOKENS)),
        mask=mask,
    )


@settings(max_examples=150, deadline=None)
@given(asked=st.lists(adjustments(), min_size=1, max_size=3), seed=st.integers(0, 100))
def test_adjusted_logits_are_those_of_torch_to_the_last_bit(
    native: NativeSampling, asked: list[LogitAdjustment], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(generator.normal(0, 5, (len(asked), SIZE)).astype(np.float32))
    logits[:, generator.integers(0, SIZE, 8)] = torch.tensor(
        [NAN, INF, -INF, LARGEST, -LARGEST, 0, -0.0, 1e-40]
    )
    expected = logits.clone()
    for row, each in zip(expected, asked, strict=True):
        adjust(row, each)
    tokens = native.sample(logits, asked, [None] * len(asked))
    assert torch.equal(logits.isnan(), expected.isnan())
    assert torch.equal(logits.nan_to_num(0, INF, -INF), expected.nan_to_num(0, INF, -INF))
    assert tokens == expected.argmax(-1).tolist()


def test_a_row_is_adjusted_before_it_is_drawn_from() -> None:
    logits = torch.zeros(2, 600)
    logits[:, 5] = 20.0
    asked = [LogitAdjustment(barred=[5]), None]
    draws = [Draw(LAST, top_p=0.5)] * 2
    assert sampling_with(2).sample(logits, asked, draws) == [300, 5]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_log_probabilities_are_those_of_numpy(native: NativeSampling, size: int, num_top: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(6, size, generator=generator) * 5
    logits[1] = logits[1].round()  # many equals
    logits[2] = 0.0
    logits[3] -= 1e4
    logits[4] *= 40  # most of it far below e^-87
    logits[5, : size // 2] = -INF
    logits[5, size - 1] = 0.0
    assert_told(native, logits, min(num_top, size))
    if size == 513:
        assert_told(native, logits, size)


def assert_told(native: NativeSampling, logits: torch.Tensor, num_top: int) -> None:
    size = logits.shape[1]
    for chosen in (0, size // 2, size - 1):
        ours = list(native.look_up(logits.unbind(), [chosen] * len(logits), num_top))
        theirs = list(look_up_on_cpu(logits.numpy(), [chosen] * len(logits), num_top))
        for one, other in zip(ours, theirs, strict=True):
            assert (one.rank, one.top_ids) == (other.rank, other.top_ids)
            assert [one.chosen, *one.top] == pytest.approx([other.chosen, *other.top], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("value", [NAN, INF])
def test_where_a_model_has_overflowed_no_log_probability_is_a_number(
    native: NativeSampling, value: float
) -> None:
    logits = torch.zeros(3, 700)
    logits[0, 600], logits[1, :], logits[2, 699] = value, value, 5.0
    first, second, good = native.look_up(logits.unbind(), [600, 0, 699], 3)
    for one in (first, second):
        assert all(map(math.isnan, [one.chosen, *one.top]))
        assert len(set(one.top_ids)) == 3
    assert good.chosen == pytest.approx(5.0 - math.log(699 + math.exp(5.0)), abs=1e-6)
    [empty] = native.look_up([torch.full((700,), -INF)], [3], 2)
    assert all(map(math.isnan, [empty.chosen, *empty.top]))


def test_what_does_not_fit_is_refused() -> None:
    native = sampling_with(1)
    for logits in (torch.zeros(2, 5, dtype=torch.float64), torch.zeros(5, 2).T):
        with pytest.raises(ValueError, match="float32 on the CPU with contiguous rows"):
            native.sample(logits, [None] * 2, [None] * 2)


def test_no_rows_give_no_tokens() -> None:
    assert sampling_with(1).sample(torch.zeros(0, 50), [], []) == []
