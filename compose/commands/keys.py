"""`headrace keys`: API keys of tenants. A secret is shown once, when it is made; an HMAC of it is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compose.commands.key_options import (
    BurstOption,
    CidrOption,
    ExpiresOption,
    InputTokensOption,
    JsonOption,
    MaxConcurrencyOption,
    MaxOutputOption,
    MaxPromptOption,
    ModelsOption,
    NameOption,
    NotBeforeOption,
    OutputTokensOption,
    RequestsPerMinuteOption,
    TokensPerDayOption,
    TokensPerMinuteOption,
)
from compose.commands.options import DEFAULT_RUN_DIR, ConfigOption, RunDirOption, UrlOption
from compose.commands.policy import EXIT_FAILED

if TYPE_CHECKING:
    from compose.key_desk import KeyDesk
    from compose.key_settings import KeySettings
    from compose.remote_key_desk import RemoteKeyDesk
    from shared.api_keys import NewApiKey
    from shared.redis_schema import ApiKeyRecord

app = typer.Typer(help="API keys of tenants.", no_args_is_help=True)
KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="As `headrace keys list` shows it.")]


@app.command()
def create(
    context: typer.Context,
    tenant: Annotated[str, typer.Option("--tenant", help="Who pays for its requests.")] = "default",
    name: NameOption = None,
    expires: ExpiresOption = None,
    not_before: NotBeforeOption = None,
    models: ModelsOption = None,
    cidr: CidrOption = None,
    requests_per_minute: RequestsPerMinuteOption = None,
    burst: BurstOption = None,
    input_tokens_per_minute: InputTokensOption = None,
    output_tokens_per_minute: OutputTokensOption = None,
    tokens_per_minute: TokensPerMinuteOption = None,
    tokens_per_day: TokensPerDayOption = None,
    max_concurrency: MaxConcurrencyOption = None,
    max_prompt_tokens: MaxPromptOption = None,
    max_output_tokens: MaxOutputOption = None,
    json: JsonOption = False,
    url: UrlOption = None,
    config: ConfigOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Make a key and print it. It cannot be shown again."""
    with _desk(url, run_dir, config) as desk:
        made = desk.create(tenant, _settings(context))
    _print_secret(made, json)
    if not json:
        typer.echo(f"{made.record.key_id} of tenant {tenant}", err=True)


@app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this one's.")] = None,
    is_all: Annotated[bool, typer.Option("--all", help="Also those that are revoked.")] = False,
    json: JsonOption = False,
    url: UrlOption = None,
    config: ConfigOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Show all keys that are not revoked."""
    from compose.fitted_table import FittedTable, output_console  # local: see compose/cli.py
    from compose.key_table import key_document, key_table

    with _desk(url, run_dir, config) as desk:
        records = [
            record
            for record in desk.list()
            if tenant in (None, record.tenant) and (is_all or record.revoked_at is None)
        ]
    if json:
        _print_json([key_document(record, time.time()) for record in records])
    else:
        output_console().print(FittedTable(key_table(records, time.time())))


@app.command()
def show(
    key_id: KeyId,
    json: JsonOption = False,
    url: UrlOption = None,
    config: ConfigOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Show one key, also a revoked one."""
    with _desk(url, run_dir, config) as desk:
        record = desk.get(key_id)
    _print_record(record, json)


