"""The measured part of a probe as arrays, and which of its requests kept a promise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.knee.probe import Probe, ProbedRequest
from loadtest.knee.slo import SloTier

Floats = NDArray[np.float64]
FAILURES = "failures"
BLOCK_S = 20.0  # near a knee, requests that are closer than that say nearly the same


@dataclass(frozen=True, slots=True)
class Requests:
    """Columns of a probe's requests, by due time. [num_requests] each; what is not known is nan."""

    due_s: Floats
    first_token_s: Floats
    end_s: Floats
    num_prompt_tokens: Floats
    num_output_tokens: Floats
    ttft_s: Floats  # from due; inf: failed, nan: cut off before it
    tpot_s: Floats  # nan also for answers of one token
    e2el_s: Floats
    failed: NDArray[np.bool_]
    cut_off: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.due_s)


def requests_of(rows: list[ProbedRequest]) -> Requests:
    """Sorted by due time."""
    rows = sorted(rows, key=lambda row: row.due_s)

    def column(name: str) -> Floats:
        return np.array([getattr(row, name) for row in rows], dtype=np.float64)  # None becomes nan

    return Requests(
        due_s=column("due_s"),
        first_token_s=column("first_token_s"),
        end_s=column("end_s"),
        num_prompt_tokens=column("num_prompt_tokens"),
        num_output_tokens=column("num_output_tokens"),
        ttft_s=column("ttft_due"),
        tpot_s=column("tpot"),
        e2el_s=column("e2el_due"),
        failed=np.array([row.failed for row in rows], dtype=bool),
        cut_off=np.array([row.cut_off for row in rows], dtype=bool),
    )


def good_share(requests: Requests, tier: SloTier) -> Floats:
    """1: kept every limit; 0: broke one; nan: cut off before that was known. [num_requests]

    TPOT of an answer without a second token cannot be broken. A cut-off request that had already
    waited longer than a limit broke it.
    """
    good = np.ones(len(requests))
    waited_s = requests.end_s - requests.due_s  # of those that were cut off
    for name, limit_s in tier.limits_s.items():
        latency_s = getattr(requests, f"{name}_s")
        broke = latency_s > limit_s
        is_unknown = requests.cut_off & np.isnan(latency_s)
        if name != "tpot":
            broke |= is_unknown & (waited_s > limit_s)
        good[is_unknown & ~broke & (good == 1.0)] = np.nan
        good[broke] = 0.0
    good[requests.failed] = 0.0
    return good


def broken_constraint(requests: Requests, tier: SloTier) -> str | None:
    """The limit that most requests broke; None if none did."""
    counts = {FAILURES: int(requests.failed.sum())}
    waited_s = requests.end_s - requests.due_s
    for name, limit_s in tier.limits_s.items():
        latency_s = getattr(requests, f"{name}_s")
        broke = (latency_s > limit_s) & ~requests.failed
        if name != "tpot":
            broke |= requests.cut_off & np.isnan(latency_s) & (waited_s > limit_s)
        counts[name] = int(broke.sum())
    worst = max(counts, key=lambda name: counts[name])
    return worst if counts[worst] else None


def percentile_with_failures(latencies_s: Floats, percent: float) -> float:
    """Of all that is known, failures being infinite; nan if nothing is known."""
    known = latencies_s[~np.isnan(latencies_s)]
    if not len(known):
        return float("nan")
    # "higher": between a number and infinity there is nothing to interpolate.
    return float(np.percentile(known, percent, method="higher"))


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive stretches of probes, by arrival: the units that are independent enough. [num_blocks]"""

    rate: Floats  # offered, of the block's probe
    num_requests: Floats
    good: Floats  # share of them

    def __len__(self) -> int:
        return len(self.rate)


def block_index(probe: Probe, due_s: Floats, block_s: float = BLOCK_S) -> NDArray[np.int64]:
    """The block of each request: of equal length, as near to `block_s` as divides the window; -1 outside."""
    window_s = probe.end_s - probe.warm_cut_s
    num_blocks = max(1, round(window_s / block_s))
    index = np.floor((due_s - probe.warm_cut_s) / window_s * num_blocks).astype(np.int64)
    return np.where((index >= 0) & (index < num_blocks), index, -1)


def block_means(index: NDArray[np.int64], values: Floats) -> tuple[Floats, Floats]:
    """Mean and number of the known values of each block, in the order of blocks; empty blocks are left
    out."""
    keep = (index >= 0) & ~np.isnan(values)
    counts = np.bincount(index[keep])
    sums = np.bincount(index[keep], weights=values[keep])
    filled = counts > 0
    return sums[filled] / counts[filled], counts[filled].astype(np.float64)


def blocks_of(probes: list[Probe], tier: SloTier, block_s: float = BLOCK_S) -> Blocks:
    """All blocks of open-loop probes, pooled."""
    rates, counts, goods = [], [], []
    for probe in probes:
        requests = requests_of(probe.requests)
        if not len(requests) or probe.rate is None:
            continue
        good, count = block_means(block_index(probe, requests.due_s, block_s), good_share(requests, tier))
        rates.append(np.full(len(good), probe.rate))
        counts.append(count)
        goods.append(good)
    if not rates:
        return Blocks(np.empty(0), np.empty(0), np.empty(0))
    return Blocks(np.concatenate(rates), np.concatenate(counts), np.concatenate(goods))
