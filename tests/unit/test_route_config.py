"""What a route may say, and how it is refused: by the name of the key that is wrong."""

import json
import tomllib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.openai.schema import ChatCompletionBody
from gateway.policy import make_snapshot
from shared.config import RouteConfig, VariantConfig, parse_config
from shared.errors import ConfigError
from shared.sampling_defaults import SamplingDefaults
from tests.odd_values import ODD_VALUES

NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)

EVERYTHING = """
[[models]]
name = "m"
source = "fake:"

[[models]]
name = "vectors"
source = "fake:"
runner = "pooling"

[[tenants]]
name = "acme"

[[routes]]
name = "chat"
version = 3
sticky = "session"
allow_variant_header = true
overrides = [{ tenant = "acme", variant = "control" }]
fallback = ["spare", "control"]
shadow = { variant = "spare", percent = 5, max_in_flight = 2, timeout_s = 10 }

[[routes.split]]
variant = "control"
model = "m"
weight = 90
system_prompt = "Be brief."
sampling = { temperature = 0.2, top_p = 0.9, top_k = 40, max_tokens = 100, stop = ["END"], seed = 7 }

[[routes.split]]
variant = "canary"
model = "m"
weight = 0
ramp = [{ at = 2026-12-01T12:00:00Z, weight = 1 }, { at = 2026-12-01T14:00:00+01:00, weight = 11 }]
ramp_mode = "linear"

[[routes.split]]
variant = "spare"
model = "m"
weight = 0
"""


def document(**changes: Any) -> dict[str, Any]:
    """A configuration with one route, some keys of which are others."""
    everything = tomllib.loads(EVERYTHING)
    everything["routes"][0] |= changes
    return everything


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        parse_config(given)
    return refused.value.message


def arms(**fields: Any) -> list[dict[str, Any]]:
    return [{"variant": "a", "model": "m", **fields}]


def test_a_route_with_everything_is_read_and_survives_the_way_through_json():
    [route] = parse_config(document()).routes
    assert route.fallback == ["spare", "control"]
    assert route.split[0].sampling.top_k == 40
    assert RouteConfig.model_validate(json.loads(route.model_dump_json())) == route


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"fallback": ["spar"]}, "fallback: no variant of this route is named 'spar'; it has: control"),
        ({"fallback": ["spare", "spare"]}, "fallback: a variant is tried once"),
        ({"shadow": {"variant": "x", "percent": 1}}, "shadow: no variant of this route is named 'x'"),
        ({"shadow": {"variant": "spare", "percent": 0.05}}, "routes.0.shadow.percent: "),
        ({"shadow": {"variant": "spare", "percent": 101}}, "routes.0.shadow.percent: "),
        ({"shadow": {"variant": "spare"}}, "routes.0.shadow.percent: "),
        ({"shadow": {"variant": "spare", "percent": 1, "timeout": 1}}, "did you mean 'timeout_s'?"),
        ({"overrides": [{"tenant": "acme", "variant": "x"}]}, "overrides: no variant of this route"),
        ({"overrides": [{"tenant": "bolt", "variant": "spare"}]}, "overrides: no tenant is named 'bolt'"),
        (
            {"overrides": [{"tenant": "acme", "variant": name} for name in ("spare", "control")]},
            "overrides: a tenant can have one only",
        ),
        ({"split": arms(weight=0)}, "at least one variant needs a weight above 0"),
        ({"split": arms(weight=float("nan"))}, "routes.0.split.0.weight: "),
        (
            {"split": arms(weight=1, ramp=[{"at": NOON, "weight": 0}])},
            "at least one variant needs a weight above 0 at ",
        ),
        (
            {"split": arms(ramp=[{"at": NOON, "weight": 1}] * 2)},
            "moments of ramp must follow",
        ),
        ({"split": arms(ramp=[{"at": NOON.replace(tzinfo=None), "weight": 1}])}, "timezone"),
        ({"split": arms(ramp=[{"at": "noon", "weight": 1}])}, "a moment is written as 2026-12-01T09:00:00Z"),
        ({"split": arms(ramp=[{"at": NOON, "weight": 1}], ramp_mode="linear")}, "at least two steps"),
        ({"split": arms(model="n")}, "route 'chat', variant 'a': no model is named 'n'"),
        ({"split": [*arms(), {"variant": "b", "model": "vectors"}]}, "mixes generating models"),
        ({"split": arms(sampling={"temperature": 3})}, "routes.0.split.0.sampling.temperature: "),
        ({"split": arms(sampling={"temprature": 1})}, "did you mean 'temperature'?"),
        ({"split": arms(system_prompt="")}, "routes.0.split.0.system_prompt: "),
        (
            {"split": arms(model="vectors", system_prompt="x")},
            "system_prompt has no meaning",
        ),
        ({"split": arms(model="vectors", sampling={"seed": 1})}, "sampling has no meaning"),
    ],
)
def test_what_is_wrong_is_refused_under_its_name(changes: dict[str, Any], complaint: str):
    without_names = {"overrides": [], "fallback": [], "shadow": None} if "split" in changes else {}
    assert complaint in refusal(document(**without_names, **changes))


