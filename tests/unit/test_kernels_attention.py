"""Paged attention and the KV cache in C++ agree with the reference, and rows do not touch each other."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention_metadata import AttentionMetadata
from kernels.cpu.operators import CpuOperators
from kernels.kv_vectors import head_dim_of, load_vectors, store_vectors, stored_width
from kernels.reference import ReferenceOperators
from tests.paged_batches import PagedBatch, make_batch
from tests.unit.test_kernels_linear import BUILDS, NEEDED_FLAGS, cpu_flags

REFERENCE = ReferenceOperators()
TOLERANCE = 2e-5
DTYPES = [torch.float32, torch.float16, torch.int8]
NAN, INF = float("nan"), float("inf")

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16", "int8"])


@pytest.fixture(scope="module", params=BUILDS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    missing = NEEDED_FLAGS[request.param] - cpu_flags()
    if missing:
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def cpu(instruction_set: str) -> CpuOperators:
    return CpuOperators(2, instruction_set=instruction_set)


def attend(operators: Any, batch: PagedBatch, **options: Any) -> Tensor:
    arguments = (batch.query, batch.keys, batch.values, batch.metadata, batch.scale)
    output: Tensor = operators.paged_attention(*arguments, **options)
    return output


def attention_error(operators: CpuOperators, batch: PagedBatch, **options: Any) -> float:
    error = (attend(operators, batch, **options) - attend(REFERENCE, batch, **options)).abs().max()
    return float(error)  # NaN, if anything foreign was read, is not below any tolerance


@every_dtype
@pytest.mark.parametrize("block_size", [1, 16, 100])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (9, 3), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 10])
def test_attention_of_a_mixed_batch_at_page_borders(
    cpu: CpuOperators, block_size: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    contexts = [1, max(1, block_size - 1), block_size, block_size + 1, 3 * block_size + 5, 150]
    queries = [1, 1, min(block_size, 7), 2, 1, 140]
    batch = make_batch(
        queries,
        contexts,
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    assert attention_error(cpu, batch) < TOLERANCE


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_attention_of_random_batches(cpu: CpuOperators, data: st.DataObject) -> None:
    contexts = data.draw(st.lists(st.integers(1, 300), max_size=5))
    queries = [data.draw(st.integers(0, context)) for context in contexts]
    num_kv_heads = data.draw(st.integers(1, 3))
    batch = make_batch(
        queries,
        contexts,
        block_size=data.draw(st.sampled_from([1, 2, 7, 16, 20, 32, 48, 64, 256])),
        num_heads=num_kv_heads * data.draw(st.integers(1, 13)),
        num_kv_heads=num_kv_heads,
        head_dim=data.draw(st.integers(1, 256)),
        seed=data.draw(st.integers(0, 1000)),
        dtype=data.draw(st.sampled_from(DTYPES)),
    )
    options = {
        "window": data.draw(st.none() | st.integers(1, 310)),
        "softcap": data.draw(st.none() | st.floats(0.5, 50.0)),
    }
    output = attend(cpu, batch, **options)
    torch.testing.assert_close(output, attend(REFERENCE, batch, **options), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 127, 128, 129, 149, 150, 1000])
@pytest.mark.parametrize("block_size", [1, 16, 100])
def test_a_window_that_begins_at_borders_of_pages_and_parts(
    cpu: CpuOperators, window: int, block_size: int
) -> None:
    batch = make_batch(
        [1, 1, 1, 7, 140, 97],
        [1, window, window + 1, 40, 150, 200],
        block_size=block_size,
        num_heads=6,
        num_kv_heads=2,
        head_dim=24,
        dtype=torch.float16,
    )
    assert attention_error(cpu, batch, window=window) < TOLERANCE


def test_a_window_hides_all_but_the_last_keys() -> None:
    batch = make_batch([3], [10], block_size=4, num_heads=1, num_kv_heads=1, head_dim=8)
    alone = attend(REFERENCE, batch, window=1)
    own_value = batch.values.flatten(1, 2)[batch.metadata.block_tables[0].long()].flatten(0, 1)[7:10]
    torch.testing.assert_close(alone[:, 0], own_value)
    torch.testing.assert_close(attend(REFERENCE, batch, window=10), attend(REFERENCE, batch))


@pytest.mark.parametrize("softcap", [1.0, 30.0])
@pytest.mark.parametrize("window", [None, 20])
def test_capped_scores_saturate(cpu: CpuOperators, softcap: float, window: int | None) -> None:
    batch = make_batch([1, 40], [90, 90], block_size=16, num_heads=2, num_kv_heads=1, head_dim=32)
    batch.query[:, 1].mul_(100.0)  # far beyond the cap; the other head stays below it
    assert attention_error(cpu, batch, window=window, softcap=softcap) < TOLERANCE


@every_dtype
def test_attention_with_scores_far_apart_stays_finite(cpu: CpuOperators, dtype: torch.dtype) -> None:
    batch = make_batch(
        [1, 40], [90, 90], block_size=16, num_heads=2, num_kv_heads=1, head_dim=32, dtype=dtype
    )
    batch.query.mul_(200.0)
    # Weights change by e to the power of the rounding of scores up to 4000.
    torch.testing.assert_close(attend(cpu, batch), attend(REFERENCE, batch), rtol=0, atol=2e-3)


# -------------------------------------------------------------------------- rows for themselves


CONTEXT_LEN = 640
CUTS = ([1] * 3 + [126, 70, 1, 300, 140], [16] * 40, [200, 1, 439])


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One sequence, of which any tokens can be computed."""

    query: Tensor
    cache: tuple[Tensor, Tensor]
    table: Tensor

    def rows(self, operators: CpuOperators, *ranges: range, **options: Any) -> list[Tensor]:
        """The outputs of these tokens, each range as a sequence of one batch."""
        lengths = [len(each) for each in ranges]
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
            context_lens=torch.tensor([each.stop for each in ranges], dtype=torch.int32),
            block_tables=self.table.repeat(len(ranges), 1),
            slot_mapping=torch.empty(0, dtype=torch.int64),
            max_query_len=max(lengths),
            max_context_len=max(each.stop for each in ranges),
        )
        query = torch.cat([self.query[each.start : each.stop] for each in ranges])
        output = operators.paged_attention(query, *self.cache, metadata, 0.1, **options)
        return list(torch.split(output, lengths))


