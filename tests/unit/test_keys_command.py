"""`headrace keys`: what it prints, what it keeps in a real Valkey, and what it refuses."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from typer.testing import CliRunner, Result

from compose.commands.keys import app
from compose.key_desk import KeyDesk
from compose.key_settings import KeySettings
from compose.moments import duration_s, moment
from shared.api_keys import ApiKeyStore
from shared.audit import AUDIT_FIELD
from shared.config import RouteConfig, TenantConfig, VariantConfig
from shared.errors import ConfigError, UserError
from shared.redis_schema import ApiKeyRecord, PolicyRecord, RedisKeys, to_json
from tests.unit.test_cli import headrace


class Command:
    """The command, in this process, on a namespace of its own."""

    def __init__(self, client: Any, namespace: str) -> None:
        self.client = client
        self.keys = RedisKeys(namespace)
        self.store = ApiKeyStore(client, self.keys, b"pepper")

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    def done(self, *arguments: str) -> Result:
        ended = self.run(*arguments)
        assert ended.exit_code == 0, ended.output
        return ended

    def refusal(self, *arguments: str) -> str:
        ended = self.run(*arguments)
        assert isinstance(ended.exception, UserError), ended.output
        return ended.exception.message

    def create(self, *arguments: str) -> tuple[str, ApiKeyRecord]:
        secret = self.done("create", "--tenant", "acme", *arguments).stdout.strip()
        record = self.store.of_secret(secret)
        assert record is not None
        return secret, record


@pytest.fixture
def command(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    namespace = f"cli-{uuid.uuid4().hex[:8]}"
    (tmp_path / "headrace.toml").write_text(f'[redis]\nnamespace = "{namespace}"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_REDIS_URL", redis_url)
    monkeypatch.setenv("HEADRACE_KEY_PEPPER", "pepper")
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield Command(client, namespace)


def test_a_key_is_made_alone_on_stdout_and_never_shown_again(command: Command) -> None:
    ended = command.done("create", "--tenant", "acme", "--name", "laptop [of] Ann")
    [secret] = ended.stdout.splitlines()
    record = command.store.of_secret(secret)
    assert record is not None
    assert ended.stderr == f"{record.key_id} of tenant acme\n"
    for arguments in (
        ["list"],
        ["list", "--json"],
        ["show", record.key_id],
        ["show", record.key_id, "--json"],
    ):
        shown = command.done(*arguments).stdout
        assert record.key_id in shown
        assert record.secrets[0].display_prefix in shown
        assert secret not in shown
        assert record.secrets[0].digest not in shown
    assert "laptop [of] Ann" in command.done("show", record.key_id).stdout


def test_what_a_key_is_good_for_is_set_changed_and_taken_back(command: Command) -> None:
    _, made = command.create(
        "--expires", "30d", "--not-before", "2026-01-01", "--models", "chat,code", "--models", "mail",
        "--cidr", "10.0.0.0/8, 192.0.2.7", "--requests-per-minute", "60", "--tokens-per-day", "1000",
    )  # fmt: skip
    assert made.not_after is not None
    assert abs(made.not_after - time.time() - 30 * 86_400) < 60
    assert made.not_before == datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    assert made.models == ["chat", "code", "mail"]
    assert made.cidrs == ["10.0.0.0/8", "192.0.2.7/32"]
    assert made.limits is not None
    assert made.limits.model_dump(exclude_defaults=True) == {
        "requests_per_minute": 60,
        "tokens_per_day": 1000,
    }

    document = json.loads(
        command.done(
            "update", made.key_id, "--expires", "none", "--models", "none", "--burst", "5", "--json",
        ).stdout
    )  # fmt: skip
    assert (document["not_after"], document["models"], document["version"]) == (None, None, 2)
    assert document["limits"] == {"requests_per_minute": 60, "burst": 5, "tokens_per_day": 1000}
    assert document["cidrs"] == made.cidrs, "was not named"
    command.done(
        "update", made.key_id, "--requests-per-minute", "0", "--tokens-per-day", "0", "--cidr", "none"
    )  # with its rate the burst goes, too
    changed = command.store.get(made.key_id)
    assert (changed.limits, changed.cidrs, changed.not_before) == (None, [], made.not_before)


def test_models_that_nothing_has_are_told_and_taken(command: Command) -> None:
    """As far as anybody can know them: the policy's routes, and models that are configured or run."""
    route = RouteConfig(name="chat", split=[VariantConfig(variant="a", model="m")])
    policy = PolicyRecord(1, "", [TenantConfig(name="acme")], [route])
    command.client.set(command.keys.policy, to_json(policy))
    made = command.done("create", "--tenant", "acme", "--models", "chta,smollm2-135m")
    assert "headrace: --models: no route or model is named 'chta'; did you mean 'chat'?\n" in made.stderr
    assert "smollm2" not in made.stderr
    key_id = made.stderr.splitlines()[-1].split()[0]
    assert "'chta'" not in command.done("update", key_id, "--models", "chat").stderr
    assert "'chta'" in command.done("update", key_id, "--models", "chat,chta").stderr


