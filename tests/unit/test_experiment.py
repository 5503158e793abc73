"""A/B assignment is sticky, fair by weight, and moves no more subjects than it has to."""

import math
from collections import Counter

from gateway.experiment import assign, subject_of
from shared.config import RouteConfig, VariantConfig

USERS = [f"user:{number}" for number in range(2000)]


def split(**weights: float) -> list[VariantConfig]:
    return [VariantConfig(variant=name, model="m", weight=weight) for name, weight in weights.items()]


def test_a_90_10_split_is_within_three_sigma_over_2000_users():
    counts = Counter(assign("chat", 1, split(control=90, treated=10), user).variant for user in USERS)
    sigma = math.sqrt(len(USERS) * 0.9 * 0.1)
    assert abs(counts["treated"] - 200) <= 3 * sigma


def test_the_same_user_always_gets_the_same_variant():
    arms = split(control=90, treated=10)
    assert [assign("chat", 1, arms, user).variant for user in USERS] == [
        assign("chat", 1, list(reversed(arms)), user).variant for user in USERS
    ]


def test_a_new_weight_moves_only_users_towards_the_arm_that_grew():
    before = {user: assign("chat", 1, split(control=90, treated=10), user).variant for user in USERS}
    after = {user: assign("chat", 1, split(control=80, treated=20), user).variant for user in USERS}
    moved = [user for user in USERS if before[user] != after[user]]
    assert moved
    assert all(after[user] == "treated" for user in moved)


def test_a_third_arm_takes_only_its_own_share():
    before = {user: assign("chat", 1, split(a=1, b=1), user).variant for user in USERS}
    after = {user: assign("chat", 1, split(a=1, b=1, c=1), user).variant for user in USERS}
    assert {after[user] for user in USERS if before[user] != after[user]} == {"c"}


def test_an_arm_of_weight_zero_gets_nobody():
    assert {assign("chat", 1, split(a=0, b=1), user).variant for user in USERS} == {"b"}


def test_two_experiments_split_the_same_users_independently():
    arms = split(a=1, b=1)
    both = sum(assign("one", 1, arms, user).variant == assign("two", 1, arms, user).variant for user in USERS)
    assert 0.4 < both / len(USERS) < 0.6


def test_without_a_user_the_key_decides():
    route = RouteConfig(name="chat", sticky="user", split=split(a=1))
    assert subject_of(route, user=None, session=None, key_id="key_1") == "key:key_1"
    assert subject_of(route, user="ann", session=None, key_id="key_1") == "user:ann"


def test_a_route_that_does_not_stick_asks_anew_each_time():
    route = RouteConfig(name="chat", sticky="none", split=split(a=1))
    subjects = {subject_of(route, user="ann", session="s", key_id="key_1") for _ in range(10)}
    assert len(subjects) == 10