def make_prompt(
    dtype: torch.dtype, *, block_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> Prompt:
    torch.manual_seed(head_dim)
    num_blocks = -(-CONTEXT_LEN // block_size)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    keys, values = store_vectors(torch.randn(shape), dtype), store_vectors(torch.randn(shape), dtype)
    table = torch.randperm(num_blocks, dtype=torch.int32)
    return Prompt(torch.randn(CONTEXT_LEN, num_heads, head_dim), (keys, values), table)


def ranges_of(lengths: Sequence[int]) -> list[range]:
    return [
        range(end - length, end) for length, end in zip(lengths, itertools.accumulate(lengths), strict=True)
    ]


@every_dtype
@pytest.mark.parametrize("options", [{}, {"window": 150, "softcap": 9.0}], ids=["all", "window"])
@pytest.mark.parametrize(
    "shape",
    [
        {"block_size": 16, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
        {"block_size": 20, "num_heads": 8, "num_kv_heads": 1, "head_dim": 10},
    ],
    ids=["default-model", "odd"],
)
def test_a_token_gets_the_same_bits_in_any_chunk_batch_and_number_of_threads(
    cpu: CpuOperators,
    instruction_set: str,
    shape: dict[str, int],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    prompt = make_prompt(dtype, **shape)
    [whole] = prompt.rows(cpu, range(CONTEXT_LEN), **options)
    for num_threads, cuts in zip((1, 3, 2), CUTS, strict=True):
        team = CpuOperators(num_threads, instruction_set=instruction_set)
        one_by_one = [prompt.rows(team, each, **options)[0] for each in ranges_of(cuts)]
        assert torch.equal(torch.cat(one_by_one), whole)
        assert torch.equal(torch.cat(prompt.rows(team, *ranges_of(cuts), **options)), whole)


@every_dtype
def test_parts_of_a_long_context_are_put_together(cpu: CpuOperators, dtype: torch.dtype) -> None:
    """Few single tokens: threads share their contexts."""
    batch = make_batch(
        [1, 1], [1000, 389], block_size=16, num_heads=6, num_kv_heads=2, head_dim=32, dtype=dtype
    )
    for options in ({}, {"window": 300}, {"window": 1}, {"softcap": 5.0}):
        assert attention_error(cpu, batch, **options) < TOLERANCE


@every_dtype
@pytest.mark.parametrize("poison", [NAN, INF])
def test_numbers_that_are_not_finite_stay_with_those_who_see_them(
    cpu: CpuOperators, poison: float, dtype: torch.dtype
) -> None:
    """Neither other sequences nor earlier tokens of the same chunk see them."""
    shape = {"block_size": 16, "num_heads": 6, "num_kv_heads": 2, "head_dim": 20}
    contexts, queries = [50, 150, 40, 170], [1, 140, 30, 1]
    good = make_batch(queries, contexts, **shape)
    keys, values = good.keys.clone(), good.values.clone()
    tables = good.metadata.block_tables
    keys[tables[1, 75 // 16], 0, 75 % 16, 3] = poison  # head 0 of sequence 1, at position 75
    values[tables[1, 90 // 16], 1, 90 % 16, 7] = poison  # head 1, at 90
    values[tables[3, 5], 1, 2, 7] = poison  # the single token of sequence 3, in the heads of KV head 1
    bad = dataclasses.replace(good, keys=store_vectors(keys, dtype), values=store_vectors(values, dtype))
    good = dataclasses.replace(
        good, keys=store_vectors(good.keys, dtype), values=store_vectors(good.values, dtype)
    )
    expected, output = attend(cpu, good), attend(cpu, bad)
    of_second = slice(1, 141)  # at positions 10 .. 149
    untouched = torch.ones(output.shape[:2], dtype=torch.bool)
    untouched[of_second][75 - 10 :, :3] = False
    untouched[of_second][90 - 10 :, 3:] = False
    untouched[-1, 3:] = False
    assert torch.equal(output[untouched], expected[untouched])
    if poison != poison or dtype == torch.int8:  # infinite numbers become large ones in float16
        assert output[~untouched][:, 7].isnan().all()


def test_a_batch_of_nothing_gives_nothing(cpu: CpuOperators) -> None:
    batch = make_batch([], [], block_size=16, num_heads=2, num_kv_heads=1, head_dim=8)
    assert attend(cpu, batch).shape == (0, 2, 8)
    batch = make_batch([0, 2, 0], [5, 7, 3], block_size=16, num_heads=2, num_kv_heads=1, head_dim=8)
    assert attention_error(cpu, batch) < TOLERANCE


# -------------------------------------------------------------------------- the cache


def written(operators: Any, key: Tensor, value: Tensor, dtype: torch.dtype, block_size: int) -> list[Tensor]:
    num_tokens, num_kv_heads, head_dim = key.shape
    num_blocks = num_tokens // block_size + 2
    shape = (num_blocks, num_kv_heads, block_size, stored_width(head_dim, dtype))
    caches = [torch.full(shape, 7, dtype=dtype) for _ in "kv"]
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(1))[:num_tokens]
    operators.write_kv(key, value, *caches, slots)
    return caches


def bits(cache: Tensor) -> Tensor:
    """NaN has many; one of them here."""
    if cache.dtype == torch.int8:
        numbers = cache[..., : head_dim_of(cache)]
        scales = cache[..., head_dim_of(cache) :].clone(memory_format=torch.contiguous_format)
        return torch.cat((numbers.float(), scales.view(torch.float32).nan_to_num(1e38)), dim=-1)
    return cache.float().nan_to_num(1e38)


@every_dtype
@pytest.mark.parametrize("head_dim", [1, 3, 8, 16, 31, 64, 100])
def test_writing_rounds_as_the_reference_and_touches_only_its_slots(
    cpu: CpuOperators, head_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    fused = torch.randn(50, 2 * 3 * head_dim) * torch.logspace(-12, 8, 50)[:, None]
    fused[3, 0], fused[9, -1], fused[17, head_dim] = NAN, -INF, 1e-42
    fused[20:22] = 0
    key, value = (part.unflatten(-1, (3, head_dim)) for part in fused.chunk(2, dim=-1))
    for block_size in (1, 16, 20):
        ours = written(cpu, key, value, dtype, block_size)
        theirs = written(REFERENCE, key, value, dtype, block_size)
        for our, their in zip(ours, theirs, strict=True):
            assert torch.equal(bits(our), bits(their))


@pytest.mark.parametrize("head_dim", [1, 16])  # one by one, and in registers
def test_every_float16_and_what_lies_between_two_is_rounded_as_by_torch(
    cpu: CpuOperators, head_dim: int
) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    finite = halves[halves.isfinite()].unique()
    between = (finite[1:] + finite[:-1]) / 2
    numbers = torch.cat((halves, between, between * (1 + 2e-7), torch.tensor([65519.0, 65520.0, 1e38])))
    padded = torch.cat((numbers, numbers.new_zeros(-len(numbers) % head_dim)))
    vectors = padded.reshape(-1, 1, head_dim)
    ours, theirs = (written(each, vectors, vectors, torch.float16, 64)[0] for each in (cpu, REFERENCE))
    assert torch.equal(bits(ours), bits(theirs))
    batch = make_batch([1], [1], block_size=16, num_heads=1, num_kv_heads=1, head_dim=head_dim)
    for first in range(0, len(padded), 4096):  # read back: one key has all the weight
        value = store_vectors(padded[first : first + head_dim], torch.float16)
        batch.values[batch.metadata.block_tables[0, 0], 0, 0] = value.float()
        stored = dataclasses.replace(batch, keys=batch.keys.half(), values=batch.values.half())
        assert torch.equal(attend(cpu, stored)[0, 0].nan_to_num(1e38), value.float().nan_to_num(1e38))


@pytest.mark.parametrize(("dtype", "step"), [(torch.float16, 2.0**-11), (torch.int8, 0.51 / 127)])
def test_a_stored_vector_is_within_half_a_step(dtype: torch.dtype, step: float) -> None:
    vectors = torch.randn(200, 64) * torch.logspace(-3, 3, 200)[:, None]
    error = (load_vectors(store_vectors(vectors, dtype)) - vectors).abs()
    largest = vectors.abs().amax(-1, keepdim=True) if dtype == torch.int8 else vectors.abs()
    assert bool((error <= step * largest + 2.0**-25).all())


def test_a_cache_of_another_type_goes_to_the_reference(cpu: CpuOperators) -> None:
    batch = make_batch(
        [3], [20], block_size=16, num_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.bfloat16
    )
    assert torch.equal(attend(cpu, batch), attend(REFERENCE, batch))
    key = torch.randn(4, 1, 8)
    ours, theirs = (written(each, key, key, torch.bfloat16, 16) for each in (cpu, REFERENCE))
    assert torch.equal(ours[0], theirs[0])
