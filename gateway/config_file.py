"""headrace.toml while the gateway runs: followed, checked, and put in force as one snapshot or not at all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Gauge
from pydantic import ValidationError

from gateway.policy import PolicyStore
from shared.config import GatewayConfig, HeadraceConfig
from shared.errors import ConfigError

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
SETTLE_INTERVAL_S = 0.5  # a file that is still being written is not read: half of one may be valid, too
START_SETTLE_INTERVAL_S = 0.1  # nobody is known to have just touched it, and clients wait
MAX_SETTLE_CHECKS = 10

# Options of [gateway] that can change while it runs; tenants and routes can, and nothing else.
RELOADABLE_OPTIONS = (
    "on_redis_failure",
    "body_timeout_s",
    "first_token_timeout_s",
    "write_timeout_s",
    "stream_keep_alive_s",
    "unknown_fields",
    "cors_allow_origins",
    "trusted_proxies",
    "client_address_header",
    "max_failed_auth_per_minute",
)

_Stamp = tuple[int, int, int]  # time of change, size, inode


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """The user's own file. `load` reads it with the flags of the start applied, and raises ConfigError.

    It is told whether the file may be empty.
    """

    path: Path
    load: Callable[[bool], HeadraceConfig]


class ConfigFile:
    """Watches the file, if there is one. `running` is what this gateway was started with."""

    def __init__(
        self, source: ConfigSource | None, running: HeadraceConfig, policy: PolicyStore, failed: Gauge
    ) -> None:
        self._source = source
        self._running = running
        self._policy = policy
        self._failed = failed
        self._first: HeadraceConfig | None = None  # as the file was at the start
        self._stamp: _Stamp | None = None
        self._told_to_restart: list[str] = []
        self._is_asked = asyncio.Event()
        self.error: str | None = None  # why what the file says now is not in force
        self.loaded_at: float | None = None  # unix time of the last success

    @property
    def path(self) -> str | None:
        return None if self._source is None else str(self._source.path)

    async def begin(self) -> None:
        """Publishes the policy at the start of the gateway.

        The file may have changed since the start of the stack: what it says now counts, or, if that is not
        valid, what was published before.
        """
        if self._source is None:
            await self._policy.publish()
            return
        await self._load(self._source, is_start=True)
        if self.error is not None:
            await self._policy.publish(only_if_absent=True)

    async def follow(self) -> None:
        """Reloads for ever, when the file changes or when asked to."""
        while True:
            try:
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await self._is_asked.wait()
            except TimeoutError:
                is_asked = False
            else:
                self._is_asked.clear()
                is_asked = True
            if self._source is not None and (is_asked or await self._has_changed(self._source.path)):
                await self._load(self._source)

    def ask(self) -> None:
        """To reload now, whether it has changed or not."""
        self._is_asked.set()

    async def _has_changed(self, path: Path) -> bool:
        return await asyncio.to_thread(_stamp_of, path) != self._stamp

    async def _load(self, source: ConfigSource, *, is_start: bool = False) -> None:
        self._stamp = await _settled_stamp(
            source.path, START_SETTLE_INTERVAL_S if is_start else SETTLE_INTERVAL_S
        )
        # Nobody empties a file to lock all tenants out, but editors and full disks do for a moment.
        may_be_empty = is_start and not self._has_policy_to_lose()
        try:
            found = await asyncio.to_thread(source.load, may_be_empty)
            config = self._merged(found)
        except ConfigError as error:
            self._refuse(error.message)
            return
        except Exception as error:  # a file must not be able to end the gateway
            self._refuse(f"cannot check it: {type(error).__name__}: {error}", fault=error)
            return
        if self._first is None:
            self._first = found
        await self._policy.reload(config)
        self.error = None
        self.loaded_at = time.time()
        self._failed.set(0)
        logger.info("%s is in force", source.path)
        self._tell_of_hidden(found)
        self._tell_to_restart(self._first, found)

    def _has_policy_to_lose(self) -> bool:
        """As a gateway has that is started again, from a copy of what the file once was."""
        nothing = HeadraceConfig()
        return self._running.tenants != nothing.tenants or self._running.routes != nothing.routes

    def _refuse(self, reason: str, fault: Exception | None = None) -> None:
        if reason != self.error:  # once for each fault, not each second
            logger.error("%s is not put in force, and what was stays: %s", self.path, reason, exc_info=fault)
        self.error = reason
        self._failed.set(1)

    def _merged(self, found: HeadraceConfig) -> HeadraceConfig:
        """What runs, with what of the file can change meanwhile. Raises ConfigError."""
        changed = {name: getattr(found.gateway, name) for name in RELOADABLE_OPTIONS}
        try:
            return HeadraceConfig(
                **{name: getattr(self._running, name) for name in _FIXED_SECTIONS},
                gateway=self._running.gateway.model_copy(update=changed),
                tenants=found.tenants,
                routes=found.routes,
            )
        except ValidationError as error:
            reason = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
            raise ConfigError(f"{reason} (models are those of the start; new ones need a restart)") from error

    def _tell_of_hidden(self, found: HeadraceConfig) -> None:
        """Else who edits the file would look for the reason for long."""
        record = self._policy.record
        for kind, file, admin in (
            ("tenants", {each.name for each in found.tenants}, {each.name for each in record.admin_tenants}),
            ("routes", {each.name for each in found.routes}, {each.name for each in record.admin_routes}),
        ):
            if both := sorted(file & admin):
                logger.info("the admin API has set these %s, whatever the file says: %s", kind, both)

    def _tell_to_restart(self, first: HeadraceConfig, found: HeadraceConfig) -> None:
        changed = [name for name in _FIXED_SECTIONS if getattr(first, name) != getattr(found, name)]
        changed += [
            f"gateway.{name}"
            for name in GatewayConfig.model_fields
            if name not in RELOADABLE_OPTIONS and getattr(first.gateway, name) != getattr(found.gateway, name)
        ]
        if changed and changed != self._told_to_restart:
            logger.warning("a restart is needed for what has changed in %s", ", ".join(changed))
        self._told_to_restart = changed


_FIXED_SECTIONS = tuple(
    name for name in HeadraceConfig.model_fields if name not in ("gateway", "tenants", "routes")
)


async def _settled_stamp(path: Path, interval_s: float) -> _Stamp | None:
    """Once it is the same twice."""
    before = await asyncio.to_thread(_stamp_of, path)
    for _ in range(MAX_SETTLE_CHECKS):
        await asyncio.sleep(interval_s)
        stamp = await asyncio.to_thread(_stamp_of, path)
        if stamp == before:
            break
        before = stamp
    return before


def _stamp_of(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:  # it is just being replaced, or gone; who reads it will say so
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
