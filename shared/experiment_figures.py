"""What gateways keep of an experiment, and its report reads: figures of each variant, in fixed memory.

Requests of one subject resemble each other: a variance that took them for independent would be too small.
Subjects are independent. Each belongs to one of NUM_CLUSTERS clusters by its hash, and sums are kept for each
cluster: enough for an honest variance, however many subjects there are.

A subject counts in the mean of its variant as often as it asked, but not more than MAX_SUBJECT_WEIGHT times.
Without that bound the few who ask most would be the mean, and more subjects would not make it surer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

import msgspec

NUM_CLUSTERS = 256
NUM_GROUPS = 32  # of clusters; each has histograms of its own, which the intervals of quantiles are made from
MAX_SUBJECT_WEIGHT = 10
NUM_SUBJECT_CELLS = 2**21  # see SplitFigures

TimeMetric = Literal["ttft", "tpot", "e2e"]
RateMetric = Literal["failed", "aborted"]
TIMES: tuple[TimeMetric, ...] = ("ttft", "tpot", "e2e")
RATES: tuple[RateMetric, ...] = ("failed", "aborted")  # of the requests that were not refused

# Bins of histograms: 16 for each doubling, so that the middle of one is within 2.2 % of what is in it.
BINS_PER_DOUBLING = 16
MIN_TIME_S, MAX_TIME_S = 1e-5, 1e5

KeyT = TypeVar("KeyT", str, int)
NumberT = TypeVar("NumberT", int, float)
Histogram = dict[int, int]  # how many times by the number of the bin


def bin_of(time_s: float) -> int:
    return math.floor(BINS_PER_DOUBLING * math.log2(min(max(time_s, MIN_TIME_S), MAX_TIME_S)))


def bin_edge_s(number: int) -> float:
    """Where a bin begins."""
    return math.exp2(number / BINS_PER_DOUBLING)


def cluster_of(subject_hash: int) -> int:
    return subject_hash % NUM_CLUSTERS


def cell_of(subject_hash: int) -> int:
    return (subject_hash >> 32) % NUM_SUBJECT_CELLS


class RequestCounts(msgspec.Struct):
    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    outcomes: dict[str, int] = {}
    finish_reasons: dict[str, int] = {}

    def add(self, other: RequestCounts) -> None:
        self.requests += other.requests
        self.input_tokens += other.input_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        add_counts(self.outcomes, other.outcomes)
        add_counts(self.finish_reasons, other.finish_reasons)


class ClusterSums(msgspec.Struct):
    """Of one metric: by cluster the weights of its subjects, and the sum of their weights times their means.

    Of times the metric is the natural logarithm, of rates 1 or 0.
    """

    weights: list[float] = msgspec.field(default_factory=lambda: [0.0] * NUM_CLUSTERS)
    sums: list[float] = msgspec.field(default_factory=lambda: [0.0] * NUM_CLUSTERS)

    def add(self, other: ClusterSums) -> None:
        self.weights = [first + second for first, second in zip(self.weights, other.weights, strict=True)]
        self.sums = [first + second for first, second in zip(self.sums, other.sums, strict=True)]


class VariantFigures(msgspec.Struct):
    """`assigned`: of whom the split gave this variant, whoever answered (intention to treat), and so are the
    clusters and the histograms; `served`: of what this variant answered."""

    assigned: RequestCounts = msgspec.field(default_factory=RequestCounts)
    served: RequestCounts = msgspec.field(default_factory=RequestCounts)
    clusters: dict[str, ClusterSums] = {}
    histograms: dict[str, list[Histogram]] = {}  # by metric, then by group
    served_histograms: dict[str, Histogram] = {}

    def cluster_sums(self, metric: str) -> ClusterSums:
        sums = self.clusters.get(metric)
        if sums is None:  # not setdefault: these are asked for with each request
            sums = self.clusters[metric] = ClusterSums()
        return sums

    def histogram_groups(self, metric: str) -> list[Histogram]:
        groups = self.histograms.get(metric)
        if groups is None:
            groups = self.histograms[metric] = [{} for _ in range(NUM_GROUPS)]
        return groups

    def add(self, other: VariantFigures) -> None:
        self.assigned.add(other.assigned)
        self.served.add(other.served)
        for metric, sums in other.clusters.items():
            self.cluster_sums(metric).add(sums)
        for metric, groups in other.histograms.items():
            for mine, theirs in zip(self.histogram_groups(metric), groups, strict=True):
                add_counts(mine, theirs)
        for metric, histogram in other.served_histograms.items():
            add_counts(self.served_histograms.setdefault(metric, {}), histogram)


class SplitFigures(msgspec.Struct):
    """Whether subjects come to variants as the weights say, also while these change.

    The subjects of an experiment fall into NUM_SUBJECT_CELLS cells by their hash. The first one in a cell,
    over all gateways, counts: for the variant that it got, and for each variant with the share that the
    weights gave it at that moment. Later ones in the same cell, and the same subject again, do not count,
    whatever they got; so what counts are independent draws with known chances.
    """

    counted: dict[str, int] = {}  # by variant
    expected: dict[str, float] = {}  # sums of shares
    # Sums of products of two shares, which the covariances are made from.
    products: dict[str, dict[str, float]] = {}

    def count(self, variant: str, shares: dict[str, float]) -> None:
        self.counted[variant] = self.counted.get(variant, 0) + 1
        add_counts(self.expected, shares)
        for first, share in shares.items():
            row = self.products.setdefault(first, {})
            for second, other in shares.items():
                row[second] = row.get(second, 0.0) + share * other

    def add(self, other: SplitFigures) -> None:
        add_counts(self.counted, other.counted)
        add_counts(self.expected, other.expected)
        for first, row in other.products.items():
            add_counts(self.products.setdefault(first, {}), row)


class ExperimentRecord(msgspec.Struct):
    """What one life of one gateway has seen of one version of a route's experiment. Always written whole, so
    that writing it twice, which happens when Redis is slow to answer, changes nothing."""

    began_at: float  # unix time
    updated_at: float
    variants: dict[str, VariantFigures] = {}
    split: SplitFigures = msgspec.field(default_factory=SplitFigures)

    def variant(self, name: str) -> VariantFigures:
        figures = self.variants.get(name)
        if figures is None:
            figures = self.variants[name] = VariantFigures()
        return figures

    def add(self, other: ExperimentRecord) -> None:
        self.began_at = min(self.began_at, other.began_at)
        self.updated_at = max(self.updated_at, other.updated_at)
        for name, figures in other.variants.items():
            self.variant(name).add(figures)
        self.split.add(other.split)


def sum_of(records: Iterable[ExperimentRecord]) -> ExperimentRecord | None:
    """A new one; None: there is none to add."""
    total: ExperimentRecord | None = None
    for record in records:
        if total is None:
            total = ExperimentRecord(record.began_at, record.updated_at)
        total.add(record)
    return total


class AnswerRecord(msgspec.Struct, frozen=True):
    """Whose answer a response id names, for the feedback that may come."""

    route: str
    experiment_version: int
    variant: str  # the assigned one
    cluster: int


def add_counts(mine: dict[KeyT, NumberT], theirs: Mapping[KeyT, NumberT]) -> None:
    for key, count in theirs.items():
        mine[key] = mine.get(key, 0) + count


# ------------------------------------------------------------------------------------------ feedback

FEEDBACK_UNITS = 1_000_000  # sums are of whole numbers: so nothing is lost when a score replaces another
MAX_COMMENTS = 1000  # of one experiment and tenant


class CommentRecord(msgspec.Struct, frozen=True):
    variant: str
    score: float
    comment: str


def feedback_fields(variant: str, cluster: int) -> tuple[str, str]:
    """Of the hash with the sums of feedback: the number of scores, and the sum of them in FEEDBACK_UNITS."""
    return f"{variant} {cluster} count", f"{variant} {cluster} sum"