def test_a_burst_without_a_rate_is_refused_by_name(command: Command) -> None:
    assert "--burst: " in command.refusal("create", "--tenant", "acme", "--burst", "5")
    _, made = command.create("--requests-per-minute", "60")
    arguments = ("--requests-per-minute", "0", "--burst", "5")
    assert "--burst: " in command.refusal("update", made.key_id, *arguments)
    assert command.store.get(made.key_id) == made


def test_rotation_prints_a_second_secret_of_the_same_key(command: Command) -> None:
    old, made = command.create()
    ended = command.done("rotate", made.key_id, "--overlap", "2h")
    new = ended.stdout.strip()
    assert "the old secret ends " in ended.stderr
    assert command.store.of_secret(old) == command.store.of_secret(new) != made
    assert "two secrets already" in command.refusal("rotate", made.key_id)
    command.done("retire", made.key_id)
    assert command.store.of_secret(old) is None
    document = json.loads(command.done("rotate", made.key_id, "--now", "--json").stdout)
    assert command.store.of_secret(new) is None
    assert command.store.of_secret(document["secret"]).key_id == made.key_id  # type: ignore[union-attr]


def test_an_old_secret_cannot_go_on_for_more_than_a_year(command: Command) -> None:
    _, made = command.create()
    assert command.refusal("rotate", made.key_id, "--overlap", "9999999d") == "--overlap: at most 366 days"
    assert command.store.get(made.key_id) == made


def test_a_new_end_must_follow_the_beginning_that_a_key_has(command: Command) -> None:
    _, made = command.create("--not-before", "3d")
    complaint = "--expires: the key would end before it begins"
    assert command.refusal("update", made.key_id, "--expires", "2d") == complaint
    command.done("update", made.key_id, "--expires", "4d")
    complaint = "--not-before: the key would end before it begins"
    assert command.refusal("update", made.key_id, "--not-before", "5d") == complaint


@pytest.mark.parametrize("far_away", [253_402_351_199.0, -62_135_647_200.0, 1e300])
def test_a_moment_that_is_no_date_is_shown_as_its_number(command: Command, far_away: float) -> None:
    _, made = command.create()
    ending = [msgspec.structs.replace(made.secrets[0], not_after=far_away)]
    command.store.change(
        made.key_id, lambda read: msgspec.structs.replace(read, not_after=far_away, secrets=ending)
    )
    number = str(far_away)
    assert number[:8] in command.done("list").stdout
    assert json.loads(command.done("show", made.key_id, "--json").stdout)["not_after"] == number
    assert number in command.done("show", made.key_id).stdout


def test_a_name_says_nothing_to_a_terminal(command: Command) -> None:
    _, made = command.create("--name", "a\x1b[2Jb\x9bc\nd")
    for arguments in (["list"], ["show", made.key_id]):
        shown = command.done(*arguments).stdout
        assert not {"\x1b", "\x9b"} & set(shown)
    assert r"a\x1b[2Jb\x9bc\nd" in shown


