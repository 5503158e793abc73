"""The command line of `headrace plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_FOLDER = Path("headrace-plan")


def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Of `headrace knee --json`, for one replica.")],
    target_rps: Annotated[float, typer.Option("--target-rps", metavar="R", help="Requests/s in the peak.")],
    headroom: Annotated[
        float, typer.Option("--headroom", metavar="SHARE", help="Of the capacity, left free.")
    ] = 0.2,
    spare: Annotated[
        int | None,
        typer.Option(
            "--spare", metavar="N", min=0, help="Replicas more. Default: 1 where several are needed."
        ),
    ] = None,
    tier: Annotated[
        str | None, typer.Option("--tier", help="The promise to keep. Default: the first one.")
    ] = None,
    cv: Annotated[
        float | None, typer.Option("--cv", help="Of the gaps between arrivals; must have been measured.")
    ] = None,
    replica_start: Annotated[
        str | None,
        typer.Option("--replica-start", metavar="TIME", help="From its start to its first token, like 30s."),
    ] = None,
    growth_per_s: Annotated[
        float,
        typer.Option(
            "--growth-per-s", metavar="R", min=0.0, help="By how many requests/s the load grows, each second."
        ),
    ] = 0.0,
    prompt_tokens: Annotated[
        float | None,
        typer.Option("--prompt-tokens", metavar="N", min=1, help="Mean of a request. Default: as measured."),
    ] = None,
    output_tokens: Annotated[
        float | None,
        typer.Option("--output-tokens", metavar="N", min=1, help="Mean of a request. Default: as measured."),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            "--kv-tokens",
            metavar="N",
            min=1,
            help="That a replica's KV cache holds, if the server does not tell its use.",
        ),
    ] = None,
    two_replicas: Annotated[
        Path | None, typer.Option("--two-replicas", metavar="FILE", help="The same search over two replicas.")
    ] = None,
    gateway_knee: Annotated[
        Path | None,
        typer.Option("--gateway-knee", metavar="FILE", help="A search of one gateway before a simulator."),
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option("--price-per-hour", metavar="P", min=0.0, help="Of one replica.")
    ] = None,
    output_dir: Annotated[
        Path,
        typer.Option(
            "--output-dir", metavar="FOLDER", help="For capacity.json, alert rules and autoscalers."
        ),
    ] = DEFAULT_FOLDER,
    model_name: Annotated[
        str | None,
        typer.Option(
            "--model-name", help="Label of the metrics in the rules. Default: each model by itself."
        ),
    ] = None,
    deployment: Annotated[
        str, typer.Option("--deployment", help="Of the engines, in Kubernetes.")
    ] = "headrace-engine",
    prometheus_url: Annotated[
        str, typer.Option("--prometheus-url", help="As KEDA reaches it.")
    ] = "http://prometheus:9090",
    alert_window: Annotated[
        str, typer.Option("--alert-window", metavar="TIME", help="Of means and rates.")
    ] = "5m",
    alert_for: Annotated[
        str, typer.Option("--alert-for", metavar="TIME", help="How long before an alarm.")
    ] = "2m",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print capacity.json instead of the table.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Plan even with a measurement that is not valid.")
    ] = False,
) -> None:
    """How many replicas a load needs, from a measured knee; with alarms and autoscalers to go with them."""
    # Local: numpy would slow down every `headrace --help`.
    import msgspec

    from loadtest.plan.alert_rules import timing_of
    from loadtest.plan.autoscaler import check_deployment
    from loadtest.plan.plan import Target, make_plan
    from loadtest.plan.plan_files import capacity_document, write_plan_files
    from loadtest.plan.plan_table import plan_text
    from loadtest.plan.sources import read_measurement, read_other_cvs
    from loadtest.plan.time_span import parse_time_span

    check_deployment(deployment)
    warnings: list[str] = []
    measured = read_measurement(file, tier, cv, force=force, warnings=warnings)
    two = gateway = None
    if two_replicas is not None:
        two = read_measurement(
            two_replicas,
            measured.tier.name,
            measured.tier.arrival_cv,
            force=force,
            warnings=warnings,
            like=measured,
        )
    if gateway_knee is not None:
        gateway = read_measurement(gateway_knee, None, None, force=force, warnings=warnings)
    target = Target(
        rate=target_rps,
        headroom=headroom,
        spare=spare,
        growth_per_s=growth_per_s,
        replica_start_s=0.0 if replica_start is None else parse_time_span(replica_start, "--replica-start"),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        kv_tokens=kv_tokens,
        price_per_hour=price_per_hour,
    )
    timing = timing_of(
        parse_time_span(alert_window, "--alert-window"), parse_time_span(alert_for, "--alert-for")
    )
    made = make_plan(
        target,
        measured,
        two_replicas=two,
        gateway=gateway,
        other_cvs=read_other_cvs(measured),
        warnings=warnings,
    )
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(capacity_document(made))))
    else:
        typer.echo(plan_text(made))
    paths, remarks = write_plan_files(
        made,
        output_dir,
        model=model_name,
        timing=timing,
        deployment=deployment,
        prometheus_url=prometheus_url,
        kept=[path for path in (file, two_replicas, gateway_knee) if path is not None],
    )
    for line in (*remarks, *(f"written: {path}" for path in paths)):
        typer.echo(line, err=True)
