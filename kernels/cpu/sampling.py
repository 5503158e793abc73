"""Choosing a step's tokens, and what is told of them: one call of C++ each (sampling.h, logprobs.cpp)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection, Iterator, Sequence
from ctypes import c_double, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.build import built_library
from kernels.cpu.team import Team, loaded_library
from kernels.sampling_metadata import Draw, LogitAdjustment, RowLogprobs


class _Adjustment(ctypes.Structure):
    """`LogitAdjustment` of sampling.h."""

    _fields_ = (
        ("biased", c_void_p),
        ("biases", c_void_p),
        ("num_biased", c_int64),
        ("token_ids", c_void_p),
        ("num_tokens", c_int64),
        ("num_prompt_tokens", c_int64),
        ("repetition_penalty", c_float),
        ("presence_penalty", c_double),
        ("frequency_penalty", c_double),
        ("allowed", c_void_p),
        ("num_allowed", c_int64),
        ("barred", c_void_p),
        ("num_barred", c_int64),
        ("mask", c_void_p),
        ("mask_bytes", c_int64),
    )


class _Row(ctypes.Structure):
    """`SamplingRow` of sampling.h."""

    _fields_ = (
        ("adjustment", c_void_p),
        ("temperature", c_float),
        ("min_p", c_float),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("number", c_double),
    )


class NativeSampling:
    """Samples by C++ kernels on the threads of a team. A row's token depends on nothing but the row.

    Raises BackEndUnavailable where there is no compiler or it fails.
    """

    def __init__(self, team: Team | None = None, *, library: ctypes.CDLL | None = None) -> None:
        """`library` is that of the team; None for the team: the calling thread alone."""
        library = library or loaded_library(built_library())
        self._team = team or Team(library=library)
        self._sample = library.headrace_sample
        self._sample.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p]
        self._sample.restype = None
        self._logprobs = library.headrace_logprobs
        self._logprobs.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, *[c_void_p] * 4]
        self._logprobs.restype = None

    def sample(
        self, logits: Tensor, adjustments: Sequence[LogitAdjustment | None], draws: Sequence[Draw | None]
    ) -> list[int]:
        """The token of each row: drawn, or for None the largest and first of equals.

        logits: float32 `[rows, vocab]` with contiguous rows, changed in place where a row is adjusted. Raises
        ValueError for another type or layout.
        """
        if logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.stride(1) != 1:
            raise ValueError(
                f"the logits are {logits.dtype} on {logits.device} with strides {logits.stride()}; "
                "they must be float32 on the CPU with contiguous rows"
            )
        num_rows, vocab_size = logits.shape
        tokens = (c_int64 * num_rows)()
        rows = described = None  # named, to be there until the call returns
        if any(adjustments) or any(draws):
            described = [_Described(each) if each else None for each in adjustments]
            rows = (_Row * num_rows)(*map(_row, described, draws))
        self._sample(
            self._team.address, logits.data_ptr(), logits.stride(0), num_rows, vocab_size, rows, tokens
        )
        return list(tokens)

    def look_up(self, rows: Sequence[Tensor], chosen: Sequence[int], num_top: int) -> Iterator[RowLogprobs]:
        """Of one token for each row of logits, contiguous float32 `[vocab]`, beside the `num_top` best."""
        num_rows, vocab_size = len(rows), rows[0].shape[0]
        logprobs, ranks = (c_double * num_rows)(), (c_int64 * num_rows)()
        top_ids, top = (c_int64 * (num_rows * num_top))(), (c_double * (num_rows * num_top))()
        self._logprobs(
            self._team.address,
            (c_void_p * num_rows)(*(row.data_ptr() for row in rows)),
            num_rows,
            vocab_size,
            (c_int64 * num_rows)(*chosen),
            num_top,
            logprobs,
            ranks,
            top_ids,
            top,
        )
        for row, (logprob, rank) in enumerate(zip(logprobs, ranks, strict=True)):
            part = slice(row * num_top, (row + 1) * num_top)
            yield RowLogprobs(logprob, rank, top_ids[part], top[part])


class _Described:
    """An adjustment as the C++ reads it, and the memory that it points to."""

    def __init__(self, adjustment: LogitAdjustment) -> None:
        self._kept: list[Any] = []
        bias, mask = adjustment.logit_bias, adjustment.mask
        self._structure = _Adjustment(
            self._array("i", bias)[0],
            *self._array("f", bias.values()),
            *self._array("i", adjustment.token_ids if adjustment.penalises else ()),
            adjustment.num_prompt_tokens,
            adjustment.repetition_penalty,
            adjustment.presence_penalty,
            adjustment.frequency_penalty,
            *self._array("i", adjustment.allowed or ()),
            *self._array("i", adjustment.barred),
            None if mask is None else mask.ctypes.data,
            0 if mask is None else len(mask),
        )
        self._kept.append(mask)
        self.address = ctypes.addressof(self._structure)

    def _array(self, type_code: str, values: Collection[float]) -> tuple[int | None, int]:
        """Where the values are, and how many."""
        if not values:
            return None, 0
        numbers = array(type_code, values)
        self._kept.append(numbers)
        return numbers.buffer_info()


def _row(described: _Described | None, draw: Draw | None) -> _Row:
    address = described.address if described else None
    if draw is None:
        return _Row(address)
    return _Row(address, draw.temperature, draw.min_p, draw.top_k, draw.top_p, draw.number)
