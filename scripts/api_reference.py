"""Write docs/api.md from the routes, the request table, the reply headers and the error tree.

The names come from the code, the sentences about headers and errors stand here. A name without its sentence stops this
script.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from fastapi.routing import APIRoute

from gateway import errors
from gateway.adapters.upstream.media import FETCH_CODES
from gateway.api.edge.headers import OWN_HEADERS
from gateway.api.edge.health import HealthApi
from gateway.api.operator.figures import FiguresApi
from gateway.api.operator.jobs import JobsApi
from gateway.api.operator.keys import KeysApi
from gateway.api.operator.orgs import AuditApi, CreditsApi, OrgsApi
from gateway.api.operator.pages import PagesApi
from gateway.api.operator.playground import PlaygroundApi
from gateway.api.operator.policies import PoliciesApi
from gateway.api.operator.pools import PoolsApi
from gateway.api.operator.rollouts import RolloutsApi
from gateway.api.operator.sessions import SessionLimitsApi
from gateway.api.public.batches import BatchesApi
from gateway.api.public.chat import OpenAIApi, TextsApi
from gateway.api.public.files import FilesApi
from gateway.api.public.messages import MessagesApi
from gateway.api.public.outcomes import OutcomesApi
from gateway.api.public.responses import ResponsesApi
from gateway.api.public.sessions import SessionsApi
from gateway.api.public.tasks import TasksApi
from gateway.core.log.outcome import FIELDS as OUTCOME_FIELDS
from gateway.core.log.rollout import AttemptRecord, RolloutRecord, RoundRecord, StepRecord
from gateway.core.loop.caps import CAP_HEADERS
from gateway.core.openai import body, shapes
from gateway.core.openai.shapes import REFUSED, REFUSED_PREFIXES
from gateway.errors import BatonError
from gateway.service.ports.request import RateState
from gateway.service.request.running import reply_headers
from scripts import chat_table
from scripts.markdown import code, items, paragraph, table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
HEAD = """# API reference

<!-- Written by scripts/api_reference.py (`make docs`); change the code, or the sentences in that script. -->

