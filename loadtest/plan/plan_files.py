"""The files of a plan: capacity.json, alert rules, and what scales the engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.plan.alert_rules import Timing, alert_rules, rules_document
from loadtest.plan.autoscaler import adapter_document, check_deployment, hpa_document, keda_document
from loadtest.plan.plan import CapacityPlan
from loadtest.plan.thresholds import thresholds_of
from shared.errors import ConfigError

FORMAT_VERSION = 1


def capacity_document(plan: CapacityPlan) -> dict[str, Any]:
    """All of a plan; capacities and rates in requests/s, of one replica unless the name says otherwise."""
    import msgspec  # local: see command.py

    measured, target = plan.measurement, plan.target
    limits = thresholds_of(measured)
    builtins: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "kind": "capacity",
        "replicas": plan.num_replicas,
        "needed": plan.num_needed,
        "spare": plan.num_spare,
        "binding": plan.binding,
        "survives_the_loss_of_one": plan.survives_loss,
        "rate_per_replica": plan.rate_per_replica,
        "utilisation": plan.utilisation,
        "target": target,
        "headroom": {
            "asked": plan.headroom.asked,
            "needed": plan.headroom.needed,
            "used": plan.headroom.used,
        },
        "capacity": measured.capacity,
        "pooling_efficiency": {
            "of_two": plan.pooling.of_two,
            "measured": plan.pooling_estimate is not None,
            "estimate": plan.pooling_estimate,
        },
        "sizings": list(plan.sizings),
        "sensitivity": list(plan.sensitivities),
        "gateway": plan.gateway,
        "cost": plan.cost,
        "thresholds": limits,
        "measurement": {
            "tier": measured.tier.name,
            "slo": measured.tier.slo,
            "arrival_cv": measured.tier.arrival_cv,
            "status": measured.tier.status,
            "validated": measured.tier.validated,
            "url": measured.result.url,
            "model": measured.result.model,
            "commit": measured.result.commit,
            "started_at": measured.result.started_at,
        },
        "warnings": list(plan.warnings),
    }
    return {"headrace": msgspec.to_builtins(builtins)}


def write_plan_files(
    plan: CapacityPlan,
    folder: Path,
    *,
    model: str | None = None,
    timing: Timing | None = None,
    deployment: str = "headrace-engine",
    prometheus_url: str = "http://prometheus:9090",
    kept: Sequence[Path] = (),
) -> tuple[list[Path], list[str]]:
    """What was written, and remarks on what could not be. Raises ConfigError with the flag.

    `kept`: measurements, which are not to be written over.
    """
    import msgspec  # local: see command.py

    check_deployment(deployment)
    limits = thresholds_of(plan.measurement)
    rules, remarks = alert_rules(limits, model, timing)
    capacity = msgspec.json.format(msgspec.json.encode(capacity_document(plan)))
    origin = f"Made by `headrace plan` from a measurement of {plan.measurement.result.started_at}."
    files = {
        "capacity.json": capacity.decode() + "\n",
        "headrace-alerts.yml": yaml_text([rules_document(rules)], origin),
    }
    keda = keda_document(plan, limits, model, deployment=deployment, prometheus_url=prometheus_url)
    hpa = hpa_document(plan, limits, deployment=deployment)
    if keda is None or hpa is None:
        remarks.append(
            "no ScaledObject and no HorizontalPodAutoscaler: there is nothing to read a threshold from"
        )
    else:
        files["keda-scaledobject.yml"] = yaml_text([keda], origin)
        files["hpa.yml"] = yaml_text([hpa], f"{origin} Needs the rule in prometheus-adapter-values.yml.")
        files["prometheus-adapter-values.yml"] = yaml_text([adapter_document(model)], origin)
    for name in files:
        if (folder / name).resolve() in {path.resolve() for path in kept}:
            raise ConfigError(f"{folder / name} is a measurement and would be written over", "--output-dir")
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            paths.append(folder / name)
            paths[-1].write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}", "--output-dir") from error
    return paths, remarks


def yaml_text(documents: Sequence[Any], remark: str) -> str:
    import yaml  # local: see command.py

    text: str = yaml.safe_dump_all(documents, sort_keys=False, width=1000, allow_unicode=True)
    # A line feed in what a file said would end the comment.
    shown = "".join(letter if letter.isprintable() else " " for letter in remark)
    return f"# {shown}\n{text}"