def test_a_revoked_key_is_only_shown_to_whoever_asks_for_it(command: Command) -> None:
    _, made = command.create()
    command.done("revoke", made.key_id)
    assert made.key_id not in command.done("list").stdout
    assert "revoked" in command.done("list", "--all").stdout
    assert json.loads(command.done("show", made.key_id, "--json").stdout)["state"] == "revoked"
    assert command.refusal("revoke", made.key_id) == f"{made.key_id} is revoked, and stays so"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("create", "--expires", "soon"), "--expires: 'soon' is neither a duration"),
        (("create", "--expires", "99999999w"), "too far away"),
        (("create", "--cidr", "10.0.0.1/8"), "has host bits set"),
        (("create", "--models", "a,,b"), "--models: 'a,,b' is neither a list nor 'none'"),
        (("create", "--models", "a,none"), "neither a list"),
        (("create", "--models", ",".join(map(str, range(1001)))), "--models: at most 1000 models"),
        (
            ("create", "--cidr", ",".join(f"10.{n % 256}.{n // 256}.0/24" for n in range(257))),
            "--cidr: at most 256 networks",
        ),
        (("create", "--name", "x" * 257), "--name: at most 256 characters"),
        (("create", "--expires", "2020-01-01"), "--expires: it has passed already"),
        (
            ("create", "--expires", "2d", "--not-before", "3d"),
            "--expires: the key would end before it begins",
        ),
        (("create", "--not-before", "1999-12-31"), "--not-before: it must be from the year 2000 on"),
        (("rotate", "key_x", "--overlap", "1"), "--overlap: '1' is no duration"),
        (("show", "key_none"), "there is no key 'key_none'"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_made(
    command: Command, arguments: tuple[str, ...], complaint: str
) -> None:
    assert complaint in command.refusal(*arguments)
    assert command.store.list() == []


def test_a_mistake_is_one_line_and_exit_code_2(command: Command, tmp_path: Path, redis_url: str) -> None:
    ended = headrace(
        "keys", "revoke", "key_none", cwd=tmp_path, HEADRACE_REDIS_URL=redis_url, HEADRACE_KEY_PEPPER="p"
    )
    assert ended.returncode == 2
    assert ended.stderr == "headrace: there is no key 'key_none'; see `headrace keys list`\n"


def test_a_key_needs_a_tenant_that_exists(command: Command) -> None:
    policy = PolicyRecord(
        1, "hash", [TenantConfig(name="acme")], [], admin_tenants=[TenantConfig(name="new")]
    )
    command.client.set(command.keys.policy, to_json(policy))
    assert command.refusal("create", "--tenant", "acm") == "no tenant is named 'acm'; known: acme, new"
    command.done("create", "--tenant", "new")


def test_every_change_is_in_the_audit_without_secrets(command: Command) -> None:
    secret, made = command.create("--name", "x", "--tokens-per-day", "3")
    command.done("update", made.key_id, "--tokens-per-day", "4")
    new = command.done("rotate", made.key_id).stdout.strip()
    command.done("retire", made.key_id)
    command.done("revoke", made.key_id)
    entries = [entry[AUDIT_FIELD] for _, entry in command.client.xrange(command.keys.audit)]
    records = [json.loads(entry) for entry in entries]
    assert [(record["action"], record["object"]) for record in records] == [
        (f"key.{action}", made.key_id) for action in ("create", "update", "rotate", "retire", "revoke")
    ]
    assert records[0]["change"] == {
        "tenant": "acme",
        "name": "x",
        "limits": {"tokens_per_day": 3},
        "version": 1,
    }
    assert records[1]["change"] == {"limits": {"tokens_per_day": 4}, "version": 2}
    digests = [secret.digest for secret in made.secrets]
    for hidden in (secret, new, *digests):
        assert all(hidden.encode() not in entry for entry in entries)


def test_a_change_that_cannot_be_audited_is_told_as_made(command: Command) -> None:
    command.client.set(command.keys.audit, "not a stream")
    desk = KeyDesk(command.client, command.keys, "pepper")
    made = desk.create("acme", KeySettings(name="kept"))
    assert desk.get(made.record.key_id).name == "kept"


def test_a_new_secret_is_printed_whatever_befalls_the_audit(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> bytes:
        raise ValueError("cannot be written")

    _, made = command.create()
    monkeypatch.setattr("compose.key_desk.audit_bytes", broken)
    secret = command.done("rotate", made.key_id).stdout.strip()
    assert command.store.of_secret(secret) is not None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("45m", 2700), ("24h", 86_400), ("30d", 2_592_000), ("2w", 1_209_600), (" 1s ", 1)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text, "--overlap") == seconds
    assert moment(text, "--expires", 1000.0) == 1000 + seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2027-01-31", datetime(2027, 1, 31, tzinfo=UTC)),
        ("2027-01-31T12:00", datetime(2027, 1, 31, 12, tzinfo=UTC)),
        ("2027-01-31T12:00+02:00", datetime(2027, 1, 31, 10, tzinfo=UTC)),
        ("2027-01-31T12:00:30Z", datetime(2027, 1, 31, 12, 0, 30, tzinfo=UTC)),
    ],
)
def test_moments_are_in_utc_unless_they_say_otherwise(text: str, expected: datetime) -> None:
    assert moment(text, "--expires", 0.0) == expected.timestamp()


@pytest.mark.parametrize("text", ["", "1", "-1d", "1.5h", "d", "99999999999d", "2027-13-01", "9999-01-01"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--expires"):
        moment(text, "--expires", time.time())