def test_embedding_models_have_no_fallback_since_their_vectors_cannot_be_compared():
    split = [{"variant": name, "model": "vectors"} for name in ("a", "b")]
    refused = refusal(document(split=split, overrides=[], shadow=None, fallback=["b"]))
    assert "route 'chat': fallback is not for embedding models" in refused


@pytest.mark.parametrize("field", [name for name in SamplingDefaults.model_fields if name != "stop"])
def test_a_default_of_a_variant_may_be_whatever_a_client_may_send_and_nothing_else(field: str):
    message = {"role": "user", "content": "x"}

    def is_taken(kind: type[Any], **fields: Any) -> bool:
        try:
            kind.model_validate(fields)
        except ValidationError:
            return False
        return True

    for name, value in ODD_VALUES.items():
        if value is None:  # of a client: that it leaves the field to us
            continue
        by_the_api = is_taken(ChatCompletionBody, model="m", messages=[message], **{field: value})
        assert is_taken(SamplingDefaults, **{field: value}) == by_the_api, name


def weights(variant: VariantConfig, *minutes: float) -> list[float]:
    return [variant.weight_at((NOON + timedelta(minutes=each)).timestamp()) for each in minutes]


def test_steps_of_a_ramp_hold_until_the_next_one():
    ramp = [{"at": NOON, "weight": 5.0}, {"at": NOON + timedelta(hours=1), "weight": 50.0}]
    variant = VariantConfig.model_validate({"variant": "a", "model": "m", "weight": 1.0, "ramp": ramp})
    assert weights(variant, -0.1, 0, 59.9, 60, 1000) == [1, 5, 5, 50, 50]


def test_a_linear_ramp_moves_evenly_between_its_steps():
    [route] = parse_config(document()).routes
    canary = route.variant("canary")
    assert canary is not None
    # The second step is written in another zone: an hour after the first.
    assert weights(canary, -1, 0, 30, 60, 61) == pytest.approx([0, 1, 6, 11, 11])


def test_a_route_that_loses_models_loses_what_names_their_variants():
    split = [{"variant": "a", "model": "m"}, {"variant": "b", "model": "n"}]
    shadow = {"variant": "b", "percent": 1}
    overrides = [{"tenant": "acme", "variant": name} for name in ("b",)]
    route = RouteConfig.model_validate(
        {"name": "chat", "split": split, "fallback": ["b", "a"], "shadow": shadow, "overrides": overrides}
    )
    kept = route.within(frozenset({"m"}))
    assert kept is not None
    assert RouteConfig.model_validate(kept.model_dump()) == kept
    assert (kept.fallback, kept.overrides, kept.shadow) == (["a"], [], None)
    assert route.within(frozenset({"x"})) is None


MODELS = [
    {"name": "base", "source": "dir"},
    {"name": "base-sql", "source": "dir", "lora": "adapters/sql"},
    {"name": "base-law", "source": "dir", "lora": "adapters/law"},
    {"name": "other-sql", "source": "elsewhere", "lora": "adapters/sql"},
]


def lora_route(**fields: Any) -> dict[str, Any]:
    arm = {"variant": "tuned", "model": "base", **fields}
    return {
        "models": MODELS,
        "routes": [{"name": "chat", "split": [{"variant": "plain", "model": "base"}, arm]}],
    }


def test_a_variants_adapter_is_found_among_the_models_of_the_same_source():
    config = parse_config(lora_route(lora="sql"))
    in_force = make_snapshot(1, config.tenants, config.routes, config).routes["chat"]
    assert [arm.model for arm in in_force.split] == ["base", "base-sql"]


def test_an_adapter_that_no_model_has_is_refused():
    complaint = (
        "variant 'tuned': lora: there must be one model with the source of 'base' and an adapter in a "
    )
    assert complaint + "directory called 'math'" in refusal(lora_route(lora="math"))
