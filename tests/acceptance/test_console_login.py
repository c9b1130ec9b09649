"""A person logs in at the organisation's provider, works under that name, and logs out, in a browser."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.acceptance.conftest import IN_A_BROWSER, PROGRAM
from tests.acceptance.test_serve import serving
from tests.browser import Page, browser
from tests.redis_server import free_port
from tests.tiny_model import write_tiny_model

pytestmark = IN_A_BROWSER
pytest.importorskip("authlib", reason="needs the oidc extra")
from tests.integration.test_oidc import CLIENT, SECRET, Provider, running  # noqa: E402 - it needs the extra, too

ROLE = "document.querySelector('#role')?.innerText"


@contextmanager
def in_a_thread(provider: Provider) -> Iterator[None]:
    """Serve the provider beside the test until the block ends."""
    started, ended = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with running(provider):
            started.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(30)
        yield
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


@pytest.fixture
def page() -> Iterator[tuple[Page, Provider, str]]:
    """A tab, the provider, and where the console is."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    provider = Provider(callback=f"{url}/login/callback", roles=["audit"])
    with tempfile.TemporaryDirectory(prefix="baton-login-", ignore_cleanup_errors=True) as path, in_a_thread(provider):
        place = Path(path)
        settings = {
            "OIDC_ISSUER": provider.issuer,
            "OIDC_CLIENT_ID": CLIENT,
            "OIDC_CLIENT_SECRET": "env:PROVIDER_SECRET",
            "OIDC_REDIRECT_URL": provider.callback,
            "OIDC_ROLE_CLAIM": "realm_access.roles",
            "OIDC_AUDITORS": "audit",
            "JOBS_WORKER": "false",
        }
        environment = {f"BATON_{name}": value for name, value in settings.items()} | {"PROVIDER_SECRET": SECRET}
        words = ("--admin-port", str(port))
        served = serving(place / "data", write_tiny_model(place / "model"), *words, **environment)
        with served, browser(str(PROGRAM), place / "profile") as tab:
            yield tab, provider, url


def test_a_person_logs_in_reads_under_that_name_and_logs_out(page: tuple[Page, Provider, str]) -> None:
    tab, provider, url = page
    tab.goto(f"{url}/")
    tab.until("!document.querySelector('#oidc')?.hidden && !!document.querySelector('#oidc a')?.checkVisibility()")
    tab.js("document.querySelector('#oidc a').click()")
    tab.until(f"{ROLE} === 'auditor'")
    assert tab.js("document.querySelector('#role').title") == "oidc:u-17"
    assert tab.js("sessionStorage.getItem('baton-admin-key')") is None, "nobody gave a key"
    assert provider.asked == 1
    tab.js("location.hash = '#/workers'")
    tab.until("document.querySelector('main h1')?.innerText === 'Workers'")
    assert "quarantine" not in tab.js(
        "[...document.querySelectorAll('main button')].map((one) => one.innerText.toLowerCase()).join()"
    ), "an auditor changes nothing"
    tab.js("document.querySelector('#forget').click()")
    tab.until("document.querySelector('#login')?.checkVisibility() && !document.querySelector('#role').innerText")
    tab.goto(f"{url}/")
    tab.until("!!document.querySelector('#login')?.checkVisibility()")
    assert not tab.js(ROLE), "the session is over"
