"""The suite on Headrace itself: real processes, models that need no weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from compose.cli import app
from compose.valkey import free_port
from shared.errors import UserError
from tests.stack import Stack, fake_model


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    models = [fake_model(), fake_model("vectors", runner="pooling")]
    with Stack(redis_url, {"models": models}) as stack:
        yield stack


def conformance(url: str, key: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["conformance", url, "--key", key, *arguments])


def test_headrace_conforms(stack, tmp_path):
    file = tmp_path / "rows.json"
    result = conformance(stack.url + "/v1", stack.key(), "--json", str(file), "--concurrency", "4")
    print(result.output)
    rows = json.loads(file.read_text())["rows"]
    assert [row["row"] for row in rows if row["outcome"] == "failed"] == []
    assert result.exit_code == 0
    assert len(rows) >= 80
    assert "Traceback" not in stack.log("gateway")
    assert not any(stack.gauges().values())


def test_a_wrong_key_is_a_usage_error(stack):
    result = conformance(stack.url, "hr-wrong")
    assert isinstance(result.exception, UserError)
    assert result.exception.param == "--key"


def test_a_server_that_is_not_there_is_a_usage_error():
    result = conformance(f"http://127.0.0.1:{free_port()}", "x")
    assert isinstance(result.exception, UserError)
    assert result.exception.param == "URL"


@pytest.mark.parametrize(("option", "value"), [("--group", "nope"), ("--row", "chat.nope")])
def test_unknown_rows_and_groups_are_usage_errors(option, value):
    result = conformance("http://127.0.0.1:1", "x", option, value)
    assert isinstance(result.exception, UserError)
    assert result.exception.param == option


def test_groups_and_rows_are_chosen(stack, tmp_path: Path):
    file = tmp_path / "rows.json"
    chosen = ("--group", "models", "--row", "chat.ids-differ", "--json", str(file))
    assert conformance(stack.url, stack.key(), *chosen).exit_code == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["group"] for row in rows} == {"models", "chat"}
    assert [row["row"] for row in rows if row["group"] == "chat"] == ["chat.ids-differ"]
