"""What tests of the console share: a gateway with a hostile worker's record in its log, and a tab with its page."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.inserts import insert_rows
from gateway.core.log.events import uuid7
from gateway.core.log.rollout import AttemptRecord
from tests.acceptance.test_serve import Gateway, serving
from tests.browser import Page, browser, executable
from tests.records import T0_US, a_rollout, a_round, a_step, rollout_event
from tests.tiny_model import write_tiny_model

PROGRAM = executable()
IN_A_BROWSER = [
    pytest.mark.long,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium on PATH (apt-get install chromium)"),
]
HOSTILE = "<b>4</b><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
HOSTILE_ID = uuid7(T0_US // 1000)
CHILD_ID = uuid7(T0_US // 1000 + 1)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-page-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def gateway(place: Path) -> Iterator[Gateway]:
    with serving(place / "data", write_tiny_model(place / "model"), BATON_JOBS_WORKER="false") as running:
        log_hostile_rollout(running)
        yield running


@pytest.fixture(scope="module")
def tab(place: Path) -> Iterator[Page]:
    with browser(str(PROGRAM), place / "profile") as page:
        yield page


@pytest.fixture
def page(tab: Page, gateway: Gateway) -> Page:
    """The overview, opened with the admin key."""
    tab.looks(1280, 800)
    tab.goto(f"{gateway.facts['admin_url']}/")
    tab.js(f"sessionStorage.setItem('baton-admin-key', {json.dumps(gateway.facts['admin_key'])})")
    tab.js("location.hash = ''")
    tab.goto("about:blank")
    tab.goto(f"{gateway.facts['admin_url']}/")
    tab.until("!!document.querySelector('main h1')")
    tab.complaints.clear()
    return tab


@contextmanager
def database(gateway: Gateway) -> Iterator[Connection]:
    engine = sync_engine(gateway.facts["database_url"])
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def log_hostile_rollout(gateway: Gateway) -> None:
    """Two steps at once, one of them retried, and a child loop that saw both; every text is an attack."""

    def us(ms: int) -> int:
        return T0_US + ms * 1000

    plan = json.dumps({"steps": [{"worker": "quill", "task": "check", "see": []}]}, separators=(",", ":"))
    record_of_one = {"n": 3, "success": 0.5, "cost_nano": 9, "ms": 40}
    called = {"name": HOSTILE, "arguments": {"city": HOSTILE}, "chars": 1234}
    tries = [
        AttemptRecord(us(30), us(90), "upstream_timeout", cut={"tool_outputs": 2, "messages": 0, "chars": 5600}),
        AttemptRecord(us(100), us(300), tool=called),
    ]
    texts: dict[str, Any] = {"reply": HOSTILE, "task": HOSTILE, "messages": [{"role": "user", "content": HOSTILE}]}
    top = a_rollout(
        id=HOSTILE_ID,
        finished_us=us(900),
        request={"messages": [{"role": "user", "content": HOSTILE}]},
        reply={"choices": [{"message": {"role": "assistant", "content": HOSTILE}}]},
        policy_used=HOSTILE,
        turn={"worker": HOSTILE, "kept": False, "why": "intent", "distance": 0.91, "worth_nano": 10_800_000},
        pool=[{"name": HOSTILE, "handle": "quill", "version": "1", "experience": record_of_one}],
        rounds=[
            a_round(
                plan_text=plan,
                plan=json.loads(plan) | {"why": HOSTILE},
                plan_logprobs=[-0.01, float("-inf"), -1.0],
                allowed={"handles": ["quill", HOSTILE], "steps_max": 3, "first_index": 0, "depth_capped": [HOSTILE]},
                shown={"request": None, "examples": [{"question": HOSTILE, "plan": HOSTILE, "cost_nano": 1}]},
            )
        ],
        steps=[
            a_step(0, HOSTILE, see=[], first_byte_us=us(60), finished_us=us(200), **texts),
            a_step(1, "beta", see=[], finished_us=us(300), first_byte_us=None, attempts=tries, **texts),
            a_step(2, "self", see=[0, 1], started_us=us(310), finished_us=us(890), child_rollout_id=CHILD_ID),
        ],
    )
    child = a_rollout(id=CHILD_ID, parent_id=top.id, depth=1, created_us=us(320), steps=[a_step(0, **texts)])
    new = rows.Rows()
    for record in (top, child):
        new.extend(rows.event_rows(rollout_event(record)))
    with database(gateway) as connection:
        insert_rows(connection, new)


def count(page: Page, selector: str) -> int:
    return int(page.js(f"document.querySelectorAll({json.dumps(selector)}).length"))


def focused(page: Page) -> str:
    return str(page.js("(document.activeElement.name || document.activeElement.innerText || '').split('\\n')[0]"))