The public listener takes data keys, the admin listener admin keys: `Authorization: Bearer bt_data_…`. Health and
metrics need no key. Every reply carries `x-request-id`.
"""

REQUEST_HEADERS = {
    "x-baton-pool": "the pool to use, one of the key's; default: the key's first",
    "x-baton-rounds": "plans that this request may take, 1 to 16; the cap still holds",
    "x-baton-quality": "0 (the cheapest that may do) to 9 (the best at any price), for a conductor that has this dial",
    "x-baton-keepalive": "`off` (also `0`, `false`): send no comments on an idle stream",
    "x-baton-progress": "what a stream says of plans and steps: `on`, comments `: baton {…}`; `reasoning`, deltas of "
    "reasoning before the reply (chat) and parts of a reasoning summary (Responses); `off`. Default: `BATON_PROGRESS`",
    "x-baton-sticky": "`off` (also `0`, `false`): plan a turn that would return to its last worker",
    "x-baton-session": "the session that the request counts in: an id of your own, up to 128 characters",
    "x-baton-session-usd": "at a session's first use: the dollars that it may spend",
    "x-baton-session-calls": "at a session's first use: the worker calls that it may make",
    "x-baton-session-minutes": "at a session's first use: the minutes after which it ends, at most 44,640 (31 days)",
    "x-baton-max-cost-usd": "dollars in all, planning included",
    "x-baton-max-depth": "child loops inside child loops; 0: none",
    "x-baton-max-rounds": "plans of one loop",
    "x-baton-max-steps": "steps of one plan",
    "x-baton-max-parallel": "worker calls at the same time",
    "x-baton-max-calls": "worker calls in all, retries included",
    "x-baton-max-tokens": "tokens of worker calls in all",
    "x-baton-timeout-s": "seconds for the whole request",
}
OTHER_REQUEST_HEADERS = {
    "authorization": "`Bearer` and a key",
    "x-api-key": "the key, on `/v1/messages`, where Anthropic's clients send it instead",
    "anthropic-version": "on `/v1/messages`: `2023-06-01`, `2026-10-21` or absent",
    "anthropic-beta": "on `/v1/messages`: names of features, for workers of Anthropic itself",
    "idempotency-key": "on every POST: a repeated request gets the first reply again, and spends nothing",
    "x-baton-depth": "set and signed by a gateway that calls another one; without its signature it counts as absent",
}
REPLY_HEADERS = {
    "x-baton-rollout-id": "id of the rollout, for `GET /v1/rollouts/{id}` and for outcomes",
    "x-baton-policy": "the policy that planned in the end; for `baton` behind `;` how far its next rung is "
    "(`outcomes=12/24`, `judged=18/60`); in brackets the model or version that planned",
    "x-baton-workers": "the workers of the steps, in order",
    "x-baton-steps": "number of steps",
    "x-baton-cost-usd": "dollars of the whole tree; a stream has it in its closing comment",
    "x-baton-overhead-ms": "time spent on neither conductor nor workers; a stream has it in its closing comment",
    "x-baton-why": "the planner's own line about the last plan that called a worker, if it wrote one",
    "x-baton-fallback": "only where a router planned instead: `conductor_` or `worker_` and the reason",
    "x-baton-lowered": "only where the reply's bound is below what was asked: `max_tokens=312, asked=8192, by=cost`",
    "x-baton-cut": "only where a prompt was cut to fit a worker's context, of the last such step: "
    "`step=1, messages=12, chars=40122, summary=made, summary_chars=900`; see plans.md",
    "x-baton-experience": "only where experience was not fresh: `stale; age=SECONDS` or `missing`; see experience.md",
    "x-baton-capped": "only where the request ended early with the best answer so far: the cap, `worker` or `session`",
    "x-baton-capped-by": "only where a budget made that cap: which one, what was left of it, and what to do",
    "x-ratelimit-limit-requests": "requests a minute of the key, where it has such a limit",
    "x-ratelimit-remaining-requests": "requests that are left of them",
    "x-ratelimit-limit-tokens": "tokens a minute of the key, where it has such a limit",
    "x-ratelimit-remaining-tokens": "tokens that are left of them",
    "x-ratelimit-reset-requests": "time until all of that minute is free again, if no request comes (`120ms`, `1m0s`)",
    "x-ratelimit-reset-tokens": "the same for tokens",
}
OTHER_REPLY_HEADERS = {
    "x-request-id": "id of this HTTP exchange; quote it in reports",
    "x-baton-idempotent-replay": "`true` where this is the stored reply to the same `Idempotency-Key`",
    "openai-processing-ms": "milliseconds until the reply began",
    "openai-version": "`2020-10-01`, as OpenAI says",
    "request-id": "`x-request-id` under the name that Anthropic's SDKs read, on `/v1/messages`",
    "x-baton-dropped-fields": "paths of the request properties that Baton does not know and dropped",
    "retry-after, retry-after-ms": "with 429 and 503: when to retry. Above 120 s OpenAI's SDKs do not retry",
    "x-baton-session-left-usd, x-baton-session-left-calls": "what is left of the session's limits; a stream has it in "
    "its closing comment, and at its head less what this request holds",
    "x-baton-session-left-minutes": "minutes until the session ends",
    "x-should-retry": "`true` where a retry may help, `false` where it cannot; OpenAI's SDKs obey it",
}
ERRORS = {
    "BadRequest": "the request is malformed; `param` names the field",
    "VersionRefused": "an engine refuses to load or unload a policy version; what was served is still served",
    "Unpriced": "a worker has no price, so nothing bounds its cost",
    "ConfigError": "a setting or a file cannot be used: at a start, and on the admin API for a pool file",
    "Unauthorized": "there is no key, or it is malformed, unknown, revoked or of another class",
    "Forbidden": "the key may not use that pool, or the session is frozen or was killed",
    "NotFound": "it does not exist, or is not this key's: both read the same",
    "Conflict": "it contradicts the present state: a second job of a policy, an illegal move of a version",
    "IdempotencyReused": "the `Idempotency-Key` came before with another body or path",
    "ConversationLocked": "another turn of the conversation is being made; retry",
    "IdempotencyRunning": "the first request with this `Idempotency-Key` has not ended; retry",
    "BodyTooSlow": "the body took over `BATON_BODY_S_MAX`, or came at less than `BATON_BODY_BYTES_PER_S_MIN`",
    "TooLarge": "the body is over `BATON_BODY_BYTES_MAX`",
    "RateLimited": "requests or tokens a minute, or requests in flight; retry after `retry-after`",
    "BudgetHeld": "requests under way hold the money of a budget; retry after `retry-after`",
    "BudgetExceeded": "a budget does not cover the least that this request may cost, or its next call; do not retry",
    "CapReached": "a cap ended the request before there was an answer; the message names it",
    "DeadlineExceeded": "there was no answer within the wall-clock of the request",
    "UpstreamError": "the worker failed, and so did every way around it",
    "UpstreamTimeout": "the worker did not answer in time",
    "UpstreamRateLimited": "the worker is out of capacity, and retries did not help",
    "UpstreamRefused": "the worker called the request bad; its message and code are passed on, without any key",
    "UpstreamResting": "the worker keeps failing and was not asked; carries `Retry-After`",
    "UpstreamOverloaded": "the worker answered 503 or 529, and retries did not help",
    "UpstreamInvalid": "two replies did not match `response_format`",
    "ContractMissed": "replies of two workers missed what their plan wanted of them",
    "UpstreamProtocol": "the worker's reply was malformed, or its stream was cut off",
    "Unavailable": "a part that the request needs is away; retry",
    "EngineDown": "an engine of policy versions does not answer",
    "MoneyUnavailable": "the budget store is away, or is being rebuilt: money fails closed",
    "SpoolFull": "the journal is full; Baton does nothing that it cannot log",
    "BatonError": "a bug; the gateway's log has it under the request id",
}
NEVER_SENT = {
    "PlanRefused",  # the fallback router plans instead
    "ConductorError",
    "ClientLeft",
}

ROUTES_TEXT = """
Each listener describes its routes under `/openapi.json`, without a key.

