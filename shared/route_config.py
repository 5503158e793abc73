"""Routes: how the requests for one name are split over variants, and what else a route does with them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import AwareDatetime, BeforeValidator, Field, StringConstraints, model_validator

from shared.sampling_defaults import SamplingDefaults
from shared.section import Name, Section

MAX_VERSION = 1_000_000_000


def _from_text(given: Any) -> Any:
    """As JSON has a moment: policies in Redis, and configurations that are handed on."""
    if not isinstance(given, str):
        return given
    try:
        return datetime.fromisoformat(given)
    except ValueError:
        raise ValueError("a moment is written as 2026-12-01T09:00:00Z") from None


Moment = Annotated[AwareDatetime, BeforeValidator(_from_text)]
Weight = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
SystemPrompt = Annotated[str, StringConstraints(min_length=1, max_length=100_000)]


class Model(Protocol):
    """A configured model, as far as routes know it."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def lora(self) -> str | None: ...
    @property
    def runner(self) -> str: ...


class RampStep(Section):
    at: Moment
    weight: Weight


class VariantConfig(Section):
    """One arm of a route. What it adds to a request is for clients that do not say otherwise themselves."""

    variant: Name
    model: Name
    weight: Weight = 1.0  # 0: nobody is assigned to it; for fallbacks, overrides and shadow traffic
    # Other weights from these moments on; "linear": from one of them to the next the weight moves evenly.
    ramp: list[RampStep] = []
    ramp_mode: Literal["steps", "linear"] = "steps"
    sampling: SamplingDefaults = SamplingDefaults()
    system_prompt: SystemPrompt | None = None  # of chats: before the client's own, in one message with it
    lora: str | None = Field(None, min_length=1)  # of models with the same source, that with this adapter

    @model_validator(mode="after")
    def _ramps_forward(self) -> VariantConfig:
        if any(first.at >= second.at for first, second in pairwise(self.ramp)):
            raise ValueError("the moments of ramp must follow one another")
        if self.ramp_mode == "linear" and len(self.ramp) < 2:
            raise ValueError("ramp_mode 'linear' needs at least two steps in ramp, to move between")
        return self

    @property
    def is_ever_assigned(self) -> bool:
        """Whether it has a weight at some time; else it is for fallbacks, overrides and shadow traffic."""
        return self.weight > 0 or any(step.weight > 0 for step in self.ramp)

    def weight_at(self, now: float) -> float:
        """`now`: unix time."""
        begun = [step for step in self.ramp if step.at.timestamp() <= now]
        if not begun:
            return self.weight
        last = begun[-1]
        if self.ramp_mode == "steps" or len(begun) == len(self.ramp):
            return last.weight
        following = self.ramp[len(begun)]
        begun_at, done_at = last.at.timestamp(), following.at.timestamp()
        passed = (now - begun_at) / (done_at - begun_at)
        return last.weight + passed * (following.weight - last.weight)


class OverrideConfig(Section):
    """All requests of a tenant go to one variant, and count for no experiment."""

    tenant: Name
    variant: Name


class ShadowConfig(Section):
    """Copies of requests run on a variant, too. Nobody waits for their answers, which are thrown away, and
    nobody pays for them."""

    variant: Name
    percent: float = Field(ge=0.1, le=100, allow_inf_nan=False)  # of the requests
    max_in_flight: int = Field(8, ge=1, le=10_000)  # in each gateway; more are dropped
    timeout_s: float = Field(60.0, gt=0, le=3600, allow_inf_nan=False)


