"""The pictures of the console in docs/, taken of a gateway that served requests: `PICTURES=docs` writes them there."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from gateway.adapters.postgres import tables
from tests.acceptance.conftest import CHILD_ID, HOSTILE_ID, IN_A_BROWSER, database
from tests.acceptance.test_serve import Gateway
from tests.browser import Page

pytestmark = IN_A_BROWSER
REQUESTS = 12
SIZE_PX = (1280, 860)
BYTES_MIN = 20_000  # an empty page has fewer
PAGES = {
    "console-rollouts": ("#/rollouts", "document.querySelectorAll('tbody tr').length >= 12"),
    "console-money": ("#/money", "document.querySelectorAll('figure svg rect').length >= 2"),
}


@pytest.fixture(scope="module")
def busy(gateway: Gateway) -> Gateway:
    """The gateway after some judged requests, without the record of an attack."""
    with database(gateway) as connection:
        connection.execute(tables.rollouts.delete().where(tables.rollouts.c.id.in_([HOSTILE_ID, CHILD_ID])))
    headers = {"authorization": f"Bearer {gateway.facts['data_key']}"}
    for n in range(REQUESTS):
        question = f"How many grams are there in {n + 3} kilograms?"
        model = "baton" if n % 3 else "baton/rule"
        reply = gateway.ask(model=model, messages=[{"role": "user", "content": question}])
        outcome = {"rollout_id": reply.headers["x-baton-rollout-id"], "value": n % 4 > 0}
        url = f"{gateway.facts['base_url']}/outcomes"
        httpx.post(url, json=outcome, headers=headers, timeout=60).raise_for_status()
    return gateway


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_drawn(page: Page, busy: Gateway, name: str, tmp_path: Path) -> None:
    where, drawn = PAGES[name]
    page.looks(*SIZE_PX)
    page.js(f"location.hash = '{where}'")
    page.until(drawn)
    page.js("new Promise((done) => setTimeout(done, 300))")  # charts follow the width of their box
    file = Path(os.environ.get("PICTURES", tmp_path)) / f"{name}.png"
    page.screenshot(file)
    assert file.stat().st_size > BYTES_MIN
    assert page.complaints == []
