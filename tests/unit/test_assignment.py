"""A/B assignment is sticky, fair by weight, and moves no more subjects than it has to."""

import math
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from gateway.errors import ApiError
from gateway.routing.assignment import Asker, Assigner, assign, subject_of, weights_of
from shared.config import OverrideConfig, RouteConfig, VariantConfig
from shared.identifiers import TenantId
from shared.route_config import RampStep

USERS = [f"user:{number}" for number in range(2000)]
NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)


def split(**weights: float) -> list[VariantConfig]:
    return [VariantConfig(variant=name, model="m", weight=weight) for name, weight in weights.items()]


def assigned(
    arms: list[VariantConfig], users: list[str], *, route: str = "chat", version: int = 1
) -> list[str]:
    weights = weights_of(arms, 0.0)
    return [assign(route, version, arms, weights, user).variant for user in users]


def asker(**fields: str | None) -> Asker:
    known = {"tenant": "acme", "key_id": "key_1", "user": None, "session": None, "wished_variant": None}
    return Asker(**{**known, **fields})  # type: ignore[arg-type]


def test_100_000_subjects_are_split_90_10_within_three_sigma_and_80_20_moves_only_the_tenth_that_must():
    users = [f"user:acme:{number}" for number in range(100_000)]
    before = assigned(split(control=90, treated=10), users)
    sigma = math.sqrt(len(users) * 0.9 * 0.1)
    assert abs(before.count("treated") - 10_000) <= 3 * sigma

    after = assigned(split(control=80, treated=20), users)
    sigma = math.sqrt(len(users) * 0.8 * 0.2)
    assert abs(after.count("treated") - 20_000) <= 3 * sigma
    moved = Counter((old, new) for old, new in zip(before, after, strict=True) if old != new)
    assert list(moved) == [("control", "treated")]
    # Exactly as many as one arm has gained: nobody moves who need not.
    assert moved["control", "treated"] == after.count("treated") - before.count("treated")


def test_the_order_of_the_arms_means_nothing():
    arms = split(control=90, treated=10)
    assert assigned(arms, USERS) == assigned(arms[::-1], USERS)


def test_a_third_arm_takes_only_its_own_share():
    before = assigned(split(a=1, b=1), USERS)
    after = assigned(split(a=1, b=1, c=1), USERS)
    assert {new for old, new in zip(before, after, strict=True) if old != new} == {"c"}


def test_an_arm_of_weight_zero_gets_nobody():
    assert set(assigned(split(a=0, b=1), USERS)) == {"b"}


def test_two_experiments_and_two_versions_of_one_split_the_same_users_independently():
    arms = split(a=1, b=1)
    one = assigned(arms, USERS)
    for other in (assigned(arms, USERS, route="other"), assigned(arms, USERS, version=2)):
        both = sum(first == second for first, second in zip(one, other, strict=True))
        assert 0.4 < both / len(USERS) < 0.6


def test_what_a_subject_is_called_after_is_told():
    route = RouteConfig(name="chat", sticky="user", split=split(a=1))
    assert subject_of(route, asker()).source == "key"  # there is no user: the key stands in for it
    assert subject_of(route, asker(user="ann")).source == "user"
    by_session = route.model_copy(update={"sticky": "session"})
    assert subject_of(by_session, asker(user="ann")).source == "key"
    assert subject_of(by_session, asker(session="s")).source == "session"


def test_two_tenants_may_each_have_an_ann():
    route = RouteConfig(name="chat", split=split(a=1))
    subjects = {subject_of(route, asker(user="ann", tenant=tenant)).text for tenant in ("acme", "bolt")}
    assert len(subjects) == 2


def test_a_route_that_does_not_stick_asks_anew_each_time():
    route = RouteConfig(name="chat", sticky="none", split=split(a=1))
    assert len({subject_of(route, asker(user="ann", session="s")).text for _ in range(10)}) == 10


