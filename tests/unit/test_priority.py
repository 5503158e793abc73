"""The class that a request waits in."""

from __future__ import annotations

import pytest

from gateway.errors import ApiError
from gateway.priority import LOWEST_CLASS, class_of
from shared.config import TenantConfig


def tenant(priority: str = "standard", *, may: bool = True) -> TenantConfig:
    return TenantConfig.model_validate({"name": "t", "priority": priority, "may_set_priority": may})


@pytest.mark.parametrize(("priority", "own_class"), [("interactive", 0), ("standard", 1), ("batch", 2)])
@pytest.mark.parametrize("may", [True, False])
def test_zero_is_the_tenants_own_class_for_everybody(priority: str, own_class: int, may: bool) -> None:
    assert class_of(tenant(priority, may=may), 0) == own_class


@pytest.mark.parametrize("wished", [-1, 1, 5])
def test_who_may_not_set_a_priority_is_told_so(wished: int) -> None:
    with pytest.raises(ApiError) as caught:
        class_of(tenant(may=False), wished)
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        403,
        "permission_denied",
        "priority",
    )


def test_lower_ones_go_first_from_the_tenants_class_on_and_within_bounds() -> None:
    assert [class_of(tenant("standard"), wished) for wished in (-9, -1, 1, 3, 99)] == [
        0,
        0,
        2,
        4,
        LOWEST_CLASS,
    ]
    assert [class_of(tenant("batch"), wished) for wished in (-2, -1, 1)] == [0, 1, 3]
