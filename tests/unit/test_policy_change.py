"""What a change makes of the stored policy, and what it is refused for."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from compose.policy_table import changes_table
from gateway.errors import ApiError
from gateway.policy_change import EntryChange, FilePublication, file_record
from shared.config import HeadraceConfig, RouteConfig, TenantConfig, parse_config
from shared.redis_schema import PolicyRecord


def config(**fields: Any) -> HeadraceConfig:
    return parse_config(
        {
            "models": [{"name": "a", "source": "fake:"}, {"name": "b", "source": "fake:"}],
            "tenants": [{"name": "acme"}, {"name": "other"}],
            "routes": [{"name": "chat", "split": [{"variant": "v", "model": "a"}]}],
            **fields,
        }
    )


def route(name: str, model: str = "a", **fields: Any) -> RouteConfig:
    return RouteConfig.model_validate(
        {"name": name, "split": [{"variant": "v", "model": model, "weight": 1.0}], **fields}
    )


def published(of: HeadraceConfig, **fields: Any) -> PolicyRecord:
    return msgspec.structs.replace(file_record(of), version=1, **fields)


def test_a_file_s_publication_changes_the_file_s_part_only() -> None:
    before = published(config(), admin_tenants=[TenantConfig(name="acme", max_concurrency=1)])
    newer = config(tenants=[{"name": "acme", "max_concurrency": 9}])
    after = FilePublication(newer).applied_to(before, newer)
    assert after is not None
    assert [(each.name, each.max_concurrency) for each in after.tenants_in_force] == [("acme", 1)]
    assert FilePublication(newer).applied_to(msgspec.structs.replace(after, version=2), newer) is None
    told = FilePublication(newer).told(before, after)
    assert told["tenants"] == {"added": [], "removed": ["other"], "changed": ["acme"]}


def test_a_publication_that_is_only_for_an_empty_redis_leaves_another_file_s_alone() -> None:
    before = published(config())
    newer = config(tenants=[{"name": "new"}])
    assert FilePublication(newer, only_if_absent=True).applied_to(before, newer) is None
    assert FilePublication(newer, only_if_absent=True).applied_to(file_record(newer), newer) is not None


def test_entries_keep_their_places() -> None:
    record = published(config(), admin_routes=[route("x"), route("y")])
    after = EntryChange("route", "x", route("x", "b")).applied_to(record, config())
    assert after is not None
    assert [each.name for each in after.routes_in_force] == ["chat", "x", "y"]
    assert after.admin_routes[0].split[0].model == "b"
    assert EntryChange("route", "x", route("x", "b")).applied_to(after, config()) is None


def test_an_entry_that_a_file_has_left_behind_broken_stands_in_nobody_s_way_and_can_be_mended() -> None:
    record = published(config(), admin_routes=[route("broken", "gone")])
    assert EntryChange("tenant", "new", TenantConfig(name="new")).applied_to(record, config()) is not None
    assert EntryChange("route", "fine", route("fine")).applied_to(record, config()) is not None
    assert EntryChange("route", "broken", route("broken")).applied_to(record, config()) is not None
    assert EntryChange("route", "broken", None).applied_to(record, config()) is not None
    wrong = route("wrong", overrides=[{"tenant": "nobody", "variant": "v"}])
    with pytest.raises(ApiError) as refusal:
        EntryChange("route", "wrong", wrong).applied_to(record, config())
    assert (refusal.value.status, "nobody" in refusal.value.message) == (400, True)


@pytest.mark.parametrize(
    ("kind", "name", "status", "words"),
    [
        ("tenant", "acme", 409, "configuration file"),
        ("route", "chat", 409, "configuration file"),
        ("route", "b", 409, "model's own name"),
        ("tenant", "nobody", 404, "no tenant"),
        ("tenant", "vip", 409, "route 'for-vip'"),
    ],
)
def test_what_cannot_be_deleted_is_refused_with_the_reason(
    kind: Any, name: str, status: int, words: str
) -> None:
    named = route("for-vip", overrides=[{"tenant": "vip", "variant": "v"}])
    record = published(config(), admin_tenants=[TenantConfig(name="vip")], admin_routes=[named])
    with pytest.raises(ApiError) as refusal:
        EntryChange(kind, name, None).applied_to(record, config())
    assert refusal.value.status == status
    assert words in refusal.value.message


def test_changes_are_shown_by_what_differs() -> None:
    change = {
        "time": 1.0, "actor": "jo", "action": "tenant.set", "object": "acme", "version_after": 2,
        "change": {"before": {"name": "acme", "burst": 1}, "after": {"name": "acme", "burst": 2}},
    }  # fmt: skip
    publication = {
        **change,
        "change": {"tenants": {"added": ["x"], "removed": [], "changed": []}, "routes": {"added": []}},
    }
    cells = list(changes_table([change, publication]).columns[-1].cells)
    assert cells == ["burst: 1 → 2", "tenants: added x; routes: –"]


def test_a_change_with_a_table_or_with_words_in_brackets_is_shown_as_it_is() -> None:
    change = {
        "time": 1e300, "actor": "jo [/b]", "action": "key.update", "object": "key_1", "version_after": None,
        "change": {"limits": {"burst": 3}, "name": "[/b]"},
    }  # fmt: skip
    with Console(width=200, file=io.StringIO()) as console:
        console.print(changes_table([change]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert 'limits: {"burst": 3}; name: "[/b]"' in shown
    assert "jo [/b]" in shown
    assert "1e+300" in shown
