"""Several tenants in one run: who sends which share of the requests, with which key and model."""

from __future__ import annotations

import codecs
import math
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from loadtest.datasets.prompt import Item
from shared.errors import ConfigError

FLAG = "--tenants"


class TenantShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `[[tenants]]` table of the file. The key itself, or the environment variable that holds it."""

    name: str
    weight: float = 1.0
    api_key: str | None = None
    api_key_env: str | None = None
    model: str | None = None  # None: that of the run
    headers: dict[str, str] = {}


class _TenantsFile(msgspec.Struct, forbid_unknown_fields=True):
    tenants: list[TenantShare]


def read_tenants(path: Path) -> list[TenantShare]:
    """Raises ConfigError for a file that is none, and for weights that cannot be shares."""
    try:
        tenants = msgspec.toml.decode(
            path.read_bytes().removeprefix(codecs.BOM_UTF8), type=_TenantsFile
        ).tenants
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", FLAG) from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: not TOML
        raise ConfigError(f"{path}: {error}", FLAG) from error
    names = [tenant.name for tenant in tenants]
    if not tenants or len(set(names)) < len(names):
        raise ConfigError(f"{path}: names at least one tenant, and none twice", FLAG)
    if any(not tenant.weight > 0 for tenant in tenants):
        raise ConfigError(f"{path}: every weight must be above 0", FLAG)
    if math.isinf(sum(tenant.weight for tenant in tenants)):
        raise ConfigError(f"{path}: the weights have no sum", FLAG)
    return tenants


def with_tenants(items: Sequence[Item], tenants: Sequence[TenantShare], seed: int) -> list[Item]:
    """Each item given to a tenant at random, by weight. What names one already keeps it, and takes
    that tenant's key, if the file has it."""
    headers = {tenant.name: _headers(tenant) for tenant in tenants}
    models = {tenant.name: tenant.model for tenant in tenants}
    weights = np.array([tenant.weight for tenant in tenants])
    drawn = np.random.default_rng(seed).choice(len(tenants), size=len(items), p=weights / weights.sum())
    placed: list[Item] = []
    for item, index in zip(items, drawn, strict=True):
        name = item.tenant or tenants[index].name
        placed.append(
            msgspec.structs.replace(
                item,
                tenant=name,
                model=item.model or models.get(name),
                headers=headers.get(name, ()) + item.headers,
            )
        )
    return placed


def _headers(tenant: TenantShare) -> tuple[tuple[str, str], ...]:
    key = tenant.api_key
    if tenant.api_key_env is not None:
        key = os.environ.get(tenant.api_key_env)
        if key is None:
            raise ConfigError(f"tenant {tenant.name!r}: {tenant.api_key_env} is not set", FLAG)
    authorization = () if key is None else (("Authorization", f"Bearer {key}"),)
    return (*authorization, *tenant.headers.items())
