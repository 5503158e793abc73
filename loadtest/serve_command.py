"""The command line of `headrace bench serve`.

Imports neither aiohttp nor numpy, so that `headrace --help` stays fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from loadtest.options import BenchServeOptions
from loadtest.server_url import without_credentials
from shared.errors import ConfigError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # as shells have it for SIGINT
FLAGS_WITH_SECRETS = ("--header", "--api-key")
FLAGS_WITH_MANY_VALUES = ("--goodput", "--header", "--metadata")


@dataclass(frozen=True, slots=True)
class RunningStack:
    base_url: str
    api_key: str


@dataclass(frozen=True, slots=True)
class StackStarter:
    """How `--start-stack` gets a server: a context in which one runs. Loadtest itself knows of none."""

    start: Callable[[], AbstractContextManager[RunningStack]]


class ManyValuesCommand(TyperCommand):
    """Takes `--goodput ttft:500 tpot:50`, as vLLM's command line is written, for a repeated flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread_values(args))


def register(bench: typer.Typer, starter: StackStarter | None = None) -> None:
    """Adds `serve` to a group of commands; with a starter, `--start-stack` works."""
    bench.command("serve", cls=ManyValuesCommand, context_settings={"obj": starter})(serve)


def serve(
    ctx: typer.Context,
    backend: Annotated[str, typer.Option(help="openai (completions) or openai-chat.")] = "openai",
    base_url: Annotated[str | None, typer.Option(help="Instead of --host and --port.")] = None,
    host: str = "127.0.0.1",
    port: int = 8080,
    endpoint: Annotated[str | None, typer.Option(help="Path; default: that of the backend.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first that /v1/models lists.")] = None,
    label: Annotated[str | None, typer.Option(help="Beginning of the file name.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", show_default=False)] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE ...")] = None,
    dataset_name: Annotated[
        str,
        typer.Option(
            help="random, custom, sharegpt, prefix_repetition, txt-slices; traces: timed_trace (Mooncake), "
            "azure, burstgpt, usage (headrace usage --rows), otel (spans)."
        ),
    ] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="File of the data set; sharegpt: default from a package.")
    ] = None,
    custom_output_len: int = 256,
    sharegpt_output_len: Annotated[int | None, typer.Option(help="Default: as long as in the file.")] = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="Default 1000; all of a trace; in a sweep 6 to 64.")
    ] = None,
    random_input_len: int = 1024,
    random_output_len: int = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths vary by this share.")] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(help="Tokens shared by all prompts, on top.")] = 0,
    random_vocab_size: int = 30_000,
    random_input_cv: Annotated[
        float | None, typer.Option(help="Lognormal lengths with this coefficient of variation.")
    ] = None,
    random_output_cv: Annotated[float | None, typer.Option(help="The same for answers.")] = None,
    random_num_turns: Annotated[int, typer.Option(help="Above 1: conversations of so many turns.")] = 1,
    max_input_len: Annotated[int | None, typer.Option(help="Of random lengths and traces.")] = None,
    max_output_len: int | None = None,
    prefix_repetition_prefix_len: int = 256,
    prefix_repetition_suffix_len: int = 256,
    prefix_repetition_num_prefixes: int = 10,
    prefix_repetition_output_len: int = 128,
    multi_turn: Annotated[bool, typer.Option(help="sharegpt: whole conversations, turn by turn.")] = False,
    max_turns: int = 10,
    think_time_s: Annotated[float, typer.Option(help="Mean time between an answer and the next turn.")] = 0.0,
    disable_shuffle: bool = False,
    no_oversample: Annotated[bool, typer.Option(help="custom: never a line twice.")] = False,
    nonce_prefix: Annotated[
        bool, typer.Option(help="A few words of this run before every text: no cache of earlier runs helps.")
    ] = False,
    prefix_hit_share: Annotated[
        float | None, typer.Option(help="Of prompt tokens in the server's cache; checked. Default: planted.")
    ] = None,
    tenants: Annotated[
        Path | None, typer.Option(help="TOML with tables `tenants`: name, weight, api_key, model.")
    ] = None,
    self_timed: Annotated[
        bool | None, typer.Option("--self-timed/--no-self-timed", help="Times of the trace.")
    ] = None,
    trace_time_scale: Annotated[float, typer.Option(help="0.5 replays twice as fast.")] = 1.0,
    trace_start_s: float = 0.0,
    timed_trace_sec_multiplier: float = 0.001,
    timed_trace_chunk_hash_size: int = 512,
    timed_trace_label_timestamp: str = "timestamp",
    timed_trace_label_input_length: str = "input_length",
    timed_trace_label_output_length: str = "output_length",
    timed_trace_label_hash_ids: str = "hash_ids",
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos/--no-ignore-eos", help="Default: for synthetic prompts.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the server's.")] = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    logprobs: int | None = None,
    extra_body: Annotated[str | None, typer.Option(metavar="JSON", help="More fields of the body.")] = None,
    streaming: Annotated[bool, typer.Option(help="Ask for streams, or for answers in one piece.")] = True,
    continuous_usage: Annotated[bool, typer.Option(help="Ask for token counts in every chunk.")] = False,
    request_id_prefix: Annotated[str | None, typer.Option(help="Of x-request-id.")] = None,
    trace_sample_share: Annotated[
        float, typer.Option(help="Of requests whose traceparent asks for a trace; all have an id.")
    ] = 0.01,
    insecure: Annotated[bool, typer.Option(help="Do not verify the server's certificate.")] = False,
    seed: int = 0,
    nonce: Annotated[int | None, typer.Option(help="Repeats the prompts of an earlier run.")] = None,
    max_concurrency: int | None = None,
    concurrency_sweep: Annotated[str, typer.Option(help="Runs one after another, e.g. 1,8,32.")] = "",
    request_rate: Annotated[float, typer.Option(help="Requests per second; inf: no schedule.")] = float(
        "inf"
    ),
    burstiness: Annotated[float, typer.Option(help="Shape of the gamma gaps; 1: Poisson.")] = 1.0,
    duration: Annotated[
        float | None, typer.Option(help="Seconds in which requests are due, instead of --num-prompts.")
    ] = None,
    ramp_up_strategy: Annotated[str | None, typer.Option(help="linear or exponential.")] = None,
    ramp_up_start_rps: float | None = None,
    ramp_up_end_rps: float | None = None,
    num_warmups: int = 0,
    num_workers: Annotated[int, typer.Option(help="Processes that make the load.")] = 1,
    ready_check_timeout_sec: Annotated[float, typer.Option(help="Wait so long for the server.")] = 0.0,
    scrape_metrics: Annotated[bool, typer.Option(help="Read the server's /metrics every second.")] = True,
    metrics_url: Annotated[str | None, typer.Option(help="Default: /metrics of the server.")] = None,
    request_timeout_s: float = 6 * 3600.0,
    percentile_metrics: str = "ttft,tpot,itl",
    metric_percentiles: str = "99",
    goodput: Annotated[list[str] | None, typer.Option(metavar="METRIC:MS ...")] = None,
    save_result: bool = False,
    save_detailed: bool = False,
    append_result: bool = False,
    result_dir: Path | None = None,
    result_filename: str | None = None,
    metadata: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE ...")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Recorded only: the server counts tokens.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Sent as `model`.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Accepted; no code is loaded.")] = False,
    skip_chat_template: Annotated[bool, typer.Option(help="Accepted; the client applies none.")] = False,
    disable_tqdm: Annotated[bool, typer.Option(help="Accepted; there is no progress bar.")] = False,
    start_stack: Annotated[bool, typer.Option(help="Start the stack, measure it, stop it.")] = False,
) -> None:
    """Measure a server's latency and throughput; flags and result file as `vllm bench serve`."""
    try:
        options = options_from_flags(ctx.params)
        raise typer.Exit(_run(options, _starter_of(ctx) if start_stack else None))
    except ConfigError as error:
        where = f"{error.param}: " if error.param else ""
        typer.echo(f"error: {where}{error.message}", err=True)
        raise typer.Exit(EXIT_USAGE) from error
    except KeyboardInterrupt as error:  # outside a run, which tells more
        typer.echo("interrupted: no load was under way", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from error


def options_from_flags(flags: Mapping[str, Any]) -> BenchServeOptions:
    """Flags as typer hands them over, lists and pairs taken apart. Raises ConfigError."""
    parsed = {
        "headers": pairs(flags["header"], "=", "--header"),
        "metadata": pairs(flags["metadata"], "=", "--metadata"),
        "goodput_ms": {
            name: number(value, "--goodput")
            for name, value in pairs(flags["goodput"], ":", "--goodput").items()
        },
        "percentile_metrics": tuple(listed(flags["percentile_metrics"])),
        "metric_percentiles": tuple(
            number(value, "--metric-percentiles") for value in listed(flags["metric_percentiles"])
        ),
        "concurrency_sweep": tuple(
            whole(value, "--concurrency-sweep") for value in listed(flags["concurrency_sweep"])
        ),
        "command_line": recorded_command_line(sys.argv),
        "extra_body": json_object(flags["extra_body"], "--extra-body"),
        "duration_s": flags["duration"],
        "ready_check_timeout_s": flags["ready_check_timeout_sec"],
        "scrapes_metrics": flags["scrape_metrics"],
    }
    names = {f.name for f in dataclasses.fields(BenchServeOptions)}
    as_given = {name: value for name, value in flags.items() if name in names}
    return BenchServeOptions(**{**as_given, **parsed})


def recorded_command_line(argv: Sequence[str]) -> str:
    """The command with the values of secret flags struck out, and the passwords of URLs."""
    shown = [Path(argv[0]).name]
    is_secret = False
    for argument in argv[1:]:
        if argument.startswith("--"):
            flag, equals, _ = argument.partition("=")
            is_secret = flag in FLAGS_WITH_SECRETS
            shown.append(f"{flag}=***" if is_secret and equals else without_credentials(argument))
        else:
            shown.append("***" if is_secret else without_credentials(argument))
    return shlex.join(shown)


def spread_values(args: Sequence[str]) -> list[str]:
    """`--flag a b` -> `--flag a --flag b` for flags that take many values."""
    spread: list[str] = []
    flag: str | None = None
    num_values = 0
    for argument in args:
        if argument.startswith("--"):
            flag, num_values = (argument if argument in FLAGS_WITH_MANY_VALUES else None), 0
        elif flag is not None:
            if num_values > 0:
                spread.append(flag)
            num_values += 1
        spread.append(argument)
    return spread


def pairs(items: Sequence[str] | None, separator: str, flag: str) -> dict[str, str]:
    taken_apart = {}
    for item in items or ():
        name, found, value = item.partition(separator)
        if not found or not name.strip():
            raise ConfigError(f"{item!r} is not of the form NAME{separator}VALUE", flag)
        taken_apart[name.strip()] = value.strip()
    return taken_apart


def json_object(text: str | None, flag: str) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}", flag) from error
    if not isinstance(found, dict):
        raise ConfigError("must be a JSON object", flag)
    return found


def listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def number(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a number", flag) from error


def whole(text: str, flag: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a whole number", flag) from error


def _starter_of(ctx: typer.Context) -> StackStarter:
    if not isinstance(ctx.obj, StackStarter):
        raise ConfigError("this installation cannot start a stack; give --base-url", "--start-stack")
    return ctx.obj


def _run(options: BenchServeOptions, starter: StackStarter | None) -> int:
    # Here and not above: aiohttp and numpy take a third of a second that `--help` need not wait for.
    from loadtest.serve import run_bench_serve

    if starter is None:
        return run_bench_serve(options)
    options.check()  # before a stack is started for nothing
    with contextlib.ExitStack() as running:
        stack = running.enter_context(starter.start())
        here = dataclasses.replace(options, base_url=stack.base_url, api_key=stack.api_key)
        return run_bench_serve(here)