@app.command()
def update(
    context: typer.Context,
    key_id: KeyId,
    name: NameOption = None,
    expires: ExpiresOption = None,
    not_before: NotBeforeOption = None,
    models: ModelsOption = None,
    cidr: CidrOption = None,
    requests_per_minute: RequestsPerMinuteOption = None,
    burst: BurstOption = None,
    input_tokens_per_minute: InputTokensOption = None,
    output_tokens_per_minute: OutputTokensOption = None,
    tokens_per_minute: TokensPerMinuteOption = None,
    tokens_per_day: TokensPerDayOption = None,
    max_concurrency: MaxConcurrencyOption = None,
    max_prompt_tokens: MaxPromptOption = None,
    max_output_tokens: MaxOutputOption = None,
    json: JsonOption = False,
    url: UrlOption = None,
    config: ConfigOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Change what a key is good for: what is named here, and nothing else."""
    with _desk(url, run_dir, config) as desk:
        record = desk.update(key_id, _settings(context))
    _print_record(record, json)


@app.command()
def rotate(
    key_id: KeyId,
    overlap: Annotated[
        str, typer.Option("--overlap", metavar="TIME", help="The old secret works so long: 24h, 7d …")
    ] = "24h",
    at_once: Annotated[bool, typer.Option("--now", help="End the old secret at once.")] = False,
    json: JsonOption = False,
    url: UrlOption = None,
    config: ConfigOption = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Give a key a new secret and print it. The old one goes on for a while."""
    from compose.moments import duration_s, shown  # local: see compose/cli.py

    overlap_s = 0.0 if at_once else duration_s(overlap, "--overlap")
    with _desk(url, run_dir, config) as desk:
        made = desk.rotate(key_id, overlap_s)
    _print_secret(made, json)
    if not json:
        old = made.record.secrets[1:]
        told = f"the old secret ends {shown(old[0].not_after)}" if old else "the old secret has ended"
        typer.echo(f"{key_id} of tenant {made.record.tenant}; {told}", err=True)


@app.command()
def retire(
    key_id: KeyId, url: UrlOption = None, config: ConfigOption = None, run_dir: RunDirOption = DEFAULT_RUN_DIR
) -> None:
    """End the older secret of a key that was rotated, before its time."""
    with _desk(url, run_dir, config) as desk:
        desk.retire(key_id)
    typer.echo(f"the older secret of {key_id} has ended", err=True)


@app.command()
def revoke(
    key_id: KeyId, url: UrlOption = None, config: ConfigOption = None, run_dir: RunDirOption = DEFAULT_RUN_DIR
) -> None:
    """End a key for good, on every gateway, within seconds."""
    with _desk(url, run_dir, config) as desk:
        desk.revoke(key_id)
    typer.echo(f"{key_id} is revoked", err=True)


def _settings(context: typer.Context) -> KeySettings:
    """What the options of create and update say."""
    from compose.key_settings import KeySettings  # local: see compose/cli.py
    from shared.config import Limits

    given = context.params
    return KeySettings(
        name=given["name"],
        not_before=given["not_before"],
        expires=given["expires"],
        models=given["models"] or (),
        cidrs=given["cidr"] or (),
        limits={name: given[name] for name in Limits.model_fields if name in given},
    )


def _print_secret(made: NewApiKey, json: bool) -> None:
    """The first thing after it was made: it is kept nowhere else."""
    from compose.key_table import key_document  # local: see compose/cli.py

    if json:
        _print_json({"secret": made.secret, **key_document(made.record, time.time())})
        return
    typer.echo(made.secret)  # alone on stdout, for KEY=$(headrace keys create)


def _print_record(record: ApiKeyRecord, json: bool) -> None:
    from compose.fitted_table import output_console  # local: see compose/cli.py
    from compose.key_table import key_card, key_document

    if json:
        _print_json(key_document(record, time.time()))
    else:
        output_console().print(key_card(record, time.time()))


def _print_json(document: Any) -> None:
    import msgspec  # local: see compose/cli.py

    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))


@contextmanager
def _desk(url: str | None, run_dir: Path, config: Path | None) -> Iterator[KeyDesk | RemoteKeyDesk]:
    """With a URL keys are changed through the admin API, else in Redis itself."""
    if url is not None:
        with _remote_desk(url, run_dir) as remote:
            yield remote
        return
    import msgspec  # local: see compose/cli.py
    import redis

    from compose.key_desk import KeyDesk
    from compose.stack_access import key_pepper, redis_access, stack_config
    from shared.errors import ConfigError

    access = redis_access(run_dir, config)
    client = access.connect()
    configured = [model.name for model in stack_config(run_dir, config).models]
    try:
        yield KeyDesk(client, access.keys, key_pepper(run_dir), configured=configured, warn=_warn)
    except redis.RedisError as error:
        raise ConfigError(f"Redis does not answer: {error}", "HEADRACE_REDIS_URL") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"Redis has a key that cannot be read: {error}", "HEADRACE_REDIS_URL") from error
    finally:
        client.close()


@contextmanager
def _remote_desk(url: str, run_dir: Path) -> Iterator[RemoteKeyDesk]:
    from compose.gateway_client import GatewayError  # local: see compose/cli.py
    from compose.remote_key_desk import RemoteKeyDesk
    from compose.stack_access import admin_api_access

    try:
        yield RemoteKeyDesk(admin_api_access(run_dir, url), _warn)
    except GatewayError as error:
        typer.echo(f"headrace: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from error


def _warn(text: str) -> None:
    typer.echo(f"headrace: {text}", err=True)
