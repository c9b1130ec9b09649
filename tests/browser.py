"""A real browser for tests: Debian's chromium, driven over the DevTools protocol. It keeps the complaints of pages."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S = 60.0
REPLY_S = 60.0
MESSAGE_BYTES_MAX = 64 * 1024 * 1024


def executable() -> str | None:
    """Path of a browser, or None where none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. `complaints` holds uncaught errors, refused content and failed loads, in order."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; note the events that come before it."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=REPLY_S))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(message["params"]["exceptionDetails"]))
        entry = message.get("params", {}).get("entry", {})
        if message.get("method") == "Log.entryAdded" and entry.get("level") == "error":
            self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    def js(self, expression: str) -> Any:
        """Evaluate an expression in the page, await it if it is a promise, and return its value."""
        got = self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def until(self, expression: str, limit_s: float = 60.0) -> Any:
        """Wait until an expression has a truthy value, and return that. Raises AssertionError after `limit_s`."""
        stop_s = time.monotonic() + limit_s
        while not (value := self.js(expression)):
            assert time.monotonic() < stop_s, f"not within {limit_s} s: {expression}\n{self.text()}\n{self.complaints}"
            time.sleep(0.05)
        return value

    def goto(self, url: str) -> None:
        self.do("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def text(self) -> str:
        """Return the visible text of the page."""
        return str(self.js("document.body ? document.body.innerText : ''"))

    def looks(self, width_px: int, height_px: int, scheme: str = "light") -> None:
        """Set the size of the window and the preference for dark colours."""
        size = {"width": width_px, "height": height_px, "deviceScaleFactor": 1, "mobile": False}
        self.do("Emulation.setDeviceMetricsOverride", **size)
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def key(self, name: str, code: int) -> None:
        """Press a key: its DOM name and its Windows key code."""
        pressed = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if name == "Enter" else {}
        self.do("Input.dispatchKeyEvent", type="keyDown", **pressed, **text)
        self.do("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self.do("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        got = self.do("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(got["data"]))


@contextmanager
def browser(program: str, directory: Path) -> Iterator[Page]:
    """A headless browser with an empty profile under `directory`."""
    flags = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
    )
    where = (f"--user-data-dir={directory}", "--remote-debugging-port=0", "about:blank")
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([program, *flags, *where], stdout=quiet, stderr=quiet)
    try:
        with connect(_tab(process, directory), max_size=MESSAGE_BYTES_MAX, proxy=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(timeout=START_S)


def _tab(process: subprocess.Popen[bytes], directory: Path) -> str:
    """The address of the first tab."""
    import httpx

    ports = directory / "DevToolsActivePort"
    stop_s = time.monotonic() + START_S
    while time.monotonic() < stop_s:
        assert process.poll() is None, "the browser ended"
        if ports.exists() and ports.read_text().strip():
            port = ports.read_text().split()[0]
            tabs = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=REPLY_S, trust_env=False).json()
            for tab in tabs:
                if tab["type"] == "page":
                    return str(tab["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError("the browser did not start")
