"""Write docs/api.md from the routes, the request table, the reply headers and the error tree.

What a header or an error means is written here; that there are no
others is taken from the code, and a header without its sentence stops this script.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from fastapi.routing import APIRoute

from gateway import errors
from gateway.adapters.upstream.media import FETCH_CODES
from gateway.api.edge.headers import rate_headers
from gateway.api.edge.health import HealthApi
from gateway.api.operator.jobs import JobsApi
from gateway.api.operator.keys import KeysApi
from gateway.api.operator.orgs import AuditApi, CreditsApi, OrgsApi
from gateway.api.operator.pages import PagesApi
from gateway.api.operator.policies import PoliciesApi
from gateway.api.operator.pools import PoolsApi
from gateway.api.public.chat import OWN_HEADERS, OpenAIApi
from gateway.api.public.outcomes import OutcomesApi
from gateway.api.public.responses import ResponsesApi
from gateway.api.public.texts import TextsApi
from gateway.core.log.outcome import FIELDS as OUTCOME_FIELDS
from gateway.core.log.rollout import RolloutRecord
from gateway.core.loop.caps import CAP_HEADERS
from gateway.core.openai import body, shapes
from gateway.core.openai.shapes import REFUSED, REFUSED_PREFIXES
from gateway.errors import BatonError
from gateway.service.ports.request import RateState
from gateway.service.request.running import reply_headers
from scripts import chat_table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
HEAD = """# API reference

<!-- Written by scripts/api_reference.py (`make docs`); change the code, or the sentences in that script. -->

The public listener takes data keys, the admin listener admin keys: `Authorization: Bearer bt_data_…`. Health and
metrics need no key. Every reply carries `x-request-id`.
"""

REQUEST_HEADERS = {
    "x-baton-pool": "the pool to use, one of the key's; without it the key's first",
    "x-baton-rounds": "plans this request may take, 1 to 16; still bounded by the cap",
    "x-baton-quality": "the dial, 0 (cheapest that may do) to 9 (best at any price), for a conductor that heeds it",
    "x-baton-keepalive": "`off` (also `0`, `false`): no comments in the stream while nothing else comes",
    "x-baton-progress": "`on`: the stream tells of plans and steps as they happen, in comments `: baton {…}`",
    "x-baton-sticky": "`off` (also `0`, `false`): plan a turn that would go back to the worker that asked",
    "x-baton-max-cost-usd": "dollars in all, planning included",
    "x-baton-max-depth": "child loops inside child loops; 0: none",
    "x-baton-max-rounds": "plans a loop",
    "x-baton-max-steps": "steps a plan",
    "x-baton-max-parallel": "worker calls in flight",
    "x-baton-max-calls": "worker calls in all, retries included",
    "x-baton-max-tokens": "tokens of worker calls in all",
    "x-baton-timeout-s": "seconds for the whole request",
}
OTHER_REQUEST_HEADERS = {
    "authorization": "`Bearer` and a key",
    "idempotency-key": "on every POST: the same request again gets the first one's reply, and spends nothing",
    "x-baton-depth": "set by a gateway that calls another one, signed; anybody else's counts as absent",
}
REPLY_HEADERS = {
    "x-baton-rollout-id": "names the rollout: for `GET /v1/rollouts/{id}` and for outcomes",
    "x-baton-policy": "who planned in the end, and in brackets the model or version that did",
    "x-baton-workers": "the workers of the steps, in order",
    "x-baton-steps": "how many steps",
    "x-baton-cost-usd": "dollars of the whole tree. Not in a stream's headers: its closing comment has it",
    "x-baton-overhead-ms": "time in which no conductor and no worker was waited for. In a stream: the closing comment",
    "x-baton-fallback": "only when a router planned instead: `conductor_` or `worker_` and the reason",
    "x-baton-capped": "only when the request ended early with the best answer so far: the cap, or `worker`",
    "x-ratelimit-limit-requests": "requests a minute of the key, where it has such a limit",
    "x-ratelimit-remaining-requests": "of them, left",
    "x-ratelimit-limit-tokens": "tokens a minute of the key, where it has such a limit",
    "x-ratelimit-remaining-tokens": "of them, left",
    "x-ratelimit-reset-requests": "until nothing of that minute is used, if nothing more comes (`120ms`, `1m0s`)",
    "x-ratelimit-reset-tokens": "as for requests",
}
OTHER_REPLY_HEADERS = {
    "x-request-id": "of this HTTP exchange; quote it in reports",
    "x-baton-idempotent-replay": "`true` where the reply was given before, to the same `Idempotency-Key`",
    "openai-processing-ms": "milliseconds until the reply began",
    "openai-version": "`2020-10-01`, as OpenAI says",
    "x-baton-dropped-fields": "request properties that Baton does not know and left out, by path",
    "retry-after, retry-after-ms": "with 429 and 503: when to try again; a worker's own word is passed on. More than "
    "120 s means to OpenAI's SDKs that they should not",
    "x-should-retry": "`true` where trying again may help, `false` where it cannot; OpenAI's SDKs obey it",
}
ERRORS = {
    "BadRequest": "the request is malformed; `param` names the field",
    "VersionRefused": "a policy version that an engine will not load or unload; what was served is served on",
    "Unpriced": "a worker has no price, so nothing bounds what it may cost",
    "ConfigError": "a setting or file that cannot be used: at a start, and on the admin API for a pool file",
    "Unauthorized": "no key, not a key, another class, unknown or revoked",
    "Forbidden": "the key may not use that pool",
    "NotFound": "no such thing, or not this key's: the two read the same",
    "Conflict": "it clashes with what is there: a second job of a policy, a move of a version that is not legal",
    "IdempotencyReused": "the `Idempotency-Key` came before with another body or path",
    "IdempotencyRunning": "the request that brought this `Idempotency-Key` first has not ended; ask again",
    "TooLarge": "the body is over `BATON_BODY_BYTES_MAX`",
    "RateLimited": "requests or tokens a minute, or requests in flight; try again after `retry-after`",
    "BudgetExceeded": "the key's money does not cover the least this request may cost; do not retry",
    "CapReached": "a cap ended the request before there was any answer; the message says which",
    "DeadlineExceeded": "no answer within the request's wall-clock",
    "UpstreamError": "the worker failed, and so did every way around it",
    "UpstreamTimeout": "the worker did not answer in its time",
    "UpstreamRateLimited": "the worker is out of capacity; retries did not help",
    "UpstreamRefused": "the worker called the request bad; its words, and its own code where it gave one, are passed "
    "on without anything like a key",
    "UpstreamOverloaded": "the worker said 503 or 529, and retries did not help",
    "UpstreamInvalid": "a reply was not what `response_format` promised, and the second one neither",
    "UpstreamProtocol": "the worker sent nonsense or its stream was cut",
    "Unavailable": "something needed is away for now; retry",
    "EngineDown": "an engine that holds policy versions does not answer",
    "MoneyUnavailable": "the budget store is away or being rebuilt: money fails closed",
    "SpoolFull": "the journal cannot take more; nothing is done that cannot be logged",
    "BatonError": "a bug; the gateway's log has it under the request id",
}
NEVER_SENT = {"PlanRefused", "ConductorError"}  # the fallback router plans instead

ROUTES_TEXT = """
Each describes itself under `/openapi.json`, without a key.

