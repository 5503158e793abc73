"""What users are promised, as it is written on the command line."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadtest.knee.observations import broken_constraint, good_share, percentile_with_failures, requests_of
from loadtest.knee.options import budget_of, cvs_of, tiers_of
from loadtest.knee.probe import ProbedRequest
from loadtest.knee.slo import SloTier, parse_slo, parse_tier
from shared.errors import ConfigError


def test_limits_are_read_with_their_units() -> None:
    assert parse_slo("ttft=500ms,tpot=50ms") == SloTier(ttft_s=0.5, tpot_s=0.05)
    assert parse_slo("e2el=1.5s", attainment=0.9) == SloTier(e2el_s=1.5, attainment=0.9)
    assert parse_tier("batch:e2el=60s@0.9") == SloTier(name="batch", e2el_s=60.0, attainment=0.9)
    assert budget_of("300s") == budget_of("300") == 300.0
    assert cvs_of("1,2") == (1.0, 2.0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ttft=500", "not a duration"),
        ("ttft=0ms", "not a duration"),
        ("ttft", "NAME=DURATION"),
        ("itl=5ms", "not one of: ttft, tpot, e2el"),
        ("ttft=1s,ttft=2s", "given twice"),
        ("ttft=1s@0.3", "between 0.5 and 0.999"),
        ("ttft=1s@often", "not a number"),
        ("ttft=1s@nan", "between 0.5 and 0.999"),
    ],
)
def test_what_cannot_be_promised_is_refused_with_the_flag(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        parse_slo(text)
    assert error.value.param == "--slo"


def test_tiers_have_names_of_their_own_and_exclude_a_lone_slo() -> None:
    with pytest.raises(ConfigError, match="name of its own"):
        tiers_of(None, ["a:ttft=1s", "a:ttft=2s"], "0.95")
    with pytest.raises(ConfigError, match="either that or --tier"):
        tiers_of("ttft=1s", ["a:ttft=1s"], "0.95")
    with pytest.raises(ConfigError, match="NAME:LIMITS"):
        tiers_of(None, ["ttft=1s"], "0.95")
    with pytest.raises(ConfigError, match="only once"):
        cvs_of("1,1")


def request(**fields: object) -> ProbedRequest:
    usual = {"due_s": 1.0, "sent_s": 1.2, "first_token_s": 1.4, "end_s": 2.4, "num_output_tokens": 11}
    return ProbedRequest(**{**usual, **fields})  # type: ignore[arg-type]


def test_latencies_count_from_when_the_request_was_due() -> None:
    one = request()
    assert one.ttft_due == pytest.approx(0.4)
    assert one.e2el_due == pytest.approx(1.4)
    assert one.tpot == pytest.approx(0.1)
    assert one.dispatch_lag == pytest.approx(0.2)


def test_a_failure_is_infinitely_late_and_never_good() -> None:
    failed = request(failed=True, first_token_s=None)
    assert failed.ttft_due == failed.e2el_due == failed.tpot == math.inf
    requests = requests_of([failed])
    assert good_share(requests, SloTier(tpot_s=9.0)).tolist() == [0.0]
    assert broken_constraint(requests, SloTier(tpot_s=9.0)) == "failures"


def test_one_token_answers_have_no_tpot_and_cannot_break_it() -> None:
    single = request(num_output_tokens=1)
    assert single.tpot is None
    assert good_share(requests_of([single]), SloTier(tpot_s=0.001)).tolist() == [1.0]


def test_what_was_cut_off_is_bad_only_if_it_had_waited_too_long_already() -> None:
    waiting = request(first_token_s=None, end_s=1.5, cut_off=True)  # half a second without a token
    requests = requests_of([waiting])
    assert good_share(requests, SloTier(ttft_s=0.4)).tolist() == [0.0]
    assert np.isnan(good_share(requests, SloTier(ttft_s=0.6))).all()
    assert np.isnan(good_share(requests, SloTier(tpot_s=0.1))).all()


def test_the_limit_that_most_requests_broke_is_named() -> None:
    slow = [request(end_s=9.0)] * 3 + [request(first_token_s=8.0, end_s=9.0)]
    assert broken_constraint(requests_of(slow), SloTier(ttft_s=0.5, tpot_s=0.2)) == "tpot"
    assert broken_constraint(requests_of([request()]), SloTier(ttft_s=0.5)) is None


def test_failures_stay_in_the_percentile() -> None:
    latencies = np.array([0.1] * 90 + [math.inf] * 10)
    assert percentile_with_failures(latencies, 50) == 0.1
    assert percentile_with_failures(latencies, 95) == math.inf
