"""S6: secrets that pass through success, error, timeout, bug and crash are in none of the sinks afterwards."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine, text

from gateway.adapters.postgres.database import driver_url
from gateway.cli.process.runtime import Scrubbed
from gateway.core.access import keys
from gateway.core.log.redact import Redactor
from tests.security.gateway import PEPPER, PROVIDER_KEY, Gateway, ask
from tests.security.report import measured
from tests.upstreams.server import Reply, json_reply

OPENAI_KEY = "sk-proj-Abc123Def456Ghi789Jkl012"
GITHUB = "ghp_0123456789abcdefghijABCDEFGHIJ012345"
MAIL, CARD, PHONE = "ann.smith@example.com", "4111 1111 1111 1111", "+49 170 1234567"


class Seen(logging.Handler):
    """Every line that the log would have had, tracebacks included."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(Scrubbed(Redactor([PROVIDER_KEY])))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def log() -> Iterator[Seen]:
    seen, root = Seen(), logging.getLogger()
    level = root.level
    root.addHandler(seen)
    root.setLevel(logging.DEBUG)
    yield seen
    root.removeHandler(seen)
    root.setLevel(level)


def answer(body: dict[str, Any]) -> Reply | str:
    """What the worker does is in the question."""
    asked = str(body["messages"])
    if "error" in asked:
        said = {"error": {"message": f"Incorrect API key provided: {PROVIDER_KEY}; see {OPENAI_KEY}", "code": "x"}}
        return json_reply(said, int(asked.partition("error ")[2][:3]))
    if "nonsense" in asked:
        return Reply(f"<html>{PROVIDER_KEY} {OPENAI_KEY}</html>".encode(), headers={"content-type": "text/html"})
    return f"I got {PROVIDER_KEY} and {OPENAI_KEY}, mail {MAIL}"


