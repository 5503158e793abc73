"""What scales engines by the measured capacity: a ScaledObject for KEDA, or a HorizontalPodAutoscaler."""

from __future__ import annotations

import re
from typing import Any

from loadtest.plan.alert_rules import in_flight_expression
from loadtest.plan.plan import CapacityPlan
from loadtest.plan.thresholds import Thresholds
from shared.errors import ConfigError

POLL_S = 15
CALM_S = 300  # before replicas are taken away
MAX_NAME_LENGTH = 253
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
EXTERNAL_METRIC = "headrace_requests_in_flight_of_engines"


def check_deployment(name: str) -> None:
    """Raises ConfigError for what Kubernetes takes for no name: those of deployments are DNS subdomains."""
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name of Kubernetes: small letters, digits, '-' and '.', with a letter or "
            f"a digit at both ends of each part, {MAX_NAME_LENGTH} at most",
            "--deployment",
        )


def keda_document(
    plan: CapacityPlan, limits: Thresholds, model: str | None, *, deployment: str, prometheus_url: str
) -> dict[str, Any] | None:
    """None without a threshold. KEDA divides the query's value by it and rounds up: that many replicas."""
    if limits.in_flight is None:
        return None
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": deployment},
        "spec": {
            "scaleTargetRef": {"name": deployment},
            "minReplicaCount": least_replicas(plan),
            "maxReplicaCount": plan.num_replicas,
            "pollingInterval": POLL_S,
            "cooldownPeriod": CALM_S,
            "triggers": [
                {
                    "type": "prometheus",
                    "metadata": {
                        "serverAddress": prometheus_url,
                        "query": f"sum({in_flight_expression(model)})",
                        "threshold": f"{limits.in_flight:.4g}",
                    },
                }
            ],
        },
    }


def hpa_document(plan: CapacityPlan, limits: Thresholds, *, deployment: str) -> dict[str, Any] | None:
    """For clusters with prometheus-adapter instead of KEDA; `adapter_document` gives the metric its name."""
    if limits.in_flight is None:
        return None
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": deployment},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment},
            "minReplicas": least_replicas(plan),
            "maxReplicas": plan.num_replicas,
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": CALM_S}},
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {"name": EXTERNAL_METRIC},
                        "target": {
                            "type": "AverageValue",
                            "averageValue": f"{round(1000 * limits.in_flight)}m",
                        },
                    },
                }
            ],
        },
    }


def adapter_document(model: str | None) -> dict[str, Any]:
    """The values of prometheus-adapter's chart that make the query an external metric."""
    return {
        "rules": {
            "external": [
                {
                    "seriesQuery": "vllm:num_requests_running",
                    "name": {"as": EXTERNAL_METRIC},
                    "resources": {"namespaced": False},
                    "metricsQuery": f"sum({in_flight_expression(model)})",
                }
            ]
        }
    }


def least_replicas(plan: CapacityPlan) -> int:
    """One may be lost in the night as well, where the plan says that one may be lost."""
    return min(2, plan.num_replicas)
