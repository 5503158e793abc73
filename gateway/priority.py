"""In which class of an engine's queue a request waits: in its tenant's, or where it says, if it may."""

from __future__ import annotations

from types import MappingProxyType

from gateway.errors import permission_denied
from shared.config import TenantConfig

CLASSES = MappingProxyType({"interactive": 0, "standard": 1, "batch": 2})
LOWEST_CLASS = 9  # below batch, for tenants that order their own requests; waiting long lifts them all


def class_of(tenant: TenantConfig, wished: int) -> int:
    """`wished`: vLLM's `priority`, of which lower ones go first. It counts from the tenant's own class, which
    is 0. Raises ApiError 403."""
    own_class = CLASSES[tenant.priority]
    if wished == 0:
        return own_class
    if not tenant.may_set_priority:
        raise permission_denied("This API key may not set a priority other than 0.", "priority")
    return min(max(0, own_class + wished), LOWEST_CLASS)
