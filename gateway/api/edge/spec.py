"""OpenAPI beyond paths: keys, bodies, query parameters and the one shape of errors.

The routes read bodies themselves, with limits that FastAPI does not have, so the shapes of bodies are written here.
`/openapi.json` is for people, and for tests that compare every route with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gateway.core.money.sessions import MINUTES_MAX, STATES
from gateway.service.admin.limits import COUNTS, MONEY

TEXT = {"type": "string"}
NAME = {"type": "string", "minLength": 1, "maxLength": 128}
WHOLE = {"type": "integer", "minimum": 1}
FREE = {"/livez", "/readyz", "/metrics"}
NULLABLE = {"type": ["string", "null"]}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": TEXT, "type": TEXT, "param": NULLABLE, "code": NULLABLE},
        }
    },
}
ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": TEXT, "message": TEXT}},
        "request_id": TEXT,
    },
}


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]}


LIMITS = {
    **{name: {"type": ["string", "number", "null"], "description": "dollars"} for name in MONEY},
    **{name: _or_null({**WHOLE, "maximum": most}) for name, most in COUNTS.items()},
}
RIGHTS = {
    "pools": {"type": "array", "items": TEXT},
    "workers": {"type": "array", "items": TEXT},
    "caps": {"type": "object"},
    "log_mode": {"enum": ["full", "redacted", "metadata"]},
    **{flag: {"type": "boolean"} for flag in ("train", "judges", "signals")},
    "worth": {"type": ["object", "null"]},
}
MESSAGE = _object("role", role={"enum": ["system", "developer", "user", "assistant", "tool"]}, content=TEXT)
CHAT = _object(
    *("model", "messages"),
    model=TEXT,
    messages={"type": "array", "minItems": 1, "items": MESSAGE},
    stream={"type": "boolean"},
    temperature={"type": "number", "minimum": 0, "maximum": 2},
    top_p={"type": "number", "minimum": 0, "maximum": 1},
    n={"type": "integer", "minimum": 1},
    max_tokens=WHOLE,
    max_completion_tokens=WHOLE,
    stop={"type": ["string", "array"], "items": TEXT},
    seed={"type": "integer"},
    user=TEXT,
    metadata={"type": "object", "additionalProperties": TEXT},
    tools={"type": "array", "items": {"type": "object"}},
    response_format={"type": "object"},
)
RESPONSES = _object(
    *("model", "input"),
    model=TEXT,
    input={"type": ["string", "array"]},
    instructions=TEXT,
    stream={"type": "boolean"},
    store={"type": "boolean"},
    previous_response_id=TEXT,
    max_output_tokens=WHOLE,
    metadata={"type": "object", "additionalProperties": TEXT},
)
MESSAGES = _object(
    *("model", "messages", "max_tokens"),
    model=TEXT,
    messages={"type": "array", "minItems": 1, "items": {"type": "object"}},
    max_tokens=WHOLE,
    system={"type": ["string", "array"]},
    stream={"type": "boolean"},
    stop_sequences={"type": "array", "maxItems": 4, "items": TEXT},
    tools={"type": "array", "items": {"type": "object"}},
    thinking={"type": "object"},
)
OUTCOME = _object(
    rollout_id=TEXT,
    completion_id=TEXT,
    step={"type": "integer", "minimum": 0},
    value={"type": ["number", "boolean"]},
    label=NAME,
    comment=TEXT,
    demonstration=TEXT,
    source=TEXT,
    grader_version=TEXT,
    metadata={"type": "object", "additionalProperties": TEXT},
)
WHY = {"why": {"type": "string", "maxLength": 1_000}}
CREDIT = _object(
    charge=NAME,
    key=NAME,
    org=NAME,
    window={"enum": ["life", "month", "day"]},
    usd={"type": ["string", "number"]},
    **WHY,
)
ROLE = {"enum": ["admin", "operator", "auditor", None]}
SESSION = {
    "usd": {"type": ["string", "number", "null"], "description": "dollars"},
    "calls": _or_null(WHOLE),
    "minutes": _or_null({**WHOLE, "maximum": MINUTES_MAX}),
}
PLAYGROUND = {**CHAT, "properties": {**CHAT["properties"], "key": NAME}, "required": [*CHAT["required"], "key"]}
JOB = _object("train", policy=TEXT, train={"type": "object"}, gate={"type": "object"}, auto={"type": "boolean"}, **WHY)
BODIES: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("post", "/v1/chat/completions"): CHAT,
    ("post", "/v1/responses"): RESPONSES,
    ("post", "/v1/messages"): MESSAGES,
    ("post", "/v1/messages/count_tokens"): {**MESSAGES, "required": ["model", "messages"]},
    ("post", "/v1/outcomes"): OUTCOME,
    ("post", "/v1/completions"): _object(
        *("model", "prompt"),
        model=TEXT,
        prompt={"type": ["string", "array"]},
        max_tokens=WHOLE,
        stream={"type": "boolean"},
    ),
    ("post", "/v1/embeddings"): _object("model", "input", model=TEXT, input={"type": ["string", "array"]}),
    ("post", "/v1/moderations"): _object("model", "input", model=TEXT, input={"type": ["string", "array"]}),
    ("post", "/v1/rerank"): _object(
        *("model", "query", "documents"), model=TEXT, query=TEXT, documents={"type": "array"}, top_n=WHOLE
    ),
    ("post", "/v1/images/generations"): _object("model", "prompt", model=TEXT, prompt=TEXT, n=WHOLE, size=TEXT),
    ("post", "/v1/audio/speech"): _object("model", "input", "voice", model=TEXT, input=TEXT, voice=TEXT),
    ("post", "/v1/batches"): _object(
        *("input_file_id", "endpoint", "completion_window"),
        input_file_id=TEXT,
        endpoint=TEXT,
        completion_window=TEXT,
        metadata={"type": "object", "additionalProperties": TEXT},
        output_expires_after={"type": "object"},
    ),
    ("post", "/v1/sessions"): _object("id", id=NAME, **SESSION),
    ("patch", "/admin/sessions/{public_id}/{session_id}"): _object(state={"enum": list(STATES)}, **SESSION, **WHY),
    ("post", "/admin/keys"): _object(
        "name", name=NAME, key_class={"enum": ["data", "admin"]}, role=ROLE, org=TEXT, **LIMITS, **RIGHTS, **WHY
    ),
    ("patch", "/admin/keys/{public_id}"): _object(name=NAME, role=ROLE, **LIMITS, **RIGHTS, **WHY),
    ("post", "/admin/keys/{public_id}/rotate"): _object(grace_s={"type": "integer", "minimum": 0}, **WHY),
    ("post", "/admin/orgs"): _object("name", name=NAME, **LIMITS, **WHY),
    ("patch", "/admin/orgs/{name}"): _object(**LIMITS, **WHY),
    ("post", "/admin/credits"): CREDIT,
    ("post", "/admin/playground"): PLAYGROUND,
    ("post", "/admin/jobs"): JOB,
    ("post", "/admin/jobs/check"): JOB,
    ("post", "/admin/policies"): _object(
        "directory", directory=TEXT, gate={"type": "object"}, force={"type": "boolean"}, **WHY
    ),
    ("post", "/admin/policies/{version}/canary"): _object("percent", percent={"enum": [1, 5, 25, 100]}, **WHY),
    **{
        ("post", f"/admin/policies/{{version}}/{move}"): _object(**WHY)
        for move in ("shadow", "promote", "retire", "rollback")
    },
}
UPLOAD = _object("file", "purpose", file={"type": "string", "format": "binary"}, purpose={"const": "batch"})
RECORDING = _object("file", "model", file={"type": "string", "format": "binary"}, model=TEXT, prompt=TEXT)
FORMS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("post", "/v1/files"): UPLOAD,
    ("post", "/v1/audio/transcriptions"): RECORDING,
    ("post", "/v1/audio/translations"): RECORDING,
}
SEARCH: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("key", "policy", "status", "worker", "fault", "user", "tag", "text", "since", "until"), TEXT),
    "outcome": {"enum": ["any", "none"]},
    **{name: {"type": "number"} for name in ("outcome_min", "outcome_max", "cost_min_usd", "cost_max_usd")},
}
QUERIES: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]] = {
    ("get", "/v1/files"): {"limit": WHOLE, "after": TEXT, "order": TEXT, "purpose": TEXT},
    ("get", "/v1/batches"): {"limit": WHOLE, "after": TEXT},
    ("get", "/v1/sessions"): {"limit": WHOLE, "before": TEXT},
    ("get", "/v1/budget"): {"user": TEXT},
    ("get", "/admin/sessions"): {"limit": WHOLE, "before": TEXT, "key": TEXT},
    ("get", "/admin/audit"): {"limit": WHOLE, "before": WHOLE, "target": TEXT, "actor": TEXT, "act": TEXT},
    ("get", "/admin/keys"): {"limit": WHOLE, "before": TEXT, "q": TEXT},
    ("get", "/admin/keys/{public_id}"): {"user": TEXT},
    ("get", "/admin/orgs/{name}"): {"user": TEXT},
    ("get", "/admin/overview"): {"window_s": WHOLE},
    ("get", "/admin/rollouts"): {"limit": WHOLE, "before": TEXT, **SEARCH},
    ("get", "/admin/rollouts/export"): {"before": TEXT, **SEARCH},
    ("get", "/admin/spend"): {"days": WHOLE},
    ("get", "/admin/workers"): {"window_s": WHOLE},
    ("get", "/admin/jobs"): {"policy": TEXT, "limit": WHOLE},
    ("get", "/admin/jobs/readiness"): {"policy": TEXT},
    ("get", "/admin/jobs/{job_id}/log"): {"after": {"type": "integer", "minimum": 0}},
}

CREATE = {("post", "/v1/outcomes"), ("post", "/v1/sessions")}  # answer 201 for what is new, 200 for what was there


def header_parameters(*names: str) -> dict[str, Any]:
    """The part of a route's OpenAPI that names the optional request headers it reads."""
    return {"parameters": [{"name": name, "in": "header", "schema": TEXT, "required": False} for name in names]}


def describe(app: FastAPI) -> None:
    """Make the application serve this OpenAPI."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            spec = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path, operations in spec["paths"].items():
                for method, operation in operations.items():
                    _describe(operation, method, path)
            spec.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = spec
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _describe(operation: dict[str, Any], method: str, path: str) -> None:
    operation["responses"].pop("422", None)  # FastAPI's own errors, which no route sends
    error = ANTHROPIC_ERROR if path.startswith("/v1/messages") else ERROR
    wrong = {"description": "An error", "content": {"application/json": {"schema": error}}}
    if path not in FREE:
        operation["responses"]["default"] = wrong
        operation["security"] = [{"key": []}]
    if (method, path) in CREATE:
        operation["responses"]["201"] = operation["responses"]["200"] | {"description": "Created"}
    if path == "/metrics":
        operation["responses"]["200"]["content"] = {"text/plain": {"schema": TEXT}}
    body = BODIES.get((method, path))
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    form = FORMS.get((method, path))
    if form is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    for name, schema in QUERIES.get((method, path), {}).items():
        operation.setdefault("parameters", []).append({"name": name, "in": "query", "schema": schema})
