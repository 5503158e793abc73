"""The command line of `headrace knee`.

Imports neither aiohttp nor numpy, so that `headrace --help` stays fast.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from loadtest.knee.options import KneeOptions, budget_of, cvs_of, tiers_of
from loadtest.options import BenchServeOptions
from loadtest.server_url import without_credentials
from shared.errors import ConfigError

EXIT_INTERRUPTED = 130  # as shells tell a SIGINT
FLAGS_WITH_SECRETS = ("--key", "--header")


def knee(
    url: Annotated[
        str, typer.Option(envvar="HEADRACE_URL", help="Of any OpenAI-compatible server.")
    ] = "http://127.0.0.1:8080",
    key: Annotated[
        str | None, typer.Option(envvar="HEADRACE_API_KEY", show_default=False, help="API key.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first that /v1/models lists.")] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="LIMITS",
            help="Like ttft=500ms,tpot=50ms; also e2el. ttft and e2el count from when a request was due.",
        ),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:LIMITS", help="Several SLOs at once, like batch:e2el=60s@0.9."),
    ] = None,
    attainment: Annotated[str, typer.Option(help="Share of requests that keep all limits.")] = "0.95",
    cv: Annotated[
        str, typer.Option(help="Burstiness: 1 Poisson, 2 bursty, 0 an even pace; 1,2: one after another.")
    ] = "1",
    budget: Annotated[str, typer.Option(help="Time for everything, like 300s, 5m or 1h.")] = "300s",
    tolerance: Annotated[float, typer.Option(help="Half-width of the interval to stop at.")] = 0.05,
    validate: Annotated[
        bool, typer.Option("--validate", help="Spend two probes on checking the estimate from both sides.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Everything, for `headrace report`.")
    ] = None,
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="A page of HTML; see `headrace report`.")
    ] = None,
    backend: Annotated[str, typer.Option(help="openai (completions) or openai-chat.")] = "openai",
    endpoint: Annotated[str | None, typer.Option(help="Path; default: that of the backend.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE")] = None,
    dataset_name: Annotated[
        str, typer.Option(help="random, custom, sharegpt, prefix_repetition or txt-slices.")
    ] = "random",
    dataset_path: Path | None = None,
    random_input_len: int = 512,
    random_output_len: int = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths vary by this share.")] = 0.0,
    random_input_cv: Annotated[float | None, typer.Option(help="Lognormal lengths instead.")] = None,
    random_output_cv: float | None = None,
    random_prefix_len: Annotated[int, typer.Option(help="Tokens shared by all prompts, on top.")] = 0,
    random_vocab_size: int = 30_000,
    max_input_len: int | None = None,
    max_output_len: int | None = None,
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos/--no-ignore-eos", help="Default: for synthetic prompts.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the server's.")] = None,
    prefix_hit_share: Annotated[
        float | None, typer.Option(help="Of prompt tokens in the server's cache; checked. Default: planted.")
    ] = None,
    metrics_url: Annotated[str | None, typer.Option(help="Default: /metrics of the URL.")] = None,
    max_concurrency: Annotated[int, typer.Option(help="Of the closed loop that fills the server.")] = 1024,
    request_timeout_s: float = 600.0,
    seed: int = 0,
    nonce: Annotated[int | None, typer.Option(help="Repeats the prompts of an earlier search.")] = None,
    progress: Annotated[bool, typer.Option(help="A progress bar, on terminals.")] = True,
) -> None:
    """Find the largest rate that keeps an SLO, with a 90 % interval, within a budget of seconds.

    Without an SLO: only where latency turns up (a shape, not a capacity).

    Exit codes: 0 a rate with its interval (resolved or not), 2 wrong usage or no server, 3 infeasible at
    any load, 4 the generator is too slow (client-bound), 5 invalid: a condition for believing the numbers
    is broken, 1 a file could not be written, 130 interrupted (what was known by then is printed).
    """
    options = KneeOptions(
        load=BenchServeOptions(
            backend=backend,  # type: ignore[arg-type]  # check() says which there are
            base_url=url.rstrip("/").removesuffix("/v1"),
            endpoint=endpoint,
            model=model,
            api_key=key,
            headers=_headers(header or ()),
            dataset_name=dataset_name,  # type: ignore[arg-type]
            dataset_path=dataset_path,
            random_input_len=random_input_len,
            random_output_len=random_output_len,
            random_range_ratio=random_range_ratio,
            random_input_cv=random_input_cv,
            random_output_cv=random_output_cv,
            random_prefix_len=random_prefix_len,
            random_vocab_size=random_vocab_size,
            max_input_len=max_input_len,
            max_output_len=max_output_len,
            ignore_eos=ignore_eos,
            temperature=temperature,
            prefix_hit_share=prefix_hit_share,
            metrics_url=metrics_url,
            request_timeout_s=request_timeout_s,
            seed=seed,
            nonce=nonce,
        ),
        tiers=tiers_of(slo, tier or (), attainment),
        cvs=cvs_of(cv),
        budget_s=budget_of(budget),
        tolerance=tolerance,
        validate=validate,
        max_concurrency=max_concurrency,
        json_file=json_file,
        report_file=report_file,
        shows_progress=progress,
        command_line=recorded_command_line(sys.argv),
    )
    options.check()
    try:
        # Here and not above: aiohttp and numpy take a third of a second that `--help` need not wait for.
        from loadtest.knee.run import run_knee

        exit_code = run_knee(options)
    except KeyboardInterrupt:  # before anything was measured, or for the second time
        typer.echo("interrupted: nothing is known yet", err=True)
        exit_code = EXIT_INTERRUPTED
    raise typer.Exit(exit_code)


def recorded_command_line(argv: Sequence[str]) -> str:
    """The command with the values of secret flags struck out."""
    shown = [Path(argv[0]).name]
    is_secret = False
    for argument in argv[1:]:
        flag, equals, _ = argument.partition("=")
        if is_secret:
            shown.append("***")
            is_secret = False
        elif flag in FLAGS_WITH_SECRETS:
            shown.append(f"{flag}=***" if equals else flag)
            is_secret = not equals
        else:
            shown.append(without_credentials(argument))
    return shlex.join(shown)


def _headers(items: Sequence[str]) -> dict[str, str]:
    headers = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{item!r} is not of the form KEY=VALUE", "--header")
        headers[name.strip()] = value.strip()
    return headers
