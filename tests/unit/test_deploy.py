"""What is deployed: the chart's values, the unit of systemd, the image's health check, and `baton migrate`.

`make test-deploy` renders the chart with Helm's own engine; here is what needs no Helm.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema.validators import validator_for

from gateway import __version__, cli
from gateway.config.settings import Settings, variable

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm"


def values(**changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load((CHART / "values.yaml").read_text()), **changes}


def problems(document: dict[str, Any]) -> list[str]:
    schema = json.loads((CHART / "values.schema.json").read_text())
    validator = validator_for(schema)
    validator.check_schema(schema)
    return [error.message for error in validator(schema).iter_errors(document)]


def test_the_values_need_a_secret_and_nothing_else() -> None:
    assert problems(values(secrets={"existing": "mine", "values": {}})) == []
    assert problems(values()) != []


def test_each_value_has_a_type() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def walk(value: Any, kind: dict[str, Any], path: str) -> None:
        if "$ref" in kind:
            return
        for name, inner in value.items() if isinstance(value, dict) and "properties" in kind else ():
            assert name in kind["properties"], f"{path}.{name}"
            walk(inner, kind["properties"][name], f"{path}.{name}")

    walk(values(), schema, "")


def test_the_chart_is_of_this_version_and_uses_the_files_of_deploy() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    compose = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())
    image = values()["vllm"]["image"]
    assert compose["services"]["vllm"]["image"] == f"{image['repository']}:{image['tag']}"
    for name, source in (("vllm.sh", DEPLOY / "vllm.sh"), ("alerts.yaml", DEPLOY / "prometheus" / "alerts.yaml")):
        assert (CHART / "files" / name).read_text() == source.read_text(), "one command line, one list: `make docs`"


def test_every_setting_of_the_chart_and_of_the_unit_exists() -> None:
    texts = [path.read_text() for path in (*(CHART / "templates").iterdir(), DEPLOY / "systemd" / "baton.service")]
    named = {name for text in texts for name in re.findall(r"\bBATON_[A-Z_]+\b", text)}
    assert named
    assert named <= {variable(name) for name in Settings.model_fields}


def test_an_outage_of_redis_restarts_no_container() -> None:
    assert "/livez" in re.findall(r"HEALTHCHECK.*?CMD.*?\n", (DEPLOY.parent / "Dockerfile").read_text(), re.DOTALL)[0]
    gateway = (CHART / "templates" / "gateway.yaml").read_text()
    probes = dict(re.findall(r"(\w+)Probe:.*?\n\s+httpGet: {path: (\S+),", gateway))
    assert probes == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze on PATH (apt-get install systemd)")
    text = (DEPLOY / "systemd" / "baton.service").read_text()
    unit = tmp_path / "baton.service"  # its program and user are not here
    unit.write_text(re.sub(r"(User|Group)=baton", r"\1=root", text.replace("/opt/baton/bin/baton", "/bin/true")))
    done = subprocess.run([program, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_migrate_makes_the_schema_and_ends(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    assert cli.main(["migrate"]) == 0
    assert re.fullmatch(r"ok postgres   schema \d{4}\n", capsys.readouterr().out)
    monkeypatch.delenv("DATABASE_URL")
    assert cli.main(["migrate"]) == 2
