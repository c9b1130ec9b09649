"""The console at work: an operator searches, watches and steers; an auditor reads; every page by keyboard and axe."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from gateway.adapters.postgres import admin_tables, tables
from gateway.core.log.events import uuid7
from tests.acceptance.conftest import CHILD_ID, HOSTILE, HOSTILE_ID, IN_A_BROWSER, count, database
from tests.acceptance.test_serve import Gateway
from tests.browser import Page
from tests.records import T0_US
from tests.tiny_model import write_tiny_model

pytestmark = IN_A_BROWSER
REPORT = {
    "passed": False,
    "forced": True,
    "parts": [
        {
            "name": "held-out",
            "checks": [{"name": "questions", "verdict": "refused", "figure": "9", "threshold": "100", "todo": HOSTILE}],
            "facts": {
                "task_kinds": {
                    HOSTILE: {"n": 9, "accuracy": 0.5, "usd_per_1k": 1.5, "gains": {"live": [0.1, -0.1, 0.3]}},
                },
            },
        }
    ],
}
AXE = Path(__file__).parent / "node"
PAGES = (
    *("#/", "#/rollouts", f"#/rollouts/{HOSTILE_ID}", f"#/compare/{HOSTILE_ID}/{CHILD_ID}"),
    *("#/policies", "#/policies/conductor@0", "#/jobs", "#/workers", "#/money", "#/audit", "#/playground"),
)
PAGE_NAMES = [where.replace(HOSTILE_ID, "hostile").replace(CHILD_ID, "child") for where in PAGES]  # in every process
LOADED = "!document.querySelector('main').hasAttribute('aria-busy') && !!document.querySelector('main h1')"


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, installed by its lock."""
    if shutil.which("npm") is None:
        pytest.skip("no npm on PATH (apt-get install npm)")
    place = shutil.copytree(AXE, tmp_path_factory.mktemp("axe") / "node")
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    made = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120)
    if made.returncode:
        pytest.skip(f"axe-core does not install: {made.stderr.strip().splitlines()[-1:]}")
    return (place / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")


def admin(gateway: Gateway, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {gateway.facts['admin_key']}"}
    return httpx.request(method, f"{gateway.facts['admin_url']}/admin/{path}", headers=headers, timeout=60, **more)


def show(page: Page, where: str) -> None:
    page.js(f"location.hash = {json.dumps(where)}")
    page.until(LOADED)


def press(page: Page, text: str) -> None:
    """Press the button with that text."""
    page.until(f"[...document.querySelectorAll('button')].some((one) => one.innerText === {json.dumps(text)})")
    page.js(f"[...document.querySelectorAll('button')].find((one) => one.innerText === {json.dumps(text)}).click()")


def press_in_dialog(page: Page) -> None:
    """Press the button that the dialog asks about."""
    page.until("!!document.querySelector('dialog[open] button[type=submit]:not(:disabled)')")
    page.js("document.querySelector('dialog[open] button[type=submit]').click()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("where", PAGES, ids=PAGE_NAMES)
def test_axe_finds_nothing_to_complain_about(page: Page, axe: str, where: str, scheme: str) -> None:
    page.looks(1280, 800, scheme)
    show(page, where)
    page.js(axe + "; 0")  # evaluated by the browser itself: the page's policy does not let it in
    found = page.js("axe.run(document).then((report) => report.violations)")
    assert [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found] == []


@pytest.mark.parametrize("where", PAGES, ids=PAGE_NAMES)
def test_every_control_of_a_page_is_reached_by_tab(page: Page, where: str) -> None:
    show(page, where)
    wanted = page.js(
        "window.controls = [...document.querySelectorAll('a[href], button:not(:disabled), input:not(:disabled), select,"
        ' summary, [tabindex="0"]\')].filter((one) => one.checkVisibility()); controls.length'
    )
    page.js("document.activeElement.blur(); window.seen = new Set()")
    for _ in range(wanted + 5):
        page.key("Tab", 9)
        page.js("window.seen.add(document.activeElement); 0")
    assert page.js("controls.filter((one) => !seen.has(one)).map((one) => one.outerHTML.slice(0, 200))") == []


@pytest.mark.parametrize("where", PAGES, ids=PAGE_NAMES)
def test_no_page_shows_what_a_program_wrote_by_mistake(page: Page, where: str) -> None:
    show(page, where)
    assert re.findall(r"\[object \w+\]|\bundefined\b|\bNaN\b|Invalid Date", page.text()) == []


@pytest.mark.parametrize("where", PAGES, ids=PAGE_NAMES)
def test_on_a_telephone_nothing_is_wider_than_the_window(page: Page, where: str) -> None:
    page.looks(375, 700)
    show(page, where)
    page.until("document.documentElement.scrollWidth <= innerWidth", 10)  # the page was drawn for a wider window before
    assert page.complaints == []


def test_a_dialog_is_worked_with_the_keyboard_alone(page: Page) -> None:
    show(page, "#/money")
    opener = "[...document.querySelectorAll('button')].find((one) => one.innerText === 'Create a key')"
    page.js(f"{opener}.focus()")
    page.key("Enter", 13)
    page.until("!!document.querySelector('dialog[open]')")
    assert page.js("document.activeElement.name") == "name"
    seen = set()
    for _ in range(20):
        page.key("Tab", 9)
        seen.add(page.js("document.activeElement.closest('dialog') ? 'inside' : document.activeElement.tagName"))
    assert seen <= {"inside", "BODY"}, "what is behind the dialog has no focus"
    page.key("Escape", 27)
    page.until("!document.querySelector('dialog')")
    assert page.js(f"document.activeElement === {opener}")


def test_a_search_by_text_finds_the_request_and_shows_it_as_text(page: Page) -> None:
    show(page, "#/rollouts")
    page.js("document.querySelector('input[name=text]').focus()")
    page.write("<SCRIPT>document.title=")
    page.key("Enter", 13)
    page.until("location.hash.includes('text=') && document.querySelectorAll('tbody tr').length === 1")
    assert count(page, f'a[href="#/rollouts/{HOSTILE_ID}"]') == 1
    assert HOSTILE in page.text()
    assert count(page, "main script, main img, main b") == 0
    show(page, "#/rollouts?worker=nobody")
    page.until("document.querySelector('.empty')?.innerText.includes('Show all')")
    assert page.js("document.querySelector('details').open"), "what filters is shown"
    assert page.complaints == []


def test_the_list_follows_what_happens(page: Page, gateway: Gateway) -> None:
    show(page, "#/rollouts")
    before = count(page, "tbody tr")
    page.js("document.querySelector('input[name=tail]').click()")
    assert gateway.ask().status_code == 200
    page.until(f"document.querySelectorAll('tbody tr').length === {before + 1}")
    assert page.js("document.querySelector('[role=status]').innerText") == "1 new"


def test_two_requests_are_compared(page: Page, gateway: Gateway) -> None:
    assert gateway.ask().status_code == 200
    while len(admin(gateway, "GET", "rollouts").json()["data"]) < 2:
        page.js("new Promise((done) => setTimeout(done, 100))")
    show(page, "#/rollouts?since=2020-01-01T00:00:00.000Z")
    page.until("document.querySelectorAll('tbody tr').length >= 2")
    page.js("[...document.querySelectorAll('tbody input')].slice(0, 2).forEach((box) => box.click())")
    press(page, "Compare two")
    page.until("document.querySelector('main h1')?.innerText === 'Two rollouts'")
    assert count(page, "tr.differs") >= 1
    assert count(page, ".pair > .part") == 8


def test_an_export_is_what_the_filter_shows(page: Page, gateway: Gateway, tmp_path: Path) -> None:
    show(page, "#/rollouts?worker=beta")
    page.do("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    press(page, "Export JSONL")
    page.until("document.getElementById('error').innerText === ''")
    for _ in range(200):
        if list(tmp_path.glob("*.jsonl")):
            break
        page.js("new Promise((done) => setTimeout(done, 50))")
    (file,) = tmp_path.glob("*.jsonl")
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == [HOSTILE_ID]
    assert page.complaints == []


# ---------------------------------------------------------------- policies and jobs


def test_a_version_is_shadowed_from_the_page_and_the_audit_has_it(page: Page, gateway: Gateway) -> None:
    directory = write_tiny_model(gateway.directory.parent / "second", seed=1)
    facts = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(facts | {"version": "7"}))
    body = {"directory": str(directory), "force": True, "why": "a test", "gate": REPORT}
    made = admin(gateway, "POST", "policies", json=body)
    assert made.status_code == 201, made.text
    version = made.json()["version"]
    show(page, "#/policies")
    page.until(f"document.querySelector('main').innerText.includes({json.dumps(version)})")
    press(page, "Shadow")
    page.until("!!document.querySelector('dialog[open]')")
    assert version in page.js("document.querySelector('dialog h2').innerText")
    page.js("document.querySelector('dialog input[name=why]').focus()")
    page.write(HOSTILE)
    page.key("Enter", 13)
    page.until("!document.querySelector('dialog')")
    page.until(
        f"[...document.querySelectorAll('tbody tr')].some((row) => row.innerText.includes({json.dumps(version)})"
        " && row.innerText.includes('shadow'))"
    )
    events = admin(gateway, "GET", "policies").json()["events"]
    assert (events[0]["what"], events[0]["version"], events[0]["why"]) == ("shadowed", version, HOSTILE)
    assert admin(gateway, "GET", "audit").json()["data"][0]["why"] == HOSTILE
    assert count(page, "main script, main img") == 0
    show(page, f"#/policies/{version}")
    page.until("document.querySelector('main h2')?.innerText === 'Gate'")
    tables = page.js("[...document.querySelectorAll('caption')].map((one) => one.innerText)")
    assert tables[:2] == ["Checks: held-out", "By kind of task: gains with their 95 % intervals"]
    assert HOSTILE in page.text()
    assert count(page, "main script, main img") == 0
    assert page.complaints == []


def a_job(gateway: Gateway, state: str, **more: Any) -> str:
    """A job in the database, with the log of a trainer and a line that is an attack."""
    job_id, at = uuid7(T0_US // 1000 + 77), datetime(2026, 1, 1, 12, tzinfo=UTC)
    values = {"id": job_id, "policy": "other", "spec": {"train": {"env": "arena"}}, "by": "key:ops", "cancel": False}
    lines = [HOSTILE, *(f"step {n}/9 reward 0.{n}00 loss 0.1" for n in range(1, 6))]
    with database(gateway) as connection:
        row = values | {
            "state": state,
            "attempts": 1,
            "progress": {"step": 5, "steps": 9},
            "created_at": at,
            "changed_at": at,
        }
        connection.execute(admin_tables.policy_jobs.insert().values(**row | more))
        for line in lines:
            connection.execute(admin_tables.policy_job_lines.insert().values(job_id=job_id, at=at, line=line))
    return job_id


@pytest.fixture
def job(gateway: Gateway) -> Iterator[str]:
    yield a_job(gateway, "failed", error=HOSTILE)
    with database(gateway) as connection:
        connection.execute(admin_tables.policy_jobs.delete())


def test_a_job_has_its_curve_and_its_log_and_is_resumed_and_cancelled(page: Page, gateway: Gateway, job: str) -> None:
    show(page, f"#/jobs/{job}")
    page.until("!!document.querySelector('.reward polyline')")
    assert page.js("document.querySelector('.reward polyline').getAttribute('points').split(' ').length") == 5
    assert HOSTILE in page.js("document.querySelector('.log').innerText")
    assert count(page, "main script, main img") == 0
    press(page, "Resume")
    page.until("document.activeElement.closest('dialog') !== null")
    press_in_dialog(page)
    page.until("document.querySelector('main h1').innerText.includes('queued')")
    press(page, "Cancel")
    press_in_dialog(page)
    page.until("document.querySelector('main h1').innerText.includes('cancelled')")
    assert page.complaints == []


def test_a_job_is_submitted_from_the_filter_of_a_search(page: Page, gateway: Gateway) -> None:
    show(page, "#/rollouts?key=key1&tag=team%3Ablue&text=2%2B2")
    page.js("[...document.querySelectorAll('a')].find((one) => one.innerText === 'Train on these').click()")
    page.until("!!document.querySelector('dialog textarea')")
    shown = json.loads(page.js("document.querySelector('dialog textarea').value"))
    assert shown == {"keys": ["key1"], "tags": [["team", "blue"]]}
    assert "no such filter: text" in page.js("document.querySelector('dialog').innerText")
    page.js("document.querySelector('dialog input[name=policy]').value = 'another'")
    press_in_dialog(page)
    page.until("document.querySelector('dialog').innerText.includes('requests to train on: 0 of 200')")
    assert admin(gateway, "GET", "jobs").json()["data"] == [], "nobody has judged what the filter finds"
    page.js("document.querySelector('dialog select[name=env]').value = 'arena'")
    press_in_dialog(page)
    page.until("!document.querySelector('dialog') && location.hash === '#/jobs'")
    page.until("document.body.innerText.includes('of 200 requests to train on')")
    made = admin(gateway, "GET", "jobs").json()["data"][0]
    assert (made["policy"], made["spec"]["train"]["env"]) == ("another", "arena")
    admin(gateway, "POST", f"jobs/{made['id']}/cancel", json={})
    with database(gateway) as connection:
        connection.execute(admin_tables.policy_jobs.delete())


# ---------------------------------------------------------------- workers, money, audit, playground


def test_workers_have_prices_calls_and_success_by_kind(page: Page, gateway: Gateway) -> None:
    rollout = gateway.ask().headers["x-baton-rollout-id"]
    headers = {"authorization": f"Bearer {gateway.facts['data_key']}"}
    outcome = {"rollout_id": rollout, "value": True}
    reply = httpx.post(f"{gateway.facts['base_url']}/outcomes", json=outcome, headers=headers, timeout=60)
    assert reply.is_success, reply.text
    show(page, "#/workers")
    page.until("document.querySelectorAll('table').length >= 1")
    rows = page.js("[...document.querySelectorAll('tbody tr')].map((row) => row.innerText)")
    assert any("$" in row and "well" in row for row in rows)
    page.until("document.querySelector('main').innerText.includes('Success by kind of task')")
    assert page.complaints == []


def test_a_worker_is_put_in_quarantine_and_released(page: Page, gateway: Gateway) -> None:
    show(page, "#/workers")
    page.until("document.querySelector('main').innerText.includes('No worker is in quarantine')")
    press(page, "Quarantine")
    page.until("!!document.querySelector('dialog input[name=why]')")
    page.js("document.querySelector('dialog input[name=why]').focus()")
    page.write(HOSTILE[:100])
    press_in_dialog(page)
    page.until("[...document.querySelectorAll('main button')].some((one) => one.innerText === 'Release')")
    (held,) = admin(gateway, "GET", "drift").json()["quarantines"]
    assert held["why"] == HOSTILE[:100]
    assert count(page, "main script, main img, main b") == 0
    press(page, "Release")
    page.until("!!document.querySelector('dialog input[name=why]')")
    press_in_dialog(page)
    page.until("document.querySelector('main').innerText.includes('No worker is in quarantine')")
    told = [fact["what"] for fact in admin(gateway, "GET", "drift").json()["facts"]]
    assert told[:2] == ["released", "quarantined"]
    assert page.complaints == []


def test_a_key_is_made_with_limits_and_its_secret_is_shown_once(page: Page, gateway: Gateway) -> None:
    show(page, "#/money")
    press(page, "Create a key")
    page.until("!!document.querySelector('dialog input[name=name]')")
    page.js("document.querySelector('dialog input[name=name]').focus()")
    page.write(HOSTILE[:100])
    page.js("document.querySelector('dialog input[name=budget_day_usd]').focus()")
    page.write("a lot")
    press_in_dialog(page)
    page.until("document.querySelector('dialog [role=alert]').innerText.includes('budget_day_usd')")
    page.js("document.querySelector('dialog input[name=budget_day_usd]').value = '0.5'")
    press_in_dialog(page)
    secret = page.until("document.querySelector('dialog pre')?.innerText")
    assert secret.startswith("bt_data_")
    made = next(key for key in admin(gateway, "GET", "keys").json()["data"] if key["name"] == HOSTILE[:100])
    assert made["budget_day_usd"] == "0.5"
    press(page, "Close")
    page.until("!document.querySelector('dialog')")
    assert secret not in page.js("document.documentElement.outerHTML")
    assert count(page, "main script, main img, main b") == 0
    admin(gateway, "DELETE", f"keys/{made['id']}")
    assert ["status of 400" in complaint for complaint in page.complaints] == [True], "the wrong limit"


def test_many_keys_have_pages_and_a_search(page: Page, gateway: Gateway) -> None:
    with database(gateway) as connection:
        row = dict(
            connection.execute(select(admin_tables.keys).where(admin_tables.keys.c.key_class == "data"))
            .mappings()
            .first()
            or {}
        )
        at = row["created_at"] + timedelta(days=1)
        rows = [row | {"public_id": f"many{n:08}", "name": f"one of many {n}", "created_at": at} for n in range(1_001)]
        connection.execute(admin_tables.keys.insert(), rows)
    try:
        show(page, "#/money")
        page.until("document.querySelector('main').innerText.includes('one of many 999')")
        assert "one of many 1000" not in page.text()
        page.js("[...document.querySelectorAll('main a')].find((one) => one.innerText === 'Older keys').click()")
        page.until("document.querySelector('main').innerText.includes('one of many 1000')")
        assert "one of many 999" not in page.text()
        page.js("document.querySelector('form.filters input[name=q]').value = 'MANY 17'")
        press(page, "Search")
        page.until("document.querySelector('main').innerText.includes('one of many 179')")
        assert "one of many 18" not in page.text()
        page.js("[...document.querySelectorAll('main a')].find((one) => one.innerText === 'All keys').click()")
        page.until("document.querySelector('main').innerText.includes('one of many 18')")
        assert page.complaints == []
    finally:
        with database(gateway) as connection:
            connection.execute(admin_tables.keys.delete().where(admin_tables.keys.c.public_id.startswith("many")))


def test_an_uncertain_charge_is_given_back_by_one_press(page: Page, gateway: Gateway) -> None:
    scopes = [["key:key1", None]]
    common: dict[str, Any] = {
        "hold_id": "h1",
        "rollout_id": None,
        "scopes": scopes,
        "detail": {},
        "at": datetime.now(UTC),
    }
    with database(gateway) as connection:
        for kind, amount in (("hold", 9_000), ("uncertain", 5_000)):
            row = common | {"event_id": uuid7(time.time_ns() // 1_000_000), "kind": kind, "amount_nano": amount}
            connection.execute(tables.ledger.insert().values(**row))
    show(page, "#/money")
    press(page, "Give back $0.000005")
    press_in_dialog(page)
    page.until("!document.querySelector('dialog') && document.querySelector('main').innerText.includes('given back')")
    assert admin(gateway, "GET", "credits").json()["data"][0]["usd"] == "0.000005"
    assert page.complaints == []


def test_the_audit_is_filtered_and_checked(page: Page, gateway: Gateway) -> None:
    admin(gateway, "POST", "orgs", json={"name": "audited", "why": HOSTILE})
    show(page, "#/audit?act=org.created")
    page.until("document.querySelectorAll('tbody tr').length === 1")
    assert HOSTILE in page.text()
    press(page, "Check the chain")
    page.until("document.querySelector('[role=status]').innerText.startsWith('The chain is whole')")
    assert count(page, "main script, main img, main b") == 0
    assert page.complaints == []


def test_a_prompt_shows_its_plan_its_steps_and_its_reply(page: Page, gateway: Gateway) -> None:
    show(page, "#/playground")
    page.js("document.querySelector('textarea').focus()")
    page.write("How many grams are there in 51 kilograms? <img src=x>")
    press(page, "Ask")
    page.until("document.querySelectorAll('main table tbody tr').length >= 1")
    page.until("!!document.querySelector('main svg rect')")
    rollout = page.js("document.querySelector('main dd a[href^=\"#/rollouts/\"]').innerText")
    tree = admin(gateway, "GET", f"rollouts/{rollout}").json()
    assert tree["request"]["messages"][-1]["content"].endswith("<img src=x>")
    assert tree["status"] == "done"
    assert count(page, "main img") == 0
    assert page.complaints == []


def test_an_auditor_sees_every_page_and_no_button_that_changes(page: Page, gateway: Gateway, job: str) -> None:
    made = admin(gateway, "POST", "keys", json={"name": "eyes", "key_class": "admin", "role": "auditor"}).json()
    page.js(f"sessionStorage.setItem('baton-admin-key', {json.dumps(made['key'])})")
    page.goto("about:blank")
    page.goto(f"{gateway.facts['admin_url']}/")
    page.until("document.getElementById('role').innerText === 'auditor'")
    allowed = {"Forget key", "Show", "Export JSONL", "Compare two", "Check the chain"}
    for where in (*PAGES, f"#/jobs/{job}"):
        show(page, where)
        assert page.js("document.getElementById('error').innerText") == "", where
        assert (
            set(
                page.js(
                    "[...document.querySelectorAll('button')].filter((one) => one.checkVisibility())"
                    ".map((one) => one.innerText)"
                )
            )
            <= allowed
        ), where
    assert page.complaints == []
