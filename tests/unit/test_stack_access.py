"""How commands find a stack that is up while the configuration file beside it is not valid."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from compose.cli import app
from compose.run_directory import ServicePids, StackRecord, StackSecrets
from compose.stack_access import redis_access
from shared.config import HeadraceConfig
from shared.errors import ConfigError
from tests.unit.test_cli import SECRETS

COMMANDS = (["keys", "list"], ["status"], ["usage"])


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def stack(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StackRecord:
    """What a stack leaves for commands, in the working directory, with a file that is broken since."""
    record = StackRecord(
        url="http://127.0.0.1:9",
        demo_key="hr_demo",
        admin_token="token",
        redis_url=redis_url,
        namespace=f"access-{uuid.uuid4().hex[:8]}",
        pids=ServicePids(os.getpid(), None, None, {}),
        engine_ids=[],
        run_dir=str(tmp_path / ".headrace"),
    )
    directory = tmp_path / ".headrace"
    directory.mkdir()
    (directory / "stack.json").write_bytes(msgspec.json.encode(record))
    (directory / "secrets.json").write_bytes(msgspec.json.encode(StackSecrets("pepper", "", "token")))
    (directory / "config.json").write_text(HeadraceConfig().model_dump_json())
    (tmp_path / "headrace.toml").write_text("[gateway")
    monkeypatch.chdir(tmp_path)
    for name in (*SECRETS, "HEADRACE_RUN_DIR", "HEADRACE_URL"):
        monkeypatch.delenv(name, raising=False)
    return record


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_stack_that_is_up_is_asked_whatever_the_file_says(stack: StackRecord, command: list[str]) -> None:
    ended = run(*command)
    assert ended.exit_code == 0, ended.exception


def test_a_key_is_revoked_while_the_file_is_invalid(stack: StackRecord) -> None:
    assert run("keys", "create").exit_code == 0
    [key] = json.loads(run("keys", "list", "--json").stdout)
    assert run("keys", "revoke", key["key_id"]).exit_code == 0
    assert json.loads(run("keys", "list", "--json").stdout) == []


def test_rows_are_looked_for_where_the_stack_puts_them(stack: StackRecord) -> None:
    config = HeadraceConfig.model_validate({"usage": {"sqlite": "missing/usage.db"}})
    Path(".headrace/config.json").write_text(config.model_dump_json())
    assert "missing/usage.db" in str(run("usage").exception)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_file_that_was_named_is_told_to_be_invalid(stack: StackRecord, command: list[str]) -> None:
    ended = run(*command, "--config", "headrace.toml")
    assert isinstance(ended.exception, ConfigError)
    assert "is not valid TOML" in ended.exception.message


def test_without_a_stack_that_is_up_the_file_is_told_to_be_invalid(stack: StackRecord) -> None:
    with pytest.raises(ConfigError, match="is not valid TOML"):
        redis_access(Path("elsewhere"), None)


def test_the_redis_of_another_stack_needs_the_file(
    stack: StackRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", "redis://elsewhere")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        redis_access(Path(".headrace"), None)