def test_a_tenants_override_goes_before_the_split_and_is_told_as_one():
    route = RouteConfig(
        name="chat",
        split=split(control=1, treated=0),
        overrides=[OverrideConfig(tenant="acme", variant="treated")],
    )
    overridden = Assigner().assign(route, asker(user="ann"))
    assert (overridden.variant.variant, overridden.told_source) == ("treated", "override")
    assert overridden.is_overridden
    assert overridden.assigned.variant == "control"  # where it would have been
    others = Assigner().assign(route, asker(user="ann", tenant=TenantId("bolt")))
    assert (others.variant.variant, others.told_source, others.is_overridden) == ("control", "user", False)


def test_a_client_may_choose_only_where_the_route_lets_it():
    route = RouteConfig(name="chat", split=split(control=1, treated=0))
    wish = asker(user="ann", wished_variant="treated")
    assert Assigner().assign(route, wish).variant.variant == "control"

    free = route.model_copy(
        update={
            "allow_variant_header": True,
            "overrides": [OverrideConfig(tenant="acme", variant="control")],
        }
    )
    chosen = Assigner().assign(free, wish)  # also before what holds for its tenant
    assert (chosen.variant.variant, chosen.told_source) == ("treated", "override")
    with pytest.raises(ApiError, match=r"no variant 'thread'.*control, treated") as refused:
        Assigner().assign(free, asker(wished_variant="thread"))
    assert (refused.value.status, refused.value.param) == (400, "x-headrace-variant")


def test_a_ramp_moves_only_users_towards_the_arm_that_grows_by_the_clock_alone():
    ramp = [RampStep(at=NOON + timedelta(hours=hour), weight=weight) for hour, weight in ((0, 10), (1, 50))]
    arms = [
        VariantConfig(variant="control", model="m", weight=90),
        VariantConfig(variant="canary", model="m", weight=0, ramp=ramp),
    ]
    route = RouteConfig(name="chat", split=arms)
    now = [0.0]
    assigner = Assigner(clock=lambda: now[0])

    def canaries(at: datetime) -> set[str]:
        now[0] = at.timestamp()
        assigned_to = {user: assigner.assign(route, asker(user=user)).variant.variant for user in USERS}
        return {user for user, variant in assigned_to.items() if variant == "canary"}

    before, first = canaries(NOON - timedelta(seconds=1)), canaries(NOON)
    still, second = canaries(NOON + timedelta(minutes=59)), canaries(NOON + timedelta(hours=1))
    assert not before
    assert first == still
    assert first < second
    assert 0.07 < len(first) / len(USERS) < 0.13  # 10 of 100
    assert 0.31 < len(second) / len(USERS) < 0.41  # 50 of 140


def test_an_assignment_keeps_the_shares_of_its_moment_and_only_where_it_counts_for_an_experiment():
    steps = [RampStep(at=NOON, weight=1), RampStep(at=NOON + timedelta(hours=1), weight=3)]
    route = RouteConfig(
        name="chat",
        split=[
            VariantConfig(variant="a", model="m", weight=1),
            VariantConfig(variant="b", model="m", weight=1, ramp=steps),
        ],
        overrides=[OverrideConfig(tenant=TenantId("vip"), variant="b")],
        allow_variant_header=True,
    )
    now = NOON.timestamp()
    assigner = Assigner(clock=lambda: now)
    first = assigner.assign(route, asker()).draw
    now += 7200
    second = assigner.assign(route, asker()).draw
    assert first is not None
    assert second is not None
    assert first.shares == {"a": 0.5, "b": 0.5}
    assert second.shares == {"a": 0.25, "b": 0.75}
    assert assigner.assign(route, asker(tenant="vip")).draw is None
    assert assigner.assign(route, asker(wished_variant="a")).draw is None
    lonely = RouteConfig(name="lonely", split=route.split[:1])
    assert assigner.assign(lonely, asker()).draw is None