## Routes

"""
REQUEST_HEADERS_TEXT = """
## Request headers

A cap by header can only lower what settings and key allow. The last three are not particular to
`POST /v1/chat/completions`.

"""
BODIES_TEXT = f"""
## Bodies

A body is JSON in UTF-8 of at most `BATON_BODY_BYTES_MAX` bytes (413 `request_too_large`), nested at most
{body.NESTING_MAX} deep. What a client could make costly with few bytes is bounded too, far above what clients send,
and refused with a 400 that says the bound, before it costs anything:

| bound | of |
|---|---|
| {body.OBJECTS_MAX:,} | objects and arrays |
| {body.PROPERTIES_MAX:,} | properties, and {shapes.PROPERTIES_MAX} of an object whose properties are known |
| {body.VALUES_MAX:,} | values: an embedding's tokens, say |
| {body.TEXTS_MAX:,} | texts, names of properties included; looked at where one of the bounds above is near |
| `BATON_MESSAGES_MAX` | messages |
| {shapes.PARTS_MAX:,} | parts of all messages together |
| {shapes.DROPPED_MAX:,} | unknown properties, which are left out |

"""
REPLY_HEADERS_TEXT = """
## Reply headers

Errors carry those of the rollout as well, once one has begun.

"""
CHAT_TEXT = """
## `POST /v1/chat/completions`