class RouteConfig(Section):
    """A name that clients send as `model`, split by weight over variants."""

    name: Name
    version: int = Field(1, ge=1, le=MAX_VERSION)  # of the experiment: another one assigns everybody anew
    sticky: Literal["user", "key", "session", "none"] = "user"
    split: list[VariantConfig] = Field(min_length=1)
    overrides: list[OverrideConfig] = []
    # Whether clients may choose with the header x-headrace-variant. Where they may not, it is ignored.
    allow_variant_header: bool = False
    # Variants that are tried one after another, where one fails before the first byte and the fault is ours.
    fallback: list[Name] = []
    shadow: ShadowConfig | None = None

    def variant(self, name: str) -> VariantConfig | None:
        return next((arm for arm in self.split if arm.variant == name), None)

    @property
    def splits_traffic(self) -> bool:
        """Whether it is an experiment: at some time, be it not the same one, two variants have a weight."""
        return sum(arm.is_ever_assigned for arm in self.split) > 1

    def within(self, models: frozenset[str]) -> RouteConfig | None:
        """The route with only those variants whose model is one of these; None: nobody would be assigned."""
        arms = [arm for arm in self.split if arm.model in models and arm.lora is None]
        kept = {arm.variant for arm in arms}
        if not arms or self._unweighted_moment(arms) is not None:
            return None
        return self.model_copy(
            update={
                "split": arms,
                "overrides": [override for override in self.overrides if override.variant in kept],
                "fallback": [name for name in self.fallback if name in kept],
                "shadow": self.shadow if self.shadow is not None and self.shadow.variant in kept else None,
            }
        )

    def resolved(self, models: Sequence[Model]) -> RouteConfig:
        """The route with the models that its variants mean, adapters included. A variant that means none is
        left as it is."""
        if not any(arm.lora for arm in self.split):
            return self
        split = [
            arm.model_copy(update={"model": found.name, "lora": None})
            if (found := model_of(arm, models)) is not None
            else arm
            for arm in self.split
        ]
        return self.model_copy(update={"split": split})

    @model_validator(mode="after")
    def _variants_are_usable(self) -> RouteConfig:
        names = [arm.variant for arm in self.split]
        if len(set(names)) != len(names):
            raise ValueError("variant names of a route must differ")
        moment = self._unweighted_moment(self.split)
        if moment is not None:
            when = "" if moment == _BEFORE_ALL else f" at {datetime.fromtimestamp(moment).astimezone()}"
            raise ValueError(f"at least one variant needs a weight above 0{when}")
        return self

    @model_validator(mode="after")
    def _names_of_variants_are_known(self) -> RouteConfig:
        named = [("overrides", override.variant) for override in self.overrides]
        named += [("fallback", name) for name in self.fallback]
        if self.shadow is not None:
            named.append(("shadow", self.shadow.variant))
        for key, name in named:
            if self.variant(name) is None:
                known = ", ".join(arm.variant for arm in self.split)
                raise ValueError(f"{key}: no variant of this route is named {name!r}; it has: {known}")
        if len(set(self.fallback)) != len(self.fallback):
            raise ValueError("fallback: a variant is tried once, so it is named once")
        tenants = [override.tenant for override in self.overrides]
        if len(set(tenants)) != len(tenants):
            raise ValueError("overrides: a tenant can have one only")
        return self

    @staticmethod
    def _unweighted_moment(arms: list[VariantConfig]) -> float | None:
        """When no variant has a weight, if that is ever so. Between two steps of ramps the sum of weights is
        a straight line, so it is above 0 if it is so where the line begins."""
        moments = [_BEFORE_ALL, *sorted(step.at.timestamp() for arm in arms for step in arm.ramp)]
        return next((now for now in moments if not any(arm.weight_at(now) > 0 for arm in arms)), None)


_BEFORE_ALL = float("-inf")


def model_of(arm: VariantConfig, models: Sequence[Model]) -> Model | None:
    """The model that a variant means, if there is exactly one. An adapter is called after its directory."""
    named = next((model for model in models if model.name == arm.model), None)
    if named is None or arm.lora is None:
        return named
    found = [
        model
        for model in models
        if model.source == named.source and model.lora is not None and Path(model.lora).name == arm.lora
    ]
    return found[0] if len(found) == 1 else None


def check_routes(routes: Sequence[RouteConfig], models: Sequence[Model], *, tenants: frozenset[str]) -> None:
    """What a route says of models and tenants. Raises ValueError that names the route and the key."""
    for route in routes:
        where = f"route {route.name!r}"
        meant = [_checked_model_of(arm, models, f"{where}, variant {arm.variant!r}") for arm in route.split]
        runners = {model.runner for model in meant}
        if len(runners) > 1:
            raise ValueError(f"{where} mixes generating models with embedding models")
        if "pooling" in runners and route.fallback:
            raise ValueError(
                f"{where}: fallback is not for embedding models: vectors of two of them cannot be compared"
            )
        for override in route.overrides:
            if override.tenant not in tenants:
                raise ValueError(f"{where}, overrides: no tenant is named {override.tenant!r}")


def _checked_model_of(arm: VariantConfig, models: Sequence[Model], where: str) -> Model:
    if all(model.name != arm.model for model in models):
        raise ValueError(f"{where}: no model is named {arm.model!r}")
    model = model_of(arm, models)
    if model is None:
        raise ValueError(
            f"{where}: lora: there must be one model with the source of {arm.model!r} and an adapter in a "
            f"directory called {arm.lora!r}"
        )
    if model.runner == "pooling":
        for key, is_given in (
            ("sampling", arm.sampling.are_given),
            ("system_prompt", arm.system_prompt is not None),
        ):
            if is_given:
                raise ValueError(f"{where}: {key} has no meaning for an embedding model")
    return model
