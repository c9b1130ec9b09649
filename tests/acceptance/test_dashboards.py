"""Every panel's query returns data on a Prometheus that scraped a gateway under load; each alert fires on its fault."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import yaml

from scripts import dashboards
from scripts.panels import PANELS, queries
from tests.acceptance.test_serve import Gateway, serving
from tests.prometheus_server import RULES, Prometheus, program, scraping
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = ROOT / "docs" / "alerts.md"
PATIENCE_S = 240.0
WINDOW = "15s"


@pytest.fixture(scope="module")
def watched() -> Iterator[tuple[Gateway, Prometheus]]:
    program("prometheus")
    with tempfile.TemporaryDirectory(prefix="baton-watched-", ignore_cleanup_errors=True) as name:
        place = Path(name)  # not pytest's own directory, which PostgreSQL's user may not enter
        with serving(place / "data", write_tiny_model(place / "model")) as gateway:
            target = gateway.facts["admin_url"].removeprefix("http://")
            with scraping(place, target) as server:
                yield gateway, server


class Load:
    """Requests of every kind that a panel shows: answered, streamed, judged, and refused."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        facts = gateway.facts
        admin = {"authorization": f"Bearer {facts['admin_key']}"}
        body = {"name": "slow", "rpm": 1, "budget_usd": "5"}
        made = httpx.post(f"{facts['admin_url']}/admin/keys", json=body, headers=admin, timeout=60)
        self._slow_key = made.json()["key"]
        self._http = httpx.Client(
            base_url=facts["base_url"], headers={"authorization": f"Bearer {facts['data_key']}"}, timeout=120
        )

    def close(self) -> None:
        self._http.close()

    def send(self) -> None:
        for model in ("baton", "baton/rule", "baton/vote"):
            answered = self._gateway.ask(model=model)
            rollout = answered.headers.get("x-baton-rollout-id")
            if answered.status_code == 200:
                self._http.post("/outcomes", json={"rollout_id": rollout, "value": 1.0})
        self._gateway.ask(stream=True)
        self._gateway.ask(key="bt_data_wrong")
        self._gateway.ask(model="nobody")
        self._gateway.ask(key=self._slow_key)
        self._http.get("/nowhere")


def test_every_panel_has_data(watched: tuple[Gateway, Prometheus]) -> None:
    gateway, server = watched
    without, end_s = set(queries()), time.monotonic() + PATIENCE_S
    with closing(Load(gateway)) as load:
        while without and time.monotonic() < end_s:
            load.send()
            without = {each for each in without if not server.query(each[2].replace("$__rate_interval", WINDOW))}
    assert sorted(f"{board} · {panel}: {query}" for board, panel, query in without) == []
    assert server.query("sum(baton:worker_share)")[0][1] == pytest.approx(1.0)
    spent = server.query("sum(baton_cost_usd_total)")[0][1]
    assert spent > 0


def test_labels_are_bounded_and_hold_no_key(watched: tuple[Gateway, Prometheus]) -> None:
    gateway, _ = watched
    text = httpx.get(f"{gateway.facts['admin_url']}/metrics").text
    assert gateway.facts["data_key"].split("_")[2] not in text
    labels = set(re.findall(r'[{,](\w+)="', text))
    assert labels <= {
        *("policy", "status", "worker", "reason", "cap", "part", "kind", "what", "version", "plan", "state", "cause"),
        *("result", "by", "hash", "route", "code", "planner", "depth", "outcome", "le", "python"),
    }


@pytest.mark.parametrize("title", PANELS)
def test_the_files_are_those_of_the_script(title: str) -> None:
    path = dashboards.PLACE / f"{dashboards.file_name(title)}.json"
    assert path.read_text(encoding="utf-8") == dashboards.render(title), "run `make docs`"
    board = json.loads(path.read_text(encoding="utf-8"))
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places) == len(PANELS[title])


def test_alerts_fire_on_their_faults_and_not_before() -> None:
    tool = program("promtool")
    for words in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run([tool, *words], cwd=RULES, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_test_and_its_page() -> None:
    groups = yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    alerts = {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}
    cases = yaml.safe_load((RULES / "alerts_test.yaml").read_text())["tests"]
    for name in alerts:
        (case,) = [case for case in cases if case["name"] == name]
        quiet, loud = case["alert_rule_test"]
        assert (quiet["exp_alerts"], bool(loud["exp_alerts"])) == ([], True)
    sections = re.findall(r"^## (\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    assert sections == list(alerts)
    pages = {rule["annotations"]["runbook_url"] for rule in alerts.values()}
    assert pages == {f"docs/alerts.md#{name.lower()}" for name in alerts}


def test_alerts_and_panels_name_series_that_exist() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    text = (RULES / "alerts.yaml").read_text() + " ".join(query for _, _, query in queries())
    named = set(re.findall(r"\bbaton_\w+", text))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) if name not in known else name for name in named} <= known
