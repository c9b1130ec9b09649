"""The operator's page as a person meets it: a real gateway, a real browser, a keyboard, and a hostile worker."""

from __future__ import annotations

import json
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from gateway.adapters.postgres import admin_tables, tables
from gateway.core.log.events import uuid7
from tests.acceptance.conftest import CHILD_ID, HOSTILE, HOSTILE_ID, IN_A_BROWSER, count, database, focused
from tests.acceptance.test_serve import Gateway
from tests.browser import Page
from tests.records import T0_US

pytestmark = IN_A_BROWSER


def open_rollout(page: Page) -> None:
    page.js(f"location.hash = '#/rollouts/{HOSTILE_ID}'")
    page.until("!!document.querySelector('.tokens')")


def test_a_person_gets_in_with_the_keyboard_and_the_key_stays_in_the_tab(tab: Page, gateway: Gateway) -> None:
    tab.goto(f"{gateway.facts['admin_url']}/")
    tab.js("sessionStorage.clear()")
    tab.goto("about:blank")
    tab.goto(f"{gateway.facts['admin_url']}/ui/")
    tab.until("document.activeElement.id === 'key'")
    tab.write(gateway.facts["data_key"])
    tab.key("Enter", 13)
    assert "takes `admin` keys only" in tab.until("document.getElementById('error').innerText")
    tab.write(gateway.facts["admin_key"])
    tab.key("Enter", 13)
    tab.until("!!document.querySelector('main h1')")
    assert tab.js("[document.getElementById('error').innerText, document.cookie, localStorage.length]") == ["", "", 0]
    assert gateway.facts["admin_key"] not in str(tab.js("location.href + document.documentElement.outerHTML"))
    tab.js("document.getElementById('forget').click()")
    assert tab.js("[sessionStorage.length, document.querySelector('main').innerText]") == [0, ""]


def test_an_empty_page_says_what_to_paste_and_it_works(page: Page, gateway: Gateway, tmp_path: Path) -> None:
    with database(gateway) as connection:
        connection.execute(tables.rollouts.delete().where(tables.rollouts.c.id.not_in([HOSTILE_ID, CHILD_ID])))
    page.js("location.hash = '#/?window_s=60'")
    page.until("document.querySelector('.empty')?.innerText.includes('No requests')")
    pasted = str(page.js("document.querySelector('.empty pre').innerText"))
    (tmp_path / ".baton").symlink_to(gateway.directory)
    done = subprocess.run(["bash", "-c", pasted], cwd=tmp_path, capture_output=True, timeout=120, check=True)
    assert json.loads(done.stdout)["object"] == "chat.completion"
    page.js("location.hash = '#/?window_s=900'")
    page.until("document.querySelector('.tile dd')?.innerText >= '1'")
    page.until("document.querySelectorAll('figure svg rect').length >= 2")


def test_the_list_names_who_answered_and_leads_to_the_rollout(page: Page) -> None:
    page.js("location.hash = '#/rollouts?policy=' + encodeURIComponent('baton')")
    page.until(f"!!document.querySelector('a[href=\"#/rollouts/{HOSTILE_ID}\"]')")
    assert f"{HOSTILE}, beta, self" in page.text()
    page.js(f"document.querySelector('a[href=\"#/rollouts/{HOSTILE_ID}\"]').click()")
    page.until(f"document.querySelector('main h1')?.innerText.includes('{HOSTILE_ID}')")
    page.js("location.hash = '#/rollouts?status=aborted'")
    page.until("document.querySelector('.empty')?.innerText.includes('Show all')")


def test_replies_of_workers_are_shown_as_plain_text(page: Page) -> None:
    open_rollout(page)
    assert page.text().count(HOSTILE) >= 6
    assert count(page, "main script, main img, main b, main iframe") == 0
    assert page.js("document.title") == f"Rollout {HOSTILE_ID[:8]} · Baton"
    assert page.complaints == []


def test_the_explanation_shows_hostile_words_as_plain_text(page: Page) -> None:
    open_rollout(page)
    page.until("!!document.querySelector('#why table')")
    why = str(page.js("document.querySelector('#why').innerText"))
    assert f"The planner's reason: {HOSTILE}" in why
    assert f"Shown as an example: {HOSTILE}" in why
    assert f"a step on `{HOSTILE}`" in why
    assert count(page, "#why script, #why img, #why b") == 0
    assert page.js("document.querySelector('main h1').nextElementSibling.id") == "sentence"
    first = str(page.js("document.querySelector('#sentence').innerText"))
    assert first.startswith(HOSTILE)
    assert "as conductor@" in first.splitlines()[0]
    assert "What decided" in first
    assert count(page, "#sentence script, #sentence img, #sentence b") == 0
    assert page.js("document.title") == f"Rollout {HOSTILE_ID[:8]} · Baton"
    captions = page.js("[...document.querySelectorAll('#why caption')].map((caption) => caption.innerText)")
    assert "What steps did not see" in captions
    assert "Judgement of each worker alone" in captions
    assert page.complaints == []


