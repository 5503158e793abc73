"""Tenants and routes through the admin API: committed or refused, followed by every gateway, and audited."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from compose.cli import app
from shared.errors import ConfigError
from shared.redis_schema import PolicyRecord, from_json, to_json
from tests.http_client import Answer, send
from tests.stack import ADMIN_TOKEN, Stack, fake_model, wait_until

NUM_FREEZES = int(os.environ.get("NUM_FREEZES", "3"))  # more to hunt by hand

DOCUMENT: dict[str, Any] = {
    "redis": {"timeout_ms": 2000},  # most of these tests are not about a machine that has no time
    "models": [fake_model("a"), fake_model("b")],
    "tenants": [{"name": "acme"}, {"name": "other"}],
    "routes": [
        {
            "name": "chat",
            "split": [
                {"variant": "control", "model": "a", "weight": 90},
                {"variant": "treated", "model": "b", "weight": 10},
            ],
        }
    ],
}


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    """With two gateways."""
    with Stack(redis_url, json.loads(json.dumps(DOCUMENT))) as stack:
        stack.start_gateway("second")
        stack.wait_ready()
        yield stack


def admin(
    stack: Stack, method: str, path: str, body: Any = None, *, gateway: int = 0, **headers: str
) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return send(stack.urls[gateway], method, f"/admin{path}", body, key=ADMIN_TOKEN, headers=named)


def version(stack: Stack, gateway: int = 0) -> int:
    return admin(stack, "GET", "/policy", gateway=gateway).json["policy_version"]


def told_config(stack: Stack, path: str, gateway: int) -> Any:
    answer = admin(stack, "GET", path, gateway=gateway)
    return answer.json["config"] if answer.status == 200 else None


def changes(stack: Stack) -> list[dict[str, Any]]:
    return admin(stack, "GET", "/audit?limit=1000").json["data"]


def split(control: float, treated: float) -> dict[str, Any]:
    return {
        "split": [
            {"variant": "control", "model": "a", "weight": control},
            {"variant": "treated", "model": "b", "weight": treated},
        ]
    }


# ------------------------------------------------------------------------------------- following


def test_a_change_is_in_force_at_once_here_and_on_the_other_gateway_within_two_seconds(stack: Stack) -> None:
    answer = admin(stack, "PUT", "/tenants/fresh", {"requests_per_minute": 1, "burst": 1})
    assert (answer.status, answer.json["origin"]) == (201, "admin")
    committed = answer.json["policy_version"]
    assert answer.headers["etag"] == f'"{committed}"'
    key, body = stack.key("fresh"), {"model": "a", "prompt": "hi", "max_tokens": 1}
    first = send(stack.urls[0], "POST", "/v1/completions", body, key=key)
    assert (first.status, first.headers["x-headrace-policy-version"]) == (200, str(committed))
    wait_until(lambda: told_config(stack, "/tenants/fresh", 1), 2, "the second gateway")
    second = send(stack.urls[1], "POST", "/v1/completions", body, key=key)
    assert second.status == 429  # by the limit that was set at the first one
    assert int(second.headers["x-headrace-policy-version"]) >= committed
    assert f"headrace_policy_version {float(committed)}" in stack.get("/metrics")[1].decode()


def test_what_the_file_says_is_hidden_by_the_admin_api_and_comes_back_when_that_is_deleted(
    stack: Stack,
) -> None:
    assert admin(stack, "PUT", "/routes/chat", split(50, 50)).status == 200
    told = admin(stack, "GET", "/routes/chat").json
    assert (told["origin"], told["hides_file"]) == ("admin", True)
    assert [arm["weight"] for arm in told["config"]["split"]] == [50, 50]
    gone = admin(stack, "DELETE", "/routes/chat")
    assert gone.status == 200
    assert gone.json["now"]["origin"] == "file"
    assert [arm["weight"] for arm in gone.json["now"]["config"]["split"]] == [90, 10]


def test_publishing_another_file_changes_the_file_s_part_and_no_more(stack: Stack) -> None:
    assert admin(stack, "PUT", "/routes/chat", split(30, 70)).status == 200
    assert admin(stack, "PUT", "/tenants/kept", {"max_concurrency": 3}).status == 201
    document = stack.config.model_dump(mode="json")
    document["tenants"].append({"name": "of the file".replace(" ", "-")})
    document["routes"][0]["split"][0]["weight"] = 10.0
    stack.rewrite_config(document)
    wait_until(lambda: told_config(stack, "/tenants/of-the-file", 1), 5, "the new file")
    for gateway in (0, 1):
        wait_until(lambda each=gateway: told_config(stack, "/tenants/of-the-file", each), 5, "both gateways")
        chat = told_config(stack, "/routes/chat", gateway)
        assert [arm["weight"] for arm in chat["split"]] == [30, 70]
        assert told_config(stack, "/tenants/kept", gateway)["max_concurrency"] == 3
    assert admin(stack, "DELETE", "/routes/chat").json["now"]["config"]["split"][0]["weight"] == 10


def test_each_request_sees_one_version_and_none_fails_while_weights_change(stack: Stack) -> None:
    """Weights go between all to one and all to the other: what a version says is what its answers have."""
    key, body = stack.key("acme"), {"model": "swing", "prompt": "hi", "max_tokens": 2}
    assert admin(stack, "PUT", "/routes/swing", split(1, 0)).status == 201
    wait_until(lambda: told_config(stack, "/routes/swing", 1), 2, "both gateways")
    expected = {version(stack): "control"}
    stop = threading.Event()

    def ask(gateway: int) -> list[tuple[int, int, str]]:
        seen = []
        while not stop.is_set():
            answer = send(stack.urls[gateway], "POST", "/v1/completions", body, key=key)
            assert answer.status == 200, answer.data
            seen.append(
                (
                    answer.status,
                    int(answer.headers["x-headrace-policy-version"]),
                    answer.headers["x-headrace-variant"],
                )
            )
        return seen

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, number % 2) for number in range(4)]
        try:
            for number in range(8):
                is_control = number % 2 == 1
                answer = admin(stack, "PUT", "/routes/swing", split(1, 0) if is_control else split(0, 1))
                assert answer.status == 200, answer.data
                committed = answer.json["policy_version"]
                expected[committed] = "control" if is_control else "treated"
                wait_until(lambda it=committed: {version(stack, 0), version(stack, 1)} == {it}, 5, "both")
        finally:
            stop.set()
        seen = [each for one in asking for each in one.result()]
    assert len({policy_version for _, policy_version, _ in seen}) > 3
    assert all(expected[policy_version] == variant for _, policy_version, variant in seen)


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "param"),
    [
        ("PUT", "/routes/new", {"split": [{"variant": "v", "model": "nope"}]}, 400, "invalid_value",
         "split[0].model"),
        ("PUT", "/routes/new", {"split": [{"variant": "v", "model": "a", "weight": -1}]}, 400,
         "invalid_value", "split[0].weight"),
        ("PUT", "/routes/new", {}, 400, "missing_required_parameter", "split"),
        ("PUT", "/tenants/new", {"requests_per_minut": 1}, 400, "unknown_parameter", "requests_per_minut"),
        ("PUT", "/tenants/new", {"requests_per_minute": "1"}, 400, "invalid_value", "requests_per_minute"),
        ("PUT", "/tenants/new", {"burst": 5}, 400, "invalid_value", "burst"),
        ("PUT", "/tenants/new", {"key_limits": {"burst": 5}}, 400, "invalid_value", "key_limits.burst"),
        ("POST", "/keys", {"tenant": "acme", "limits": {"burst": 5}}, 400, "invalid_value", "limits.burst"),
        ("PUT", "/tenants/new", {"name": "other"}, 400, "invalid_value", "name"),
        ("PUT", "/tenants/new", [], 400, None, None),
        ("PUT", "/tenants/%20new", {}, 400, "invalid_value", "name"),
        ("PUT", "/tenants/new%0Aline", {}, 400, "invalid_value", "name"),
        ("GET", "/routes/new%0Aline", None, 404, "not_found", "name"),
        ("PUT", "/routes/new", split(1, 1) | {"overrides": [{"tenant": "nobody", "variant": "control"}]}, 400,
         "invalid_value", None),
        ("DELETE", "/tenants/nobody", None, 404, "not_found", "name"),
        ("DELETE", "/tenants/acme", None, 409, "conflict", "name"),
        ("DELETE", "/routes/a", None, 409, "conflict", "name"),
        ("GET", "/routes/nothing", None, 404, "not_found", "name"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_and_changes_nothing(
    stack: Stack, method: str, path: str, body: Any, status: int, code: str | None, param: str | None
) -> None:
    before, num_changes = version(stack), len(changes(stack))
    answer = admin(stack, method, path, body)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, param), answer.data
    assert (version(stack), len(changes(stack))) == (before, num_changes)


def test_names_of_routes_that_there_are_not_yet_are_taken_with_a_warning(stack: Stack) -> None:
    """Whoever sets up tenants and routes may begin with either."""
    told = admin(
        stack, "PUT", "/tenants/early", {"models": ["chta", "a"], "route_limits": {"later": {}}}
    ).json
    assert told["warnings"] == [
        "models: no route or model is named 'chta'; did you mean 'chat'?",
        "route_limits: no route or model is named 'later'; there are " + ", ".join(known_routes(stack)),
    ]
    made = admin(stack, "POST", "/keys", {"tenant": "acme", "models": ["chta"]}).json
    changed = admin(stack, "PATCH", f"/keys/{made['key_id']}", {"models": ["chat", "chta"]}).json
    assert made["warnings"] == changed["warnings"] == told["warnings"][:1]
    assert "warnings" not in admin(stack, "PATCH", f"/keys/{made['key_id']}", {"models": ["chat"]}).json
    assert "warnings" not in admin(stack, "PUT", "/tenants/early", {"models": ["*", "chat"]}).json
    # Over the other gateway, which has not heard of this tenant yet: the command tries again.
    by_hand = headrace(stack, "tenants", "set", "early", 'models=["chta"]')
    assert "headrace: models: no route or model is named 'chta'; did you mean 'chat'?" in by_hand.stderr
    assert admin(stack, "DELETE", "/tenants/early").status == 200


def known_routes(stack: Stack) -> list[str]:
    return sorted(entry["name"] for entry in admin(stack, "GET", "/routes").json["data"])


def test_a_tenant_that_a_route_names_cannot_go(stack: Stack) -> None:
    assert admin(stack, "PUT", "/tenants/vip", {}).status == 201
    named = split(1, 1) | {"overrides": [{"tenant": "vip", "variant": "treated"}]}
    assert admin(stack, "PUT", "/routes/for-vip", named).status == 201
    refused = admin(stack, "DELETE", "/tenants/vip")
    assert refused.status == 409
    assert "for-vip" in refused.error["message"]
    assert admin(stack, "DELETE", "/routes/for-vip").status == 200
    assert admin(stack, "DELETE", "/tenants/vip").status == 200


def test_who_names_the_version_that_was_read_is_refused_when_others_were_faster(stack: Stack) -> None:
    tag = admin(stack, "GET", "/tenants/other").headers["etag"]
    assert admin(stack, "PUT", "/tenants/other", {"max_concurrency": 1}, If_Match=tag).status == 200
    late = admin(stack, "PUT", "/tenants/other", {"max_concurrency": 2}, If_Match=tag)
    assert (late.status, late.error["code"], late.error["param"]) == (412, "version_conflict", "If-Match")
    assert told_config(stack, "/tenants/other", 0)["max_concurrency"] == 1
    assert admin(stack, "DELETE", "/tenants/other", If_Match='"x"').error["param"] == "If-Match"
    assert admin(stack, "PUT", "/tenants/other", {}, If_None_Match="*").status == 412


def test_a_wrong_token_is_refused_and_counted(stack: Stack) -> None:
    def count() -> float:
        text = stack.get("/metrics")[1].decode()
        return float(text.partition("\nheadrace_admin_refusals_total ")[2].split()[0])

    before = count()
    for key in (None, "wrong", stack.key("acme")):
        for method, path in (("GET", "/admin/policy"), ("PUT", "/admin/tenants/x"), ("GET", "/admin/audit")):
            assert send(stack.url, method, path, {}, key=key).status == 401
    assert count() == before + 9


# ------------------------------------------------------------------------------ commits and audit


def test_every_change_is_audited_once_with_who_what_and_the_versions(stack: Stack) -> None:
    before = version(stack)
    actor = "jo@desk\x9b" + "x" * 200
    made_by = {"x_headrace_actor": actor}
    assert admin(stack, "PUT", "/tenants/audited", {"max_concurrency": 1}, **made_by).status == 201
    assert admin(stack, "PUT", "/tenants/audited", {"max_concurrency": 1}).status == 200  # changes nothing
    assert admin(stack, "PUT", "/tenants/audited", {"max_concurrency": 2}).status == 200
    assert admin(stack, "DELETE", "/tenants/audited").status == 200
    gone, changed, made = changes(stack)[:3]
    assert [each["action"] for each in (made, changed, gone)] == ["tenant.set", "tenant.set", "tenant.delete"]
    assert made["actor"] == ("jo@desk" + "x" * 200)[:128]
    assert gone["actor"] == "admin token"
    assert {each["object"] for each in (made, changed, gone)} == {"audited"}
    assert [each["version_after"] for each in (made, changed, gone)] == [before + 1, before + 2, before + 3]
    assert made["version_before"] == before
    assert made["change"] == {"before": None, "after": {"name": "audited", "max_concurrency": 1}}
    assert gone["change"]["after"] is None
    assert abs(made["time"] - time.time()) < 60
    page = admin(stack, "GET", f"/audit?limit=1&before={changed['id']}").json
    assert (page["data"], page["has_more"]) == ([made], True)
    assert admin(stack, "GET", f"/audit?since={int(time.time()) + 100}").json["data"] == []
    assert admin(stack, "GET", "/audit?limit=0").error["param"] == "limit"


def test_changes_at_one_moment_on_both_gateways_are_all_committed(stack: Stack) -> None:
    before, names = version(stack), [f"crowd-{number}" for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(
            pool.map(
                lambda each: admin(stack, "PUT", f"/tenants/{each[1]}", {}, gateway=each[0] % 2),
                enumerate(names),
            )
        )
    assert [answer.status for answer in answers] == [201] * 12
    versions = sorted(answer.json["policy_version"] for answer in answers)
    assert versions == list(range(before + 1, before + 13))

    def told(gateway: int) -> set[str]:
        return {entry["name"] for entry in admin(stack, "GET", "/tenants", gateway=gateway).json["data"]}

    for gateway in (0, 1):
        wait_until(lambda each=gateway: told(each) >= set(names), 5, "both gateways")
    assert [each["version_after"] for each in changes(stack)[:12]] == versions[::-1]


def test_an_audit_that_cannot_be_written_does_not_turn_a_change_into_an_error(redis_url: str) -> None:
    with Stack(redis_url) as stack:
        stack.redis.set(stack.keys.audit, "somebody's")
        assert admin(stack, "PUT", "/tenants/new", {}).status == 201
        assert told_config(stack, "/tenants/new", 0) is not None


def test_a_policy_of_a_newer_version_is_neither_used_nor_overwritten(redis_url: str) -> None:
    with Stack(redis_url) as stack:
        newer = b'{"version": 7, "something": "else"}'
        stack.redis.set(stack.keys.policy, newer)
        assert admin(stack, "PUT", "/tenants/new", {}).status == 503
        wait_until(lambda: "cannot be read" in stack.log("gateway"), 5, "a word about it")
        stack.start_gateway("second")
        wait_until(lambda: stack.get("/readyz")[0] == 200, 10, "the second gateway, by its file")
        assert stack.redis.get(stack.keys.policy) == newer


async def test_a_change_that_a_frozen_redis_made_after_all_is_told_as_made_and_once(own_redis: Any) -> None:
    redis_url, redis_process = own_redis
    with Stack(redis_url, {"redis": {"timeout_ms": 100}, "models": [fake_model()]}) as stack:
        outcomes = []
        for number in range(NUM_FREEZES):
            change = asyncio.create_task(
                asyncio.to_thread(admin, stack, "PUT", f"/tenants/frozen-{number}", {})
            )
            await asyncio.sleep(0.0015 * (number % 6))  # before it is read, between, or after it is committed
            redis_process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.7)  # longer than the time limit
            redis_process.send_signal(signal.SIGCONT)
            answer = await change
            stored = from_json(PolicyRecord, stack.redis.get(stack.keys.policy))
            is_there = any(tenant.name == f"frozen-{number}" for tenant in stored.tenants_in_force)
            assert (answer.status == 201) == is_there, answer.data
            assert answer.status in (201, 503)
            outcomes.append(answer.status)
            await asyncio.to_thread(
                wait_until,
                lambda: admin(stack, "GET", "/audit").status == 200,
                5,
                "a gateway that asks Redis",
            )
        made = [each["object"] for each in changes(stack) if each["action"] == "tenant.set"]
        assert sorted(made) == sorted(set(made))
        assert len(made) == outcomes.count(201)
        print(f"statuses with a frozen Redis: {outcomes}")


def test_a_redis_that_is_gone_is_told_and_changes_nothing(own_redis: Any) -> None:
    redis_url, redis_process = own_redis
    with Stack(redis_url, {"redis": {"timeout_ms": 100}, "models": [fake_model()]}) as stack:
        redis_process.kill()
        redis_process.wait()
        answer = admin(stack, "PUT", "/tenants/new", {})
        assert answer.status == 503
        assert told_config(stack, "/tenants/new", 0) is None
        assert admin(stack, "GET", "/tenants").status == 200  # what is in force is known


def test_a_redis_that_is_full_is_told_at_once_and_changes_nothing(own_redis: Any) -> None:
    redis_url, _ = own_redis
    with Stack(redis_url, {"redis": {"timeout_ms": 2000}, "models": [fake_model()]}) as stack:
        stack.redis.config_set("maxmemory", 1)
        started_at = time.monotonic()
        answer = admin(stack, "PUT", "/tenants/new", {})
        assert time.monotonic() - started_at < 1.5  # each round of asking whether it was made takes 2 s
        assert answer.status == 503
        reason = "command not allowed when used memory > 'maxmemory'"
        told = f"Redis answers with an error: {reason}; nothing was changed."
        assert answer.json["error"]["message"] == told
        assert told_config(stack, "/tenants/new", 0) is None
        stack.redis.config_set("maxmemory", 0)
        assert admin(stack, "PUT", "/tenants/new", {}).status == 201


def test_a_record_of_the_time_before_the_admin_api_is_taken_over(redis_url: str) -> None:
    with Stack(redis_url) as stack:
        stored = json.loads(stack.redis.get(stack.keys.policy))
        for name in ("admin_tenants", "admin_routes", "change_id"):
            del stored[name]
        stack.redis.set(stack.keys.policy, json.dumps(stored | {"version": 41}))
        answer = admin(stack, "PUT", "/tenants/new", {})
        assert (answer.status, answer.json["policy_version"]) == (201, 42)
        assert to_json(from_json(PolicyRecord, stack.redis.get(stack.keys.policy)))


# -------------------------------------------------------------------------------------- commands


def headrace(stack: Stack, *arguments: str) -> Result:
    """In this process: each of its own would take most of a second."""
    environment = {"HEADRACE_URL": stack.url, "HEADRACE_ADMIN_TOKEN": ADMIN_TOKEN, "COLUMNS": "200"}
    nowhere = ("--run-dir", str(stack.directory / "none"))
    return CliRunner().invoke(app, [*arguments, *nowhere], env=environment)


def test_the_commands_set_show_and_delete_tenants_and_routes(stack: Stack, tmp_path: Path) -> None:
    made = headrace(stack, "tenants", "set", "by-hand", "requests_per_minute=60", 'models=["chat"]')
    assert made.exit_code == 0, made.output
    changed = headrace(stack, "tenants", "set", "by-hand", "max_concurrency=4")
    assert changed.exit_code == 0, changed.output
    assert told_config(stack, "/tenants/by-hand", 1) == {
        "name": "by-hand", "models": ["chat"], "requests_per_minute": 60, "max_concurrency": 4,
    }  # fmt: skip
    assert "by-hand" in headrace(stack, "tenants", "list").stdout
    file = tmp_path / "some.toml"
    file.write_text(
        '[[routes]]\nname = "filed"\nsplit = [{ variant = "x", model = "a" }, { variant = "y", model = "b" }]'
    )
    filed = headrace(stack, "routes", "set", "filed", "--file", str(file))
    assert filed.exit_code == 0, filed.output
    weighed = headrace(stack, "routes", "set", "filed", "--weight", "x=80", "--weight", "y=20")
    assert weighed.exit_code == 0, weighed.output
    shown = json.loads(headrace(stack, "routes", "show", "filed").stdout)
    assert [arm["weight"] for arm in shown["config"]["split"]] == [80, 20]
    wrong = headrace(stack, "routes", "set", "filed", "--weight", "z=1")
    assert isinstance(wrong.exception, ConfigError)
    assert "'z'" in wrong.exception.message
    refused = headrace(stack, "tenants", "set", "by-hand", "max_concurrency=0")
    assert (refused.exit_code, "max_concurrency" in refused.stderr) == (1, True)
    for kind, name in (("tenants", "by-hand"), ("routes", "filed")):
        assert headrace(stack, kind, "delete", name).exit_code == 0
    audit = headrace(stack, "audit", "--since", "1h")
    assert audit.exit_code == 0, audit.output
    assert "route.set" in audit.stdout
    assert "80" in audit.stdout
    told = json.loads(headrace(stack, "audit", "--json").stdout)
    assert told[-1]["action"] == "route.delete"
    assert "@" in told[-1]["actor"]


def test_the_commands_for_keys_need_no_more_than_a_url_and_the_admin_token(stack: Stack) -> None:
    def keys(*arguments: str) -> Any:
        ended = headrace(stack, "keys", *arguments, "--json")
        assert ended.exit_code == 0, (ended.output, ended.exception)
        return json.loads(ended.stdout)

    def status(secret: str) -> int:
        body = {"model": "a", "prompt": "hi", "max_tokens": 1}
        return send(stack.urls[1], "POST", "/v1/completions", body, key=secret).status

    assert "HEADRACE_REDIS_URL" not in os.environ
    made = keys(
        "create", "--tenant", "acme", "--name", "far away", "--models", "a", "--expires", "30d",
        "--cidr", "127.0.0.0/8", "--requests-per-minute", "60",
    )  # fmt: skip
    key_id, secret = made["key_id"], made.pop("secret")
    assert (made["name"], made["models"], made["cidrs"]) == ("far away", ["a"], ["127.0.0.0/8"])
    assert status(secret) == 200
    assert keys("show", key_id) == made
    assert made in keys("list", "--tenant", "acme")
    changed = keys("update", key_id, "--tokens-per-day", "1000", "--expires", "none")
    assert (changed["limits"], changed["not_after"]) == (
        {"requests_per_minute": 60, "tokens_per_day": 1000},
        None,
    )
    newer = keys("rotate", key_id, "--overlap", "2h")["secret"]
    assert (status(secret), status(newer)) == (200, 200)
    assert headrace(stack, "keys", "retire", key_id).exit_code == 0
    assert headrace(stack, "keys", "revoke", key_id).exit_code == 0
    assert keys("show", key_id)["state"] == "revoked"
    told = [each for each in changes(stack) if each["object"] == key_id]
    assert len(told) == 5
    assert all("@" in each["actor"] for each in told)

    odd = headrace(stack, "keys", "create", "--tenant", "acme", "--models", "chta")
    assert "no route or model is named 'chta'; did you mean 'chat'?" in odd.stderr
    unknown = headrace(stack, "keys", "show", "key_none")
    assert (unknown.exit_code, "There is no key 'key_none'" in unknown.stderr) == (1, True)
    wrong = headrace(stack, "keys", "create", "--tenant", "acme", "--burst", "5")
    assert isinstance(wrong.exception, ConfigError)
    assert "--burst: " in wrong.exception.message


def test_usage_is_summed_over_the_admin_api_from_what_redis_has(stack: Stack) -> None:
    assert admin(stack, "PUT", "/tenants/metered", {}).status == 201
    key, body = stack.key("metered"), {"model": "a", "prompt": "hi", "max_tokens": 2}
    for _ in range(3):
        assert send(stack.urls[0], "POST", "/v1/completions", body, key=key).status == 200
    assert send(stack.urls[0], "POST", "/v1/completions", {**body, "model": "none"}, key=key).status == 404

    def told() -> list[dict[str, Any]]:
        arguments = ("--tenant", "metered", "--since", "1h", "--by", "route", "--format", "json")
        ended = headrace(stack, "usage", *arguments)
        assert ended.exit_code == 0, (ended.output, ended.exception)
        return json.loads(ended.stdout)

    wait_until(lambda: sum(each["requests"] for each in told()) == 4, 10, "all rows")
    assert [(each["route"], each["requests"], each["output_tokens"], each["refused"]) for each in told()] == [
        ("", 1, 0, 1), ("a", 3, 6, 0),
    ]  # fmt: skip
    for query, param in (("by=colour", "by"), ("since=yesterday", "since"), ("with_shadow=1", "with_shadow")):
        refused = admin(stack, "GET", f"/usage?{query}")
        assert (refused.status, refused.error["param"]) == (400, param)
    assert send(stack.url, "GET", "/admin/usage", key=key).status == 401
    rows = headrace(stack, "usage", "--rows")
    assert isinstance(rows.exception, ConfigError)


def test_experiments_are_the_routes_that_split_with_what_each_variant_had_on_all_gateways(
    stack: Stack,
) -> None:
    assert admin(stack, "PUT", "/routes/compared", split(1, 1)).status == 201
    assert admin(stack, "PUT", "/routes/with-a-spare", split(1, 0) | {"fallback": ["treated"]}).status == 201
    wait_until(lambda: told_config(stack, "/routes/compared", 1), 2, "both gateways")
    key = stack.key("acme")
    for number in range(20):
        body = {"model": "compared", "prompt": "hi", "max_tokens": 3, "user": f"user {number}"}
        assert send(stack.urls[number % 2], "POST", "/v1/completions", body, key=key).status == 200

    def variants() -> list[dict[str, Any]]:
        told = admin(stack, "GET", "/experiments").json["data"]
        assert "with-a-spare" not in {each["route"] for each in told}
        return next(each["variants"] for each in told if each["route"] == "compared")

    wait_until(lambda: sum(each["assigned"]["requests"] for each in variants()) == 20, 5, "the figures")
    assert [each["variant"] for each in variants()] == ["control", "treated"]
    assert all(each["assigned"]["output_tokens"] == 3 * each["assigned"]["requests"] for each in variants())


# ------------------------------------------------------------------------------------------ keys


def test_a_key_is_made_changed_rotated_and_revoked_and_the_audit_has_no_secret(stack: Stack) -> None:
    settings = {"tenant": "acme", "name": "shop", "models": ["a"], "limits": {"requests_per_minute": 600}}
    made = admin(stack, "POST", "/keys", settings, x_headrace_actor="jo")
    assert made.status == 201, made.data
    key_id, secret = made.json["key_id"], made.json["secret"]

    def status(secret: str, model: str = "a") -> int:
        body = {"model": model, "prompt": "hi", "max_tokens": 1}
        return send(stack.urls[1], "POST", "/v1/completions", body, key=secret).status

    assert (status(secret), status(secret, "b")) == (200, 403)
    changed = admin(stack, "PATCH", f"/keys/{key_id}", {"models": None})
    assert (changed.json["models"], changed.json["name"]) == (None, "shop")
    wait_until(lambda: status(secret, "b") == 200, 6, "the other gateway")
    rotated = admin(stack, "POST", f"/keys/{key_id}/rotate", {"overlap_s": 3600})
    newer = rotated.json["secret"]
    assert (status(secret), status(newer)) == (200, 200)
    assert admin(stack, "POST", f"/keys/{key_id}/rotate", {}).error["code"] == "conflict"  # two already
    assert admin(stack, "POST", f"/keys/{key_id}/retire").status == 200
    assert admin(stack, "POST", f"/keys/{key_id}/revoke").json["revoked_at"] is not None
    assert admin(stack, "POST", f"/keys/{key_id}/revoke").status == 200
    assert admin(stack, "PATCH", f"/keys/{key_id}", {"name": "x"}).status == 409
    wait_until(lambda: status(newer) == 401, 6, "the revocation on the other gateway")
    assert key_id in {key["key_id"] for key in admin(stack, "GET", "/keys?tenant=acme").json["data"]}
    told = [each for each in changes(stack) if each["object"] == key_id]
    assert [each["action"] for each in told[::-1]] == [
        "key.create", "key.update", "key.rotate", "key.retire", "key.revoke",
    ]  # fmt: skip
    assert told[-1]["actor"] == "jo"
    everything = json.dumps(told)
    assert secret not in everything
    assert newer not in everything


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/keys", {"tenant": "nobody"}, 400, "tenant"),
        ("POST", "/keys", {}, 400, "tenant"),
        ("POST", "/keys", {"tenant": "acme", "not_after": "soon"}, 400, "not_after"),
        ("POST", "/keys", {"tenant": "acme", "not_after": "9999-12-31T23:59:59-14:00"}, 400, "not_after"),
        ("POST", "/keys", {"tenant": "acme", "not_before": "0001-01-01T00:00:00+14:00"}, 400, "not_before"),
        ("POST", "/keys", {"tenant": "acme", "not_after": "2020-01-01T00:00:00Z"}, 400, "not_after"),
        ("POST", "/keys", {"tenant": "acme", "models": ["m"] * 1001}, 400, "models"),
        ("POST", "/keys", {"tenant": "acme", "cidrs": ["10.0.0.0/8"] * 257}, 400, "cidrs"),
        ("POST", "/keys", {"tenant": "acme", "name": "x" * 257}, 400, "name"),
        ("POST", "/keys", {"tenant": "acme", "cidrs": ["10.0.0.0/33"]}, 400, "cidrs[0]"),
        ("GET", "/keys/key_none", None, 404, "key_id"),
        ("PATCH", "/keys/key_none", {}, 404, "key_id"),
        ("POST", "/keys/key_none/revoke", None, 404, "key_id"),
    ],
)
def test_a_key_that_cannot_be_is_refused_with_the_field_named(
    stack: Stack, method: str, path: str, body: Any, status: int, param: str
) -> None:
    before = stack.redis.hlen(stack.keys.api_keys)
    answer = admin(stack, method, path, body)
    assert (answer.status, answer.error["param"]) == (status, param), answer.data
    assert stack.redis.hlen(stack.keys.api_keys) == before


def test_a_change_to_a_moment_that_cannot_be_shown_is_refused_and_one_that_is_there_is_told(
    stack: Stack,
) -> None:
    key_id = admin(stack, "POST", "/keys", {"tenant": "acme"}).json["key_id"]
    answer = admin(stack, "PATCH", f"/keys/{key_id}", {"not_after": "9999-12-31T23:59:59-14:00"})
    assert (answer.status, answer.error["param"]) == (400, "not_after")
    stored = json.loads(stack.redis.hget(stack.keys.api_keys, key_id))
    stack.redis.hset(stack.keys.api_keys, key_id, json.dumps(stored | {"not_after": 253_402_351_199.0}))
    assert admin(stack, "GET", f"/keys/{key_id}").json["not_after"] == "253402351199.0"
    assert admin(stack, "GET", "/keys").status == 200
