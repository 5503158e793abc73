"""Simulated A/B tests of times to the first token: a few subjects ask most, times have heavy tails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shared.experiment_figures import MAX_SUBJECT_WEIGHT, NUM_CLUSTERS, ClusterSums


@dataclass(frozen=True)
class World:
    """Logarithms of times are normal, between subjects and within them; some requests take much longer."""

    num_subjects: int = 4000
    num_requests: int = 40_000
    zipf: float = 1.1  # of the subjects' shares of the requests
    deviation_between: float = 0.3
    deviation_within: float = 0.8
    share_of_stalls: float = 0.03  # which take eight times as long
    treated_share: float = 0.5


def looks(
    world: World, rng: np.random.Generator, *, ratio: float, num_looks: int
) -> Iterator[tuple[ClusterSums, ClusterSums]]:
    """Control's and treated's sums after each part of the requests. `ratio`: of their times."""
    activity = 1.0 / np.arange(1, world.num_subjects + 1) ** world.zipf
    subject = rng.choice(world.num_subjects, size=world.num_requests, p=activity / activity.sum())
    is_treated = rng.random(world.num_subjects) < world.treated_share
    cluster = rng.integers(NUM_CLUSTERS, size=world.num_subjects)
    own = rng.normal(0.0, world.deviation_between, world.num_subjects)
    times = -1.0 + own[subject] + rng.normal(0.0, world.deviation_within, world.num_requests)
    times += np.log(8.0) * (rng.random(world.num_requests) < world.share_of_stalls)
    times += np.log(ratio) * is_treated[subject]
    for end in np.linspace(0, world.num_requests, num_looks + 1, dtype=int)[1:]:
        yield (
            cluster_sums(subject[:end], times[:end], cluster, ~is_treated),
            cluster_sums(subject[:end], times[:end], cluster, is_treated),
        )


def cluster_sums(
    subject: np.ndarray, values: np.ndarray, cluster: np.ndarray, belongs: np.ndarray
) -> ClusterSums:
    """As gateways keep them, computed at once: of those subjects that belong to a variant."""
    counts = np.bincount(subject, minlength=len(cluster))
    totals = np.bincount(subject, weights=values, minlength=len(cluster))
    weights = np.minimum(counts, MAX_SUBJECT_WEIGHT) * belongs
    products = weights * totals / np.maximum(counts, 1)
    return ClusterSums(
        np.bincount(cluster, weights, minlength=NUM_CLUSTERS).tolist(),
        np.bincount(cluster, products, minlength=NUM_CLUSTERS).tolist(),
    )