def test_the_browser_refuses_what_is_not_from_the_gateway(page: Page) -> None:
    page.js("""(() => { const script = document.createElement('script'); script.text = 'window.ran = 1';
        document.body.append(script); document.body.setAttribute('style', 'color: red'); })()""")
    assert page.js("[window.ran, document.body.style.color]") == [None, ""]
    assert page.js("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert sum("Content Security Policy" in complaint for complaint in page.complaints) >= 3


def test_a_rollout_shows_tools_that_were_called_what_was_cut_and_why_its_turn_was_planned(page: Page) -> None:
    open_rollout(page)
    page.until("!!document.querySelector('#why')")
    shown = page.text()
    assert "chars: 5,600, tool outputs: 2" in shown
    assert "1,234 characters" in shown
    assert "was planned anew" in shown
    assert "intent, distance 0.91" in shown


def test_the_timeline_shows_attempts_first_bytes_arrows_and_the_child_loop(page: Page) -> None:
    open_rollout(page)
    page.until("!!document.querySelector('svg text.label')")
    labels = page.js("[...document.querySelectorAll('svg text.label')].map((label) => label.firstChild.data)")
    assert [label.partition(":")[0] for label in labels] == [
        *("round 1", "step 0", "step 1", "step 2"),
        *("↳ round 1", "↳ step 0"),
    ]
    assert "2 attempts" in labels[2]
    assert count(page, "svg .see") == 2
    assert count(page, "svg path.first") == 3
    assert count(page, "svg rect.failed:not(.waiting)") == 1
    bars = page.js("[...document.querySelectorAll('svg rect.waiting')].map((bar) => bar.getAttribute('x') * 1)")
    assert bars[0] == bars[1] < bars[2]
    assert count(page, "article .child article") == 2


def test_tokens_are_coloured_by_probability_and_decisions_outlined(page: Page) -> None:
    open_rollout(page)
    first = "[...document.querySelectorAll('.part')].find((part) => part.querySelector('.token'))"
    shown = page.js(
        f"[...{first}.querySelectorAll('.token')].map((token) => [token.innerText, token.className.trim()])"
    )
    assert shown == [["10", "token p0 decides"], ["11", "token p4"], ["12", "token p2 decides"]]
    assert "impossible" in page.js(f"{first}.querySelectorAll('.token')[1].title")
    assert page.js(f"[...{first}.querySelectorAll('.run > code')].map((code) => code.innerText)")[1] == "check"


@pytest.mark.parametrize("width_px", [375, 1280])
@pytest.mark.parametrize("where", ["#/", "#/rollouts", f"#/rollouts/{HOSTILE_ID}"], ids=["overview", "list", "one"])
def test_nothing_is_wider_than_the_window_and_nothing_jumps(page: Page, width_px: int, where: str) -> None:
    page.looks(width_px, 700)
    page.js(f"location.hash = {json.dumps(where)}")
    page.until("!document.querySelector('main').hasAttribute('aria-busy') && !!document.querySelector('main h1')")
    assert page.js("document.documentElement.scrollWidth - innerWidth") <= 0
    shift = """new Promise((done) => { let sum = 0; new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) if (!entry.hadRecentInput) sum += entry.value;
      }).observe({ type: 'layout-shift', buffered: true }); setTimeout(() => done(sum), 300); })"""
    assert page.js(shift) < 0.1
    assert page.complaints == []


def test_dark_is_dark_and_light_is_light(page: Page) -> None:
    brightness = (
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    )
    page.looks(1280, 800, "light")
    assert page.js(brightness) > 600
    page.looks(1280, 800, "dark")
    assert page.js(brightness) < 150


def test_everything_can_be_reached_with_tab_alone(page: Page) -> None:
    page.js("location.hash = '#/rollouts'")
    page.until(f"!!document.querySelector('a[href=\"#/rollouts/{HOSTILE_ID}\"]')")
    page.js("document.activeElement.blur()")
    seen = []
    for _ in range(40):
        page.key("Tab", 9)
        if page.js("document.activeElement.matches('tbody a.row')"):
            break
        seen.append(focused(page))
    links = page.js("[...document.querySelectorAll('header nav a')].map((link) => link.innerText)")
    fields = [
        "key",
        "policy",
        "status",
        "text",
        "Show",
        "More filters",
        "tail",
        "Train on these",
        "Export JSONL",
        "Newest first",
    ]
    assert seen[: len(links) + 12] == ["Skip to the content", *links, "Forget key", *fields]
    assert page.js("document.activeElement.matches('tbody a.row')")
    page.key("Enter", 13)
    page.until("document.querySelector('main h1')?.innerText.startsWith('Rollout 0')")


def test_policy_versions_are_on_the_overview_with_what_was_done_to_them(page: Page) -> None:
    page.until("!!document.querySelector('.policies')")
    under = "document.querySelector('.policies + :is(.tiles, .empty)').getBoundingClientRect().top"
    assert page.js(f"{under} - document.querySelector('.policies').getBoundingClientRect().bottom") >= 8, "they touch"
    first = "document.querySelector('.policies tbody tr').innerText"
    assert page.js(first).split()[:5] == ["conductor@0", "live", "100", "%", "hold"]
    told = page.js("[...document.querySelectorAll('.policies table')].at(-1).innerText")
    assert all(word in told for word in ("seeded", "published", "forced", "baton serve"))


def test_the_pool_that_serves_is_named_by_its_hash(page: Page, gateway: Gateway) -> None:
    page.js("location.hash = '#/'")
    page.until("!!document.querySelector('.ready')")
    headers = {"authorization": f"Bearer {gateway.facts['admin_key']}"}
    hash_ = httpx.get(f"{gateway.facts['admin_url']}/admin/pools", headers=headers).json()["hash"]
    shown = page.js("document.querySelector('.ready').innerText")
    assert re.search(rf"pool {hash_[:12]} since [\d-]*\s?\d\d:\d\d:\d\d", shown)
    assert "[object" not in page.js("document.body.innerText")


def test_jobs_are_on_the_overview_with_how_far_they_are_and_what_came_of_them(page: Page, gateway: Gateway) -> None:
    assert count(page, ".jobs") == 0, "nobody has trained anything yet"
    common = {"spec": {"arguments": ["--env", "logged"], "gate": [], "auto": False}, "by": "key:ops", "cancel": False}
    told = [
        {"state": "running", "stage": "train", "progress": {"step": 3, "steps": 60, "eta_s": 171}},
        {"state": "failed", "stage": "gate", "progress": {}, "error": HOSTILE},
        {"state": "done", "stage": "shadow", "progress": {"step": 60, "steps": 60}, "version": "conductor@8"},
    ]
    with database(gateway) as connection:
        for number, job in enumerate(told):
            at = datetime(2026, 1, 1, 12, number, tzinfo=UTC)
            values = {"id": uuid7(T0_US // 1000 + number), "policy": "conductor", "attempts": 1, **common, **job}
            connection.execute(admin_tables.policy_jobs.insert().values(**values, created_at=at, changed_at=at))
    page.goto(f"{gateway.facts['admin_url']}/")
    page.until("!!document.querySelector('.jobs')")
    found = page.js("[...document.querySelectorAll('.jobs tbody th, .jobs td')].map((cell) => cell.innerText)")
    done, failed, running = (found[at : at + 9] for at in (0, 9, 18))
    assert done[1:6] == ["conductor", "done", "shadow", "60 of 60", "conductor@8"]
    assert failed[2:6] == ["failed", "gate", "–", HOSTILE]
    assert running[2:6] == ["running", "train", "3 of 60, 3 min left", "–"]
    assert count(page, ".jobs script, .jobs img") == 0
    assert page.complaints == []
    with database(gateway) as connection:
        connection.execute(admin_tables.policy_jobs.delete())


def test_an_error_is_one_line(page: Page) -> None:
    page.js("location.hash = '#/rollouts/nothing'")
    told = page.until("document.getElementById('error').innerText")
    assert told == "no rollout `nothing`"
    page.js("location.hash = '#/rollouts'")
    page.until("document.getElementById('error').innerText === ''")


def test_the_overview_refreshes_itself_but_not_under_ones_hands(page: Page, gateway: Gateway) -> None:
    page.js("location.hash = '#/?window_s=900'")
    page.until("document.querySelector('main [aria-current]')?.innerText === '15 min'")
    shown = "(document.querySelector('.tile dd')?.innerText ?? '0')"
    before = int(page.js(shown))
    page.js("document.querySelector('.switch a').focus()")
    assert gateway.ask().status_code == 200
    with pytest.raises(AssertionError, match="not within 12"):
        page.until(f"{shown} !== '{before}'", limit_s=12)
    page.js("document.activeElement.blur()")
    page.until(f"{shown} === '{before + 1}'", limit_s=15)