## Routes

"""
REQUEST_HEADERS_TEXT = """
## Request headers

A cap by header can only lower what settings and key allow. An unknown header that begins with `x-baton-` is a 400
`unknown_header`, which names the nearest known one. The last five headers hold for other routes too.

They may come in the body instead, as an object `baton`: with OpenAI's SDK, `extra_body={"baton": {"max_cost_usd": 0.05,
"sticky": False}}` is `x-baton-max-cost-usd: 0.05` and `x-baton-sticky: off`. Where both are sent, the body counts.

"""
BODIES_TEXT = f"""
## Bodies

A body is JSON in UTF-8 of at most `BATON_BODY_BYTES_MAX` bytes (413 `request_too_large`), nested at most
{body.NESTING_MAX} deep. Other bounds keep a small body from being costly. They are far above what clients send; a
body beyond one is a 400 that names the bound, before it costs anything:

| bound | of |
|---|---|
| {body.OBJECTS_MAX:,} | objects and arrays |
| {body.PROPERTIES_MAX:,} | properties, and {shapes.PROPERTIES_MAX} of an object whose properties are known |
| {body.VALUES_MAX:,} | values, such as the tokens of an embedding |
| {body.TEXTS_MAX:,} | texts, names of properties included; counted where one of the bounds above is near |
| `BATON_MESSAGES_MAX` | messages |
| {shapes.PARTS_MAX:,} | parts of all messages together |
| {shapes.DROPPED_MAX:,} | unknown properties, which are dropped |

"""
REPLY_HEADERS_TEXT = """
## Reply headers

Once a rollout has begun, an error carries its headers too.

"""
CHAT_TEXT = """
## `POST /v1/chat/completions`

`null` counts as absent. Baton drops a property that is not in this table, and one inside a property that OpenAI does
not know; it counts them and names them in `x-baton-dropped-fields`. With `BATON_STRICT_FIELDS=true` they are a 400.
[OpenAI's contract](openai.md) compares Baton and OpenAI, probe by probe, and says how
[structured replies](openai.md#structured-replies) are checked.

Only the step whose reply is the answer gets the client's parameters; earlier steps get text. `metadata.task_type`
groups experience; `metadata.train: "false"` keeps the rollout out of training. `metadata.grader` and
`metadata.reference` ask for a grade of the reply ([jobs](jobs.md#graders-named-by-a-request)).

"""
REFUSED_TEXT = """Always a 400 `refused_field`, at any depth and in any spelling, because it could redirect a call or
unlock something:"""
OUTCOMES_TEXT = """
## `POST /v1/outcomes`

Give `rollout_id` or `completion_id`, and exactly one of `value` (true, false, or a number from 0 to 1), `label` (up to
128 characters), `comment` and `demonstration` (up to 20,000). `source` is `client` unless given. With `step` it
judges that step of the rollout alone: only experience counts it. The header
`idempotency-key` (up to 255 characters) makes a repeated request harmless.

"""
ERRORS_TEXT = """
## Errors

Every error is `{"error": {"message": …, "type": …, "param": …, "code": …}}`. Once a stream has begun, an error is one
`data:` event, and `[DONE]` does not follow.

"""


def routes() -> Iterator[tuple[str, str, str, str]]:
    """Return (listener, method, path, summary) of every route, without building an application."""
    listeners: dict[str, tuple[Any, ...]] = {
        "public": (
            OpenAIApi,
            ResponsesApi,
            MessagesApi,
            TextsApi,
            TasksApi,
            FilesApi,
            BatchesApi,
            OutcomesApi,
            SessionsApi,
            HealthApi,
        ),
        "admin": (
            KeysApi,
            OrgsApi,
            CreditsApi,
            SessionLimitsApi,
            AuditApi,
            PoolsApi,
            PoliciesApi,
            JobsApi,
            PagesApi,
            RolloutsApi,
            FiguresApi,
            PlaygroundApi,
            HealthApi,
        ),
    }
    for listener, apis in listeners.items():
        for api in apis:
            router = api.router(cast(Any, object.__new__(api)))
            for route in (route for route in router.routes if isinstance(route, APIRoute) and route.include_in_schema):
                what = " ".join((route.endpoint.__doc__ or "").split())
                yield listener, "".join(sorted(route.methods or ())), route.path, what


def told(names: Iterable[str], sentences: dict[str, str]) -> dict[str, str]:
    """Return the sentences in the order of the names. Raises ValueError unless each name has one and no other."""
    all_names = set(names)
    if all_names != set(sentences):
        raise ValueError(f"scripts/api_reference.py: say what these are: {sorted(all_names ^ set(sentences))}")
    return sentences


def chat_headers() -> list[str]:
    """Return the request headers that the chat route documents."""
    return [*OWN_HEADERS, *CAP_HEADERS]


def reply_header_names() -> set[str]:
    """Return every header about a rollout, from the functions that write them."""
    record = RolloutRecord("", "", "", 0, "baton", "", "", [], {"capped_by": "x"}, {}, "", fallback="x", capped="x")
    record.memory = {"state": "missing", "age_s": 0.0}
    record.rounds.append(RoundRecord(1, "conductor", plan={"why": "x", "steps": [{}]}))
    lowered = {"max_tokens": 1, "asked": 2, "by": "cost"}
    cut = AttemptRecord(0, 0, cut={"messages": 1})
    record.steps.append(StepRecord(1, 0, "", "", "openai", "", None, [], lowered=lowered, attempts=[cut]))
    return {*reply_headers(record), *RateState(1, 1, 1, 1, 1.0).headers()}


def error_classes(parent: type[BatonError] = BatonError) -> Iterator[type[BatonError]]:
    """Return the classes of the error tree, parents first."""
    yield parent
    for child in parent.__subclasses__():
        if child.__module__ == BatonError.__module__:  # clients get no other errors
            yield from error_classes(child)


def given_codes() -> dict[str, set[str]]:
    """Return the codes that the gateway passes to errors in place of the class's own, by class name."""
    codes: dict[str, set[str]] = {"BadRequest": {*shapes.CODES, *FETCH_CODES.values()}}
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            name = "BadRequest" if name == "_bad" else name
            for word in node.keywords:
                if word.arg == "code" and isinstance(word.value, ast.Constant) and hasattr(errors, name):
                    codes.setdefault(name, set()).add(str(word.value.value))
    return codes


def route_items(listener: str) -> str:
    """The routes of one listener as a list."""
    return items((f"{code(method)} {code(path)}", what) for at, method, path, what in routes() if at == listener)


def error_items() -> str:
    """Status, type, meaning and codes of every error that a client can get, as a list by status."""
    codes = given_codes()
    wrong = "invalid_request_error"
    rows = [
        ("405", wrong, ["method_not_allowed"], "the path exists, the method does not"),
        ("431", wrong, ["headers_too_large"], "headers over `BATON_HEADER_BYTES_MAX`"),
    ]
    for error in error_classes():
        if error.__name__ not in NEVER_SENT:
            names = sorted({str(error.code), *codes.get(error.__name__, set())} - {"method_not_allowed"})
            rows.append((str(error.status), error.type, names, ERRORS[error.__name__]))
    rows.sort(key=lambda row: row[0])
    return items(
        (f"**{status}** {code(kind)}", f"{what} ({', '.join(map(code, names))})") for status, kind, names, what in rows
    )


def header_rows(*groups: dict[str, str]) -> list[tuple[str, ...]]:
    """Header and meaning; a cell may name two headers."""
    return [(", ".join(map(code, names.split(", "))), what) for group in groups for names, what in group.items()]


def render() -> str:
    """Return the page."""
    told((c.__name__ for c in error_classes() if c.__name__ not in NEVER_SENT), ERRORS)
    request_headers = told(chat_headers(), REQUEST_HEADERS)
    reply_headers = told(reply_header_names(), REPLY_HEADERS)
    names = ", ".join(map(code, sorted(REFUSED)))
    prefixes = ", ".join(map(code, REFUSED_PREFIXES))
    outcome = ", ".join(map(code, sorted(OUTCOME_FIELDS)))
    parts = [
        HEAD,
        ROUTES_TEXT,
        f"### Public listener\n\n{route_items('public')}\n### Admin listener\n\n{route_items('admin')}",
        REQUEST_HEADERS_TEXT,
        table(("header", "meaning"), header_rows(request_headers, OTHER_REQUEST_HEADERS)),
        BODIES_TEXT,
        REPLY_HEADERS_TEXT,
        table(("header", "meaning"), header_rows(reply_headers, OTHER_REPLY_HEADERS)),
        CHAT_TEXT,
        table(("property", "a good value", "what becomes of it"), chat_table.rows()),
        "\n" + paragraph(f"{REFUSED_TEXT} {names}, and every name that begins with {prefixes}.") + "\n",
        f"{OUTCOMES_TEXT}{paragraph(f'Properties: {outcome}.')}\n",
        ERRORS_TEXT,
        error_items(),
    ]
    return "".join(parts)
