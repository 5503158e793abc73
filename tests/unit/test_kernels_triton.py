"""The Triton kernels agree with the reference, run by Triton's interpreter on a CPU.

In a process of its own: triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = """
import torch
from kernels.dispatch import select_operators
from kernels.reference import ReferenceOperators
from tests.paged_batches import make_batch

triton, reference = select_operators("triton", "cpu"), ReferenceOperators()
for block_size in (1, 16, 20):
    for num_heads, num_kv_heads, head_dim in ((9, 3, 64), (4, 4, 24), (8, 1, 16)):
        contexts = [1, max(1, block_size - 1), block_size, block_size + 1, 70]
        for queries in ([1, 1, 1, 1, 1], [1, 1, block_size, 2, 65]):
            batch = make_batch(queries, contexts, block_size=block_size, num_heads=num_heads,
                               num_kv_heads=num_kv_heads, head_dim=head_dim)
            arguments = (batch.query, batch.keys, batch.values, batch.metadata, batch.scale)
            ours, theirs = triton.paged_attention(*arguments), reference.paged_attention(*arguments)
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
            if num_heads != 4:
                continue
            for options in ({"window": 1}, {"window": block_size + 1, "softcap": 2.0}, {"window": 33},
                            {"softcap": 50.0}):
                ours = triton.paged_attention(*arguments, **options)
                theirs = reference.paged_attention(*arguments, **options)
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
halves = make_batch([1, 9], [30, 40], block_size=16, num_heads=4, num_kv_heads=2, head_dim=24,
                    dtype=torch.float16)
arguments = (halves.query, halves.keys, halves.values, halves.metadata, halves.scale)
torch.testing.assert_close(triton.paged_attention(*arguments), reference.paged_attention(*arguments),
                           atol=2e-5, rtol=1e-4)
try:
    triton.paged_attention(halves.query, halves.keys.to(torch.int8), halves.values, *arguments[3:])
    raise SystemExit("a cache in int8 was taken")
except ValueError:
    pass
for width in (576, 40):
    x, residual, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
    torch.testing.assert_close(triton.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    ours, theirs = residual.clone(), residual.clone()
    torch.testing.assert_close(triton.add_rms_norm(x, ours, weight, 1e-5),
                               reference.add_rms_norm(x, theirs, weight, 1e-5))
    torch.testing.assert_close(ours, theirs)
    narrow = x.bfloat16()
    ours = triton.rms_norm(narrow, weight, 1e-5)
    assert ours.dtype == torch.bfloat16  # the interpreter cuts where a GPU rounds: compared with a tolerance
    torch.testing.assert_close(ours, reference.rms_norm(narrow, weight, 1e-5))
"""


def test_triton_kernels_under_the_interpreter() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