def ways(secret: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests that carry secrets in every place a client has."""
    told = f"My keys are {OPENAI_KEY}, {GITHUB} and {secret}. Mail {MAIL}, card {CARD}, call {PHONE}."
    for stream in (False, True):
        yield "success", ask(told, stream=stream)
        yield "error", ask(f"{told} error 400", stream=stream)
        yield "error", ask(f"{told} error 401", stream=stream)
        yield "error", ask(f"{told} error 500", stream=stream)
        yield "nonsense", ask(f"{told} nonsense", stream=stream)
    yield "metadata", ask(told, metadata={"note": f"token {OPENAI_KEY}"}, user=MAIL)
    yield "refused", ask(told, api_key=OPENAI_KEY)
    yield "bad", {"model": f"baton {OPENAI_KEY}", "messages": told}
    yield "unknown", ask(told, model=OPENAI_KEY)
    yield "bug", ask(f"{told} bug")


def sinks(gateway: Gateway, log: Seen, replies: list[httpx.Response], admin: str) -> Mapping[str, str]:
    """Everything that outlives the requests, by sink."""
    files = [path for path in (gateway.place / "data").rglob("*") if path.is_file()]
    with gateway.client(admin, admin=True) as http:
        metrics = http.get("/metrics").text
        shown = http.get("/admin/rollouts").text + http.get("/admin/audit").text + http.get("/admin/pools").text
    return {
        "log": "\n".join(log.lines),
        "journal": "".join(path.read_bytes().decode("utf-8", "replace") for path in files),
        "database": _database(gateway.database_url),
        "metrics": metrics,
        "error bodies": "\n".join(reply.text for reply in replies if reply.status_code >= 400),
        "admin": shown,
    }


def _database(url: str) -> str:
    engine = create_engine(driver_url(url))
    try:
        with engine.connect() as connection:
            names = connection.scalars(
                text(
                    "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables "
                    "WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
                )
            )
            rows = [connection.scalars(text(f"SELECT t::text FROM {name} AS t")).all() for name in names]  # noqa: S608
    finally:
        engine.dispose()
    return "\n".join(row for table in rows for row in table)


def test_no_secret_reaches_a_sink_whatever_happens(
    gateway: Gateway, log: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, admin = gateway.key("admin")
    key_id, secret = gateway.key(log_mode="full")
    _, private = gateway.key(log_mode="redacted")
    other, _ = keys.mint("data")
    gateway.upstream.reply = answer
    assert gateway.bundle is not None
    whole = gateway.bundle.completer._work

    async def work(job: Any) -> Any:
        if "bug" in str(job.conversation):
            raise RuntimeError(f"a bug that tells {OPENAI_KEY} and {PROVIDER_KEY}: {job.conversation}")
        return await whole(job)

    monkeypatch.setattr(gateway.bundle.completer, "_work", work)
    replies = []
    for bearer in (secret, private):
        with gateway.client(bearer) as http:
            replies += [http.post("/v1/chat/completions", json=body) for _, body in ways(other)]
            replies.append(http.post(f"/v1/chat/completions?key={OPENAI_KEY}", content=b"{"))
    with gateway.client(other) as http:
        replies.append(http.post("/v1/chat/completions", json=ask()))
    assert {reply.status_code for reply in replies} >= {200, 400, 401, 404, 500}
    gateway.run(gateway.bundle.journal.shipped())
    found = sinks(gateway, log, replies, admin)
    canaries = {
        "provider": PROVIDER_KEY,
        "client": secret,
        "private": private,
        "other": other,
        "pepper": PEPPER.decode(),
    }
    canaries |= {"other": other, "openai": OPENAI_KEY, "github": GITHUB}
    hits = {(name, sink) for name, value in canaries.items() for sink, held in found.items() if value in held}
    assert hits == set()
    assert key_id in found["database"]  # the sinks were read
    assert "a bug that tells" in found["log"]
    measured("S6", f"{len(replies)} requests, {len(canaries)} canaries, {len(found)} sinks: {len(hits)} hits")


def test_a_redacted_key_leaves_no_personal_data_and_metadata_no_text(gateway: Gateway, log: Seen) -> None:
    told = f"Write to {MAIL}, charge {CARD}, call {PHONE}. The word is xylophone."
    rows = {}
    gateway.upstream.reply = lambda body: f"I wrote to {MAIL} with {CARD}; xylophone."
    for mode in ("full", "redacted", "metadata"):
        _, secret = gateway.key(log_mode=mode)
        with gateway.client(secret) as http:
            reply = http.post("/v1/chat/completions", json=ask(told, user=MAIL, metadata={"mail": MAIL}))
            assert MAIL in reply.text  # the client gets what the worker said; the log does not
            rollout = reply.headers["x-baton-rollout-id"]
            for said in ({"comment": told}, {"demonstration": told}, {"label": MAIL}):
                assert http.post("/v1/outcomes", json={"rollout_id": rollout, **said}).status_code in (200, 201)
            rows[mode] = json.dumps(http.get(f"/v1/rollouts/{rollout}").json(), ensure_ascii=False)
    assert all(value in rows["full"] for value in (MAIL, CARD, PHONE, "xylophone"))
    assert [value for value in (MAIL, CARD, PHONE) if value in rows["redacted"]] == []
    assert "xylophone" in rows["redacted"]
    left = [value for value in (MAIL, CARD, PHONE, "xylophone") if value in rows["metadata"]]
    assert left == [], rows["metadata"]


def test_tracebacks_are_scrubbed_in_the_log_that_serve_writes(log: Seen) -> None:
    try:
        raise ValueError(f"in {OPENAI_KEY} {PROVIDER_KEY}")
    except ValueError:
        logging.getLogger("anything").exception("it was %s", GITHUB)
    (line,) = log.lines
    assert "Traceback" in line
    assert not any(value in line for value in (OPENAI_KEY, PROVIDER_KEY, GITHUB))
