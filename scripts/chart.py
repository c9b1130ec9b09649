"""Render the Helm chart with Helm's own engine, and check it against Kubernetes' schemas: `make test-deploy`.

It runs in an environment of its own (requirements/deploy.lock), so it imports nothing of Baton.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml

CHART = Path("deploy/helm")
KUBERNETES = ("1.27", "1.31", "1.34")
OPERATOR = "monitoring.coreos.com/v1"  # the Prometheus operator's kinds, of which no schema is at hand
LEAST: dict[str, Any] = {"secrets": {"existing": "mine"}}
MOST: dict[str, Any] = {
    "secrets": {"values": {"DATABASE_URL": "postgresql://db/baton", "REDIS_URL": "redis://r:6379/0", "PEPPER": "00"}},
    "autoscaling": {"enabled": True},
    "pool": "workers: []\n",
    "settings": {"BATON_LOG_FORMAT": "json", "BATON_PROCESSES": 2},
    "policies": {"claim": "shared"},
    "ingress": {"enabled": True, "host": "baton.example", "tlsSecret": "tls", "className": "nginx"},
    "monitoring": {"serviceMonitor": True, "rules": True},
    "worker": {"enabled": True, "gpus": 1},
    "vllm": {"enabled": True},
}
REFUSED: Mapping[str, dict[str, Any]] = {
    "no secret": {},
    "vLLM without shared policies": LEAST | {"vllm": {"enabled": True}},
    "no gateway": LEAST | {"replicas": 0},
    "an unknown value": LEAST | {"replica": 2},
    "a setting that is none": LEAST | {"settings": {"PATH": "/"}},
}
LEAST_KINDS = {"StatefulSet", "Service", "PodDisruptionBudget", "Job"}
MOST_KINDS = LEAST_KINDS | {
    *("Secret", "ConfigMap", "HorizontalPodAutoscaler", "Ingress", "ServiceMonitor", "PrometheusRule"),
    *("Deployment", "PersistentVolumeClaim", "NetworkPolicy"),
}


def manifests(chart: helm_python.Chart, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects that an install with these values makes."""
    texts = chart.render(values, name="demo", namespace="prod").values()
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def check(objects: list[dict[str, Any]], kinds: set[str]) -> None:
    """Raises AssertionError for other kinds, and a ValidationError for what a Kubernetes would refuse."""
    if (rendered := {one["kind"] for one in objects}) != kinds:
        raise AssertionError(f"kinds: {sorted(rendered)}")
    for version in KUBERNETES:
        for one in objects:
            if one["apiVersion"] != OPERATOR:
                kubernetes_validate.validate(one, version, strict=True)


def main() -> int:
    """Check all of it; print a line for each thing that holds."""
    with helm_python.Chart.load(str(CHART)) as chart:
        for name, values, kinds in (("least", LEAST, LEAST_KINDS), ("most", MOST, MOST_KINDS)):
            chart.validate_schema(values)
            objects = manifests(chart, values)
            check(objects, kinds)
            print(f"ok {name}: {len(objects)} objects, valid for Kubernetes {', '.join(KUBERNETES)}")
        for name, values in REFUSED.items():
            try:
                chart.validate_schema(values)
            except helm_python.HelmError:
                print(f"ok refused: {name}")
            else:
                raise AssertionError(f"values.schema.json allows {name}")
    print(f"{len(REFUSED) + 2} passed, 0 failed (Helm {helm_python.helm_sdk_version()})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
