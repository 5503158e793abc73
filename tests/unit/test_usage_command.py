"""`headrace usage`: what it says of rows that it cannot have."""

from __future__ import annotations

import sqlite3
import uuid
from pathlib import Path

import msgspec
import pytest
import redis
from click.testing import Result
from typer.testing import CliRunner

from compose.cli import app
from shared.errors import ConfigError
from shared.identifiers import TenantId
from shared.redis_schema import RedisKeys
from shared.usage import UsageRecord


def headrace_usage(directory: Path, configuration: str, redis_url: str = "") -> Result:
    (directory / "headrace.toml").write_text(configuration)
    options = ["--config", str(directory / "headrace.toml"), "--run-dir", str(directory / "none")]
    environment = {"HEADRACE_REDIS_URL": redis_url or None}
    return CliRunner().invoke(app, ["usage", "--format", "csv", "--by", "tenant", *options], env=environment)


def test_a_file_that_has_no_rows_is_named(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    for content in (b"", b"no database at all" * 1000):
        file.write_bytes(content)
        ended = headrace_usage(tmp_path, f'[usage]\nsqlite = "{file}"\n')
        assert isinstance(ended.exception, ConfigError), ended.output
        assert f"cannot read usage rows from {file}: " in ended.exception.message
        assert "\n" not in ended.exception.message


def test_a_file_without_its_table_is_told_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE something (number INTEGER)")
    connection.close()
    ended = headrace_usage(tmp_path, f'[usage]\nsqlite = "{file}"\n')
    assert isinstance(ended.exception, ConfigError), ended.output
    assert "no such table: usage; is it a file that gateways write?" in ended.exception.message


def row(number: int, input_tokens: int) -> bytes:
    return msgspec.json.encode(
        UsageRecord(
            record_id=f"row-{number}", request_id="r", arrived_at=1_800_000_000.0, tenant=TenantId("acme"),
            key_id="key_1", operation="chat", route="chat", experiment_version=1,
            assigned_variant="control", variant="control", model="m", input_tokens=input_tokens,
        )
    )  # fmt: skip


@pytest.mark.parametrize("num_good", [0, 1, 5])
def test_rows_that_cannot_be_summed_are_left_out_and_counted(
    tmp_path: Path, redis_url: str, num_good: int
) -> None:
    namespace = f"usage-{uuid.uuid4().hex[:8]}"
    rows = [row(number, 7) for number in range(num_good)]
    rows += [row(100, 2**63), b"{"]
    rows += [row(200, 1)]
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        for value in rows:
            client.xadd(RedisKeys(namespace).usage, {"row": value})
    ended = headrace_usage(tmp_path, f'[redis]\nnamespace = "{namespace}"\n', redis_url)
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.splitlines()[1].startswith(f"acme,{num_good + 1},{7 * num_good + 1},")
    assert "2 rows in Redis cannot be read and are left out" in ended.stderr
