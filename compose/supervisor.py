"""One stack on one machine: starts its services, keeps them running, ends them in order.

Order of starting: Valkey (unless there is a Redis), then engines and gateway together, since the
gateway becomes ready by itself once the engines are. Order of ending: the gateway first, which
finishes the streams; then the engines; then Valkey.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import redis

from compose.console import Console
from compose.demo_key import demo_key
from compose.engine_registry import EngineRegistry
from compose.gateway_client import GatewayClient, GatewayError, first_writer
from compose.greeting import greeting, url_to_dial
from compose.kept_service import EXIT_BAD_CONFIG, KeptService, StackEvents, StackFailed
from compose.run_directory import RunDirectory, ServicePids, StackRecord
from compose.service_process import ServiceSpec
from compose.stack_plan import EnginePlace, StackPlan, valkey_service
from compose.valkey import EmbeddedValkey, free_port
from shared.config import HeadraceConfig
from shared.identifiers import TenantId
from shared.redis_client import connect
from shared.redis_schema import ENGINE_RECORD_LIFETIME_S, RedisKeys

EXIT_FORCED = 130
MAX_PORT_COLLISIONS = 5
REDIS_TIMEOUT_MS = 2000
POLL_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class StackSettings:
    """What the supervisor is told. `redis_url` None: it starts a Valkey of its own."""

    config: HeadraceConfig
    redis_url: str | None
    key_pepper: str
    admin_token: str
    followed_file: Path | None = None  # the user's own: what can change in it while the stack runs, does
    followed_model: str | None = None  # the --model that applies to it


class Supervisor:
    """Owns the services of a stack. `run` is called once, in the main thread (see die_with_parent)."""

    def __init__(self, settings: StackSettings, directory: RunDirectory, console: Console) -> None:
        self._settings = settings
        self._config = settings.config
        self._directory = directory
        self._console = console
        self._valkey: KeptService | None = None
        self._engines: dict[EnginePlace, KeptService] = {}
        self._gateway: KeptService | None = None
        self._gateway_port = settings.config.gateway.port
        self._stack: StackRecord | None = None  # None until the stack is ready
        self._keepers: list[asyncio.Task[None]] = []
        self._started_at = time.perf_counter()
        self._events = StackEvents(self._write_stack, lambda: self._stack is not None)
        self._end: asyncio.Future[StackFailed | None] | None = None  # set by `run`
        self._is_forced = False

    async def run(self) -> int:
        """Until a signal, or a failure that no restart can cure. Returns the exit code."""
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # under nohup
            loop.add_signal_handler(number, self._on_signal)
        bring_up = asyncio.create_task(self._bring_up(), name="bring up")
        bring_up.add_done_callback(self._end_if_failed)
        try:
            failure = await self._end
        finally:
            await _cancel([bring_up, *self._keepers])
            await self._stop_services()
        if failure is not None:
            self._console.log("headrace", f"the stack cannot run: {failure}")
            return failure.exit_code
        return EXIT_FORCED if self._is_forced else 0

    # ---- starting

    async def _bring_up(self) -> None:
        redis_url = self._settings.redis_url or await self._start_valkey()
        client = connect(redis_url, REDIS_TIMEOUT_MS)
        keys = RedisKeys(self._config.redis.namespace)
        registry = EngineRegistry(client, keys)
        plan = StackPlan(
            self._config,
            self._directory,
            redis_url,
            self._settings.key_pepper,
            self._settings.admin_token,
            self._settings.followed_file,
            self._settings.followed_model,
        )
        places = plan.places()
        try:
            await self._wait_for_engine_ids(registry, places)
            key = await asyncio.to_thread(self._demo_key, client, keys)
        except redis.RedisError as error:
            raise StackFailed(f"Redis does not answer ({error}); is HEADRACE_REDIS_URL right?") from error
        for place in places:
            engine = self._service(_engine_of(plan, place), _forgetting(registry, place))
            self._engines[place] = engine
            await self._start(engine)
        self._gateway = self._service(lambda: plan.gateway(self._gateway_port))
        await self._start(self._gateway)
        await self._announce(plan, key)

    async def _start_valkey(self) -> str:
        """Returns its URL. A port that was free may be taken before Valkey has it: then another one."""
        password = self._directory.secrets().valkey_password
        reason = ""
        for _ in range(MAX_PORT_COLLISIONS):
            valkey = EmbeddedValkey(self._directory.valkey_directory, free_port(), password)
            service = self._service(_valkey_of(valkey))
            self._valkey = service
            process = await service.start()
            if await asyncio.to_thread(valkey.wait_until_it_answers, _is_running(service)):
                self._keep(service)
                return valkey.url
            await service.stop()
            reason = process.last_lines[-1] if process.last_lines else "it said nothing"
        raise StackFailed(f"Valkey does not start: {reason}")

    async def _wait_for_engine_ids(self, registry: EngineRegistry, places: list[EnginePlace]) -> None:
        """Until no engine of an earlier life holds our ids; the record of a dead one expires soon."""
        engine_ids = [place.engine_id for place in places]
        deadline = time.monotonic() + ENGINE_RECORD_LIFETIME_S + 1
        while taken := await asyncio.to_thread(registry.alive, engine_ids):
            if self._settings.redis_url is None:  # nobody but us uses this Redis: they are dead
                for record in taken:
                    await asyncio.to_thread(registry.forget, record.engine_id, record.pid)
            elif time.monotonic() > deadline:
                raise StackFailed(
                    f"another stack in this Redis runs the engine {taken[0].engine_id!r}; "
                    "give this one its own namespace in [redis]",
                    EXIT_BAD_CONFIG,
                )
            else:
                await asyncio.sleep(POLL_INTERVAL_S)

    def _demo_key(self, client: redis.Redis, keys: RedisKeys) -> str:
        tenant = TenantId(self._config.tenants[0].name)
        return demo_key(self._directory, client, keys, self._settings.key_pepper, tenant)

    async def _announce(self, plan: StackPlan, key: str) -> None:
        """Waits until the stack is ready, then tells: `stack.json` first, then the terminal."""
        url = await self._ready_url(key)
        ready_after_s = time.perf_counter() - self._started_at
        self._stack = StackRecord(
            url=url,
            demo_key=key,
            admin_token=plan.admin_token,
            redis_url=plan.redis_url,
            namespace=self._config.redis.namespace,
            pids=self._pids(),
            engine_ids=[place.engine_id for place in self._engines],
            run_dir=str(self._directory.path),
        )
        self._write_stack()
        gateway = GatewayClient(url, key)
        models: dict[str, str] = {}
        first_token: str | None = None
        try:
            models = await asyncio.to_thread(gateway.models)
            if (writer := first_writer(models)) is not None:
                first_token_s = await asyncio.to_thread(gateway.time_to_first_token_s, writer)
                first_token = f"{first_token_s * 1000:.0f} ms"
        except GatewayError as error:  # the stack is up all the same
            first_token = f"not measured ({error})"
        self._console.say(greeting(self._stack, models, ready_after_s, first_token))

    async def _ready_url(self, key: str) -> str:
        """Of the gateway, once every model has a ready engine."""
        ready_file = self._directory.gateway_ready_file
        while True:
            if ready_file.exists():
                url = url_to_dial(msgspec.json.decode(ready_file.read_bytes())["url"])
                gateway = GatewayClient(url, key)
                if await asyncio.to_thread(gateway.is_ready):
                    self._gateway_port = gateway.port  # a restarted gateway keeps it
                    return url
            await asyncio.sleep(POLL_INTERVAL_S)

    # ---- keeping

    def _service(
        self,
        make_spec: Callable[[], ServiceSpec],
        after_crash: Callable[[int], Awaitable[None]] | None = None,
    ) -> KeptService:
        return KeptService(make_spec, self._console, self._events, after_crash=after_crash)

    async def _start(self, service: KeptService) -> None:
        await service.start()
        self._keep(service)

    def _keep(self, service: KeptService) -> None:
        keeper = asyncio.create_task(service.keep())
        keeper.add_done_callback(self._end_if_failed)
        self._keepers.append(keeper)

    def _end_if_failed(self, task: asyncio.Task[None]) -> None:
        assert self._end is not None, "tasks are started by run()"
        error = None if task.cancelled() else task.exception()
        if error is None or self._end.done():
            return
        if isinstance(error, StackFailed):
            self._end.set_result(error)
        else:
            self._end.set_exception(error)

    def _pids(self) -> ServicePids:
        return ServicePids(
            supervisor=os.getpid(),
            gateway=self._gateway.pid if self._gateway else None,
            valkey=self._valkey.pid if self._valkey else None,
            engines={
                place.engine_id: engine.pid
                for place, engine in self._engines.items()
                if engine.pid is not None
            },
        )

    def _write_stack(self) -> None:
        if self._stack is not None:
            self._stack = msgspec.structs.replace(self._stack, pids=self._pids())
            try:
                self._directory.write_stack(self._stack)
            except OSError as error:  # a full disk, a directory that was removed: serving goes on
                self._console.log("headrace", f"stack.json cannot be written: {error}")

    # ---- ending

    def _on_signal(self) -> None:
        """The first one drains, any further one kills."""
        assert self._end is not None, "handlers are installed by run()"
        if not self._end.done():
            self._console.log("headrace", "finishing running requests; once more to stop at once")
            self._end.set_result(None)
            return
        self._is_forced = True
        for service in self._services():
            service.kill()

    async def _stop_services(self) -> None:
        """In order. Each service has its own bound, after which it is killed."""
        self._stack = None  # no longer written from here on
        if self._gateway is not None:
            await self._gateway.stop()
        await asyncio.gather(*(engine.stop() for engine in self._engines.values()))
        if self._valkey is not None:
            await self._valkey.stop()

    def _services(self) -> list[KeptService]:
        single = [service for service in (self._gateway, self._valkey) if service is not None]
        return [*single, *self._engines.values()]


def _engine_of(plan: StackPlan, place: EnginePlace) -> Callable[[], ServiceSpec]:
    return lambda: plan.engine(place)


def _valkey_of(valkey: EmbeddedValkey) -> Callable[[], ServiceSpec]:
    def make_spec() -> ServiceSpec:
        valkey.write_configuration()
        return valkey_service(valkey)

    return make_spec


def _is_running(service: KeptService) -> Callable[[], bool]:
    return lambda: service.pid is not None


def _forgetting(registry: EngineRegistry, place: EnginePlace) -> Callable[[int], Awaitable[None]]:
    """Takes a crashed engine out of the registry, so that gateways need not wait for its record to expire."""

    async def after_crash(pid: int) -> None:
        try:
            await asyncio.to_thread(registry.forget, place.engine_id, pid)
        except redis.RedisError:  # then it expires
            return

    return after_crash


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