`null` counts as absent. A property that is not in this table, or that OpenAI does not know inside one that is, is
dropped, counted and named in `x-baton-dropped-fields`; with `BATON_STRICT_FIELDS=true` it is a 400. How Baton and
OpenAI compare, probe by probe, is in [OpenAI's contract](openai.md). Only the step whose reply is the answer gets the
client's parameters; earlier ones get text. `metadata.task_type` groups experience; `metadata.train: "false"` marks the
rollout as not for training. `metadata.grader` and `metadata.reference` have the reply graded
([jobs](jobs.md#graders-named-by-a-request)).

"""
OUTCOMES_TEXT = """
## `POST /v1/outcomes`

Give `rollout_id` or `completion_id`, and exactly one of `value` (true, false, or a number from 0 to 1), `label` (up to
128 characters), `comment` and `demonstration` (up to 20,000). `source` is `client` unless given. The header
`idempotency-key` (up to 255 characters) makes a repetition harmless.

"""
ERRORS_TEXT = """
## Errors

Every error is `{"error": {"message": …, "type": …, "param": …, "code": …}}`. Once a stream has begun, an error is one
`data:` event, and `[DONE]` does not follow.

"""


def routes() -> Iterator[tuple[str, str, str, str]]:
    """(listener, method, path, what it does) of every route; no application is built for it."""
    listeners: dict[str, tuple[Any, ...]] = {
        "public": (OpenAIApi, ResponsesApi, TextsApi, OutcomesApi, HealthApi),
        "admin": (KeysApi, OrgsApi, CreditsApi, AuditApi, PoolsApi, PoliciesApi, JobsApi, PagesApi, HealthApi),
    }
    for listener, apis in listeners.items():
        for api in apis:
            router = api.router(cast(Any, object.__new__(api)))
            for route in (route for route in router.routes if isinstance(route, APIRoute) and route.include_in_schema):
                what = " ".join((route.endpoint.__doc__ or "").split())
                yield listener, "".join(sorted(route.methods or ())), route.path, what


def told(names: Iterable[str], sentences: dict[str, str]) -> dict[str, str]:
    """The sentences, in their order. Raises ValueError when they are not exactly about `names`."""
    known = set(names)
    if known != set(sentences):
        raise ValueError(f"scripts/api_reference.py: say what these are: {sorted(known ^ set(sentences))}")
    return sentences


def chat_headers() -> list[str]:
    """The headers that the chat route documents about itself."""
    return [*OWN_HEADERS, *CAP_HEADERS]


def reply_header_names() -> set[str]:
    """Every header that can tell a rollout's story, from the functions that write them."""
    record = RolloutRecord("", "", "", 0, "baton", "", "", [], {}, {}, "", fallback="x", capped="x")
    return {*reply_headers(record), *rate_headers(RateState(1, 1, 1, 1, 1.0))}


def error_classes(parent: type[BatonError] = BatonError) -> Iterator[type[BatonError]]:
    """The error tree, parents first."""
    yield parent
    for child in parent.__subclasses__():
        if child.__module__ == BatonError.__module__:  # others' are never sent to a client
            yield from error_classes(child)


def given_codes() -> dict[str, set[str]]:
    """Codes that a place in the gateway gives an error beside its class's own, by class name."""
    found: dict[str, set[str]] = {"BadRequest": {*shapes.CODES, *FETCH_CODES.values()}}
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            name = "BadRequest" if name == "_bad" else name
            for word in node.keywords:
                if word.arg == "code" and isinstance(word.value, ast.Constant) and hasattr(errors, name):
                    found.setdefault(name, set()).add(str(word.value.value))
    return found


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    return "\n".join(lines).replace("| --- |", "|---|").replace(" --- |", "---|") + "\n"


def code(text: object) -> str:
    """As code."""
    return f"`{text}`"


def error_rows() -> list[tuple[str, ...]]:
    """Status, type, code and meaning of everything a client can be told."""
    codes = given_codes()
    rows = []
    for error in error_classes():
        if error.__name__ in NEVER_SENT:
            continue
        names = sorted({str(error.code), *codes.get(error.__name__, set())} - {"method_not_allowed"})
        shown = ", ".join(map(code, names))
        rows.append((str(error.status), code(error.type), shown, ERRORS[error.__name__]))
    wrong = code("invalid_request_error")
    rows.append(("405", wrong, code("method_not_allowed"), "the path exists, the method does not"))
    rows.append(("431", wrong, code("headers_too_large"), "headers over `BATON_HEADER_BYTES_MAX`"))
    return sorted(rows, key=lambda row: row[0])


def header_rows(*groups: dict[str, str]) -> list[tuple[str, ...]]:
    """Header and meaning; a cell may name two headers."""
    return [(", ".join(map(code, names.split(", "))), what) for group in groups for names, what in group.items()]


def render() -> str:
    """The whole page."""
    told((c.__name__ for c in error_classes() if c.__name__ not in NEVER_SENT), ERRORS)
    asked = told(chat_headers(), REQUEST_HEADERS)
    replied = told(reply_header_names(), REPLY_HEADERS)
    refused = ", ".join(map(code, sorted(REFUSED)))
    prefixes = ", ".join(map(code, REFUSED_PREFIXES))
    outcome = ", ".join(map(code, sorted(OUTCOME_FIELDS)))
    parts = [
        HEAD,
        ROUTES_TEXT,
        table(("listener", "method", "path", ""), [(a, b, code(c), d) for a, b, c, d in routes()]),
        REQUEST_HEADERS_TEXT,
        table(("header", "meaning"), header_rows(asked, OTHER_REQUEST_HEADERS)),
        BODIES_TEXT,
        REPLY_HEADERS_TEXT,
        table(("header", "meaning"), header_rows(replied, OTHER_REPLY_HEADERS)),
        CHAT_TEXT,
        table(("property", "a good value", "what becomes of it"), chat_table.rows()),
        f"\nAlways a 400 `refused_field`, at any depth and however it is spelt, because it could redirect or unlock\n"
        f"something: {refused}, and anything that begins with {prefixes}.\n",
        f"{OUTCOMES_TEXT}Properties: {outcome}.\n",
        ERRORS_TEXT,
        table(("status", "type", "code", "meaning"), error_rows()),
    ]
    return "".join(parts)
