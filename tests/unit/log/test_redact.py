"""Redaction: each pattern, what must survive, the three modes, and that time stays linear."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.access.keys import mint
from gateway.core.log import redact
from gateway.core.log.redact import (
    DEPTH_MAX,
    FROM_OUTSIDE,
    LONG_CHARS,
    NOBODYS_TEXT,
    ROUND_FROM_OUTSIDE,
    SECRET,
    STEP_FROM_OUTSIDE,
    TOKEN_FIELDS,
    Redactor,
    apply_mode,
    is_data,
    luhn,
    scrub,
)
from gateway.core.log.rollout import AttemptRecord, RolloutRecord, RoundRecord, StepRecord, as_payload
from gateway.core.loop.experience.likeness import question_text
from tests.records import a_rollout, a_round, a_step

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\nabc+/=\n-----END RSA PRIVATE KEY-----"
LEAKS = [
    "sk-abcdefghijklmnop1234",
    "sk-proj-AbC_def-0123456789abcdefghij",
    "sk-ant-api03-AAAAAAAAAAAAAAAAAAAA1-x",
    "sk_live_0123456789abcdefghij",
    "AIzaSyA0123456789abcdefghijklmnopqrstuv",
    mint("data")[0],
    mint("admin")[0],
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "github_pat_11ABCDEFG0123456789_abcdefghijkl",
    "glpat-0123456789abcdefghij",
    "hf_abcdefghijklmnopqrstuvwxyzABCDEF",
    "AKIAIOSFODNN7EXAMPLE",
    "xoxb-123456789012-abcdefghij",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcDEF123456_-x",
]


@pytest.mark.parametrize("secret", LEAKS, ids=range(len(LEAKS)))  # two are drawn anew each run
@pytest.mark.parametrize("around", ["{}", "key={}", "use '{}', please", "a\n{}\nb", '{{"k": "{}"}}', "({})."])
def test_known_secrets_go(secret: str, around: str) -> None:
    text = scrub(around.format(secret))
    assert secret not in text
    assert secret[6:] not in text
    assert SECRET in text


@pytest.mark.parametrize("secret", [*LEAKS, PEM, "a-known-secret"], ids=range(len(LEAKS) + 2))
def test_they_go_from_long_texts_too(secret: str) -> None:
    page = "w" * LONG_CHARS
    text = Redactor(["a-known-secret"]).scrub(f"{page} {secret} {page}")
    assert text == f"{page} {SECRET} {page}"


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("Authorization: Bearer abcdef0123456789abcdef", f"Authorization: Bearer {SECRET}"),
        ("BEARER abcdef0123456789abcdef!", f"BEARER {SECRET}!"),
        ("postgres://ann:hunter2@db/x and more", f"postgres://{SECRET}@db/x and more"),
        ("https://h/v1?a=1&api_key=abcdef12#top", f"https://h/v1?a=1&api_key={SECRET}#top"),
        ("GET /x?key=AbCdEf123 HTTP", f"GET /x?key={SECRET} HTTP"),
        (f"a {PEM} b", f"a {SECRET} b"),
        ("-----BEGIN PRIVATE KEY-----\nMIIEow", SECRET),
        (PEM.replace("\n", "\\n"), SECRET),
    ],
)
def test_secrets_in_their_surroundings(text: str, scrubbed: str) -> None:
    assert scrub(text) == scrubbed


@pytest.mark.parametrize(
    "text",
    [
        "the task-force asked for a desk-top and sk-learn",
        "What is 17 + 25? Answer 4111-ish.",
        "see https://example.org/a?page=2&sort=up and mail us",
        "the bearer of this letter is a friend of mine",
        "host:port@place is odd but http://a.b/c:d is fine",
        "id 0199c5f0-6b1a-7c55-8d2e-0123456789ab, sha e3b0c44298fc1c149afbf4c8996fb92427ae41e4",
        "x" * 5000,
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert scrub(text) == text
    assert Redactor().scrub_text(text, personal=True) == text


def test_values_given_are_removed_wherever_they_are() -> None:
    redactor = Redactor(["hunter2-provider-key", "hunter2-provider-key-longer", "short", ""])
    found = redactor.scrub({"a": ["x hunter2-provider-key y", {"hunter2-provider-key-longer": 1}], "b": "short"})
    assert found == {"a": [f"x {SECRET} y", {SECRET: 1}], "b": "short"}


def test_fields_named_after_secrets_are_emptied_but_schemas_stay() -> None:
    found = scrub({"Authorization": "x", "api-key": "y", "password": {"type": "string"}, "n": [1, None, True, 1.5]})
    expected = {"Authorization": SECRET, "api-key": SECRET, "password": {"type": "string"}, "n": [1, None, True, 1.5]}
    assert found == expected


def test_nesting_is_bounded() -> None:
    deep: Any = "bottom"
    for _ in range(5_000):
        deep = [deep]
    text = json.dumps(scrub(deep))
    assert text.count("[[") <= DEPTH_MAX + 2
    assert "too deep" in text


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("write to ann.b+c@mail.example.org now", "write to [email] now"),
        ("call +49 170 1234567 today", "call [phone] today"),
        ("call +1 (555) 123-4567.", "call [phone]."),
        ("(555) 123-4567", "[phone]"),
        ("555-123-4567, or 030 1234567", "[phone], or [phone]"),
        ("card 4111 1111 1111 1111 expires", "card [card] expires"),
        ("5500-0000-0000-0004", "[card]"),
        ("IBAN DE89 3704 0044 0532 0130 00.", "IBAN [iban]."),
        ("GB82WEST12345698765432", "[iban]"),
    ],
)
def test_personal_data_goes_in_redacted_mode_only(text: str, redacted: str) -> None:
    assert Redactor().scrub_text(text, personal=True) == redacted
    assert scrub(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "pi is 3.14159265358979, e is 2.718281828459045",
        "4111 1111 1111 1112 has a wrong check digit",
        "0000 0000 0000 0000",
        "DE89 3704 0044 0532 0130 02 is no IBAN",
        "2024-01-02 03:04:05, 10-20-30, 12 * 345 = 4140",
        "order 20240102030405",
        "a@b, @handle, x@localhost",
        "1 000 000 000 people",
    ],
)
def test_numbers_that_are_nobodys_stay(text: str) -> None:
    assert Redactor().scrub_text(text, personal=True) == text


def test_luhn() -> None:
    assert luhn("378282246310005")
    assert not luhn("378282246310006")
    assert not luhn("0" * 16)
    assert not luhn("42")


@given(st.text(max_size=200), st.sampled_from(LEAKS), st.text(max_size=200))
def test_no_surroundings_hide_a_secret(before: str, secret: str, after: str) -> None:
    assert secret not in Redactor().scrub_text(f"{before} {secret} {after}", personal=True)


@pytest.mark.parametrize(
    "text",
    [
        "sk-" * 100_000,
        "sk-" + "a" * 300_000,
        "-----BEGIN PRIVATE KEY-----" * 3_000,
        "a@" * 100_000,
        "a." * 150_000 + "@",
        "1 " * 150_000,
        "+1" * 150_000,
        "(1" * 150_000,
        "0" * 300_000,
        "AA00" * 75_000,
        "://" * 100_000,
        "a" * 300_000 + "://",
        "?key=" * 60_000,
        "eyJ" * 100_000,
        "bearer " * 40_000,
    ],
)
def test_no_text_takes_long(text: str) -> None:
    started = time.process_time()
    Redactor(["some-provider-key"]).scrub_text(text, personal=True)
    assert time.process_time() - started < 2.0


# ---------------------------------------------------------------- modes


def a_payload(text: str = "What is 2+2?") -> dict[str, Any]:
    record = a_rollout(
        request={"model": "baton", "max_tokens": 5, "stream": True, "messages": [{"role": "user", "content": text}]},
        rounds=[a_round(plan={"steps": [{"worker": "quill", "task": f"Solve: {text}", "see": []}]})],
        steps=[a_step(0, task=f"Solve: {text}", messages=[{"role": "user", "content": text}], reply=f"It says {text}")],
        error={"message": f"bad: {text}", "type": "t", "code": "c", "param": None},
        tags={"note": text},
    )
    return dict(as_payload(record))


def test_full_keeps_everything_that_is_no_secret() -> None:
    payload = a_payload("mail ann@example.org")
    assert apply_mode(payload, "full") == payload


def test_secrets_go_in_every_mode_and_the_token_ids_with_them() -> None:
    secret = "sk-abcdefghijklmnop1234"
    for mode in ("full", "redacted", "metadata"):
        kept = apply_mode(a_payload(f"my key is {secret}"), mode)
        assert secret not in json.dumps(kept)
        assert all(kept["rounds"][0][name] == [] for name in TOKEN_FIELDS)


KNOWN = 'pä"ss\\w0rd-of-a-tool'
DEEP: list[Any] = []
for _ in range(80):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value",
    [
        "a line\nsk-abcdefghijklmnop1234",
        "tab\tbearer abcdefghijklmnop1234",
        f"it is {KNOWN}",
        "postgres://ann:s3cret@db",
        "\x01sk_abcdefghijklmnop1234",
        "https://h/x?a=1&api_key=abcdef1",
        "see?KEY=abcdef1",
        {"password": "hunter2"},
        {"PA\u017fSWORD": "hunter2"},
        {"X-API-\u212aey": "hunter2"},
        {"authorization": "x", "other": 1},
        {"pr\u0131vate_key": "hunter2"},
        {"sk-abcdefghijklmnop1234": 1},
        DEEP,
        {"half": "\ud800 sk-abcdefghijklmnop1234"},
        {"number": 10**30, "key": "sk-abcdefghijklmnop1234"},
        (("AKIAABCDEFGHIJKLMNOP",),),
    ],
)
def test_a_search_of_the_json_finds_whatever_a_walk_would_remove(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = a_payload() | {"reply": {"choices": [{"message": {"content": value}}]}}
    kept = apply_mode(payload, "full", Redactor([KNOWN]))
    monkeypatch.setattr(Redactor, "_is_clean", lambda self, payload: False)
    assert kept == apply_mode(payload, "full", Redactor([KNOWN]))
    assert kept["reply"] != payload["reply"]
    assert kept["rounds"][0]["plan_token_ids"] == []


@pytest.mark.parametrize("text", ["a = b", "see https://example.org/a", "ann@example.org", "größer, 大きい", "key: x"])
def test_a_clean_payload_is_not_walked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[Any] = []
    monkeypatch.setattr(Redactor, "_walk", lambda self, value, personal, depth: walked.append(value))
    payload = a_payload(text)
    assert apply_mode(payload, "full", Redactor([KNOWN])) == payload
    assert walked == []


def test_a_rollout_of_many_shallow_parts_is_not_walked_for_its_nesting(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[Any] = []
    monkeypatch.setattr(redact, "check_nesting", walked.append)
    payload = a_payload()
    payload["steps"] = [payload["steps"][0] | {"task": f"way {n}", "attempts": [{"worker": None}]} for n in range(80)]
    assert apply_mode(payload, "full", Redactor([KNOWN])) == payload
    assert walked == []


OWN = {  # texts that Baton makes itself, and parts that are looked through or left alone by themselves
    RolloutRecord: {"id", "key_id", "pool_hash", "completion_id", "request_id", "parent_id", "pool_revision", "status"}
    | {"log_mode", "rounds", "steps"},
    RoundRecord: {"prompt_hash", "schema_hash"},
    StepRecord: {"kind", "see", "status", "child_rollout_id"},
}


@pytest.mark.parametrize(
    ("kind", "searched"),
    [(RolloutRecord, FROM_OUTSIDE), (RoundRecord, ROUND_FROM_OUTSIDE), (StepRecord, STEP_FROM_OUTSIDE)],
)
def test_every_field_that_may_hold_text_is_searched(kind: Any, searched: tuple[str, ...]) -> None:
    numbers = {"int", "float", "bool", "int | None", "float | None", "list[float] | None"}
    texts = {one.name for one in fields(kind) if one.type not in numbers}
    assert texts - OWN[kind] - set(NOBODYS_TEXT) == set(searched)


def test_a_provider_key_in_an_upstream_error_is_removed() -> None:
    payload = a_payload("plain") | {"error": {"message": "401 for k3y-of-provider"}}
    kept = apply_mode(payload, "full", Redactor(["k3y-of-provider"]))
    assert kept["error"] == {"message": f"401 for {SECRET}"}


def test_redacted_takes_personal_data_out_of_text_and_leaves_ids() -> None:
    payload = a_payload("mail ann@example.org") | {"end_user": "ann@example.org"}
    kept = apply_mode(payload, "redacted")
    assert "ann@example.org" not in json.dumps(kept)
    assert question_text(kept["request"]["messages"]) == "mail [email]"
    assert kept["rounds"][0]["plan_token_ids"] == []
    for name in ("id", "key_id", "completion_id", "pool_hash", "cost_nano", "created_us"):
        assert kept[name] == payload[name]


def test_redacted_without_personal_data_keeps_the_token_ids() -> None:
    payload = a_payload()
    assert apply_mode(payload, "redacted") == payload


@pytest.mark.parametrize("mode", ["metadata", "anything else"])
def test_metadata_keeps_no_text(mode: str) -> None:
    payload = a_payload("A-CANARY")
    kept = apply_mode(payload, mode)
    assert "CANARY" not in json.dumps(kept)
    assert kept["request"] == {"model": "baton", "max_tokens": 5, "stream": True}
    assert kept["error"] == {"type": "t", "code": "c"}
    assert kept["rounds"][0]["plan"] == {"steps": [{"worker": "quill", "task": None, "see": []}]}
    assert all(kept["rounds"][0][name] == [] for name in TOKEN_FIELDS)
    for name in ("worker", "status", "prompt_tokens", "cost_nano", "started_us", "attempts", "see"):
        assert kept["steps"][0][name] == payload["steps"][0][name]
    assert kept["rounds"][0]["completion_tokens"] == 3


def test_odd_payloads_of_refused_requests_are_taken() -> None:
    odd = {"rounds": [{"plan": {"steps": "x"}}], "steps": [], "request": ["not", "an", "object"], "error": None}
    assert apply_mode(odd, "metadata")["request"] == {}
    assert apply_mode(odd, "metadata")["rounds"][0]["plan"] is None
    assert apply_mode(odd, "full") == odd


def test_the_payload_given_is_not_changed() -> None:
    payload = a_payload("my key is sk-abcdefghijklmnop1234")
    before = json.dumps(payload, sort_keys=True)
    for mode in ("full", "redacted", "metadata"):
        apply_mode(payload, mode)
    assert json.dumps(payload, sort_keys=True) == before


def test_a_payload_of_usual_size_takes_milliseconds() -> None:
    payload = a_payload("The quick brown fox jumps over 13 lazy dogs; see https://example.org/?q=1. " * 400)
    started = time.process_time()
    apply_mode(payload, "redacted")
    assert time.process_time() - started < 1.0


# ---------------------------------------------------------------- verdicts


def test_why_a_reply_was_rejected_is_text_of_the_reply() -> None:
    why = "$: 'write to ann@example.org' is not of type 'integer'"
    step = a_step(0, attempts=[AttemptRecord(1, 2)])
    step.attempts[0].verdict = {"by": "contract", "accept": False, "why": why}
    payload = as_payload(a_rollout(steps=[step]))
    full, redacted, bare = (
        apply_mode(payload, mode)["steps"][0]["attempts"][0]["verdict"] for mode in ("full", "redacted", "metadata")
    )
    assert full["why"] == why
    assert redacted["why"] == why.replace("ann@example.org", "[email]")
    assert bare == {"by": "contract", "accept": False, "why": ""}


DATA = base64.b64encode(bytes(range(256)) * 200).decode()


@pytest.mark.parametrize("mode", ["full", "redacted"])
def test_long_data_is_kept_as_it_is(mode: str) -> None:
    url = f"data:image/png;base64,{DATA}"
    payload = a_payload()
    parts = [{"image_url": {"url": url}}, {"text": f"my key is {LEAKS[0]}"}]
    payload["request"] = {"messages": [{"content": parts}], "audio": DATA}
    logged = apply_mode(payload, mode)["request"]
    assert logged["messages"][0]["content"][0]["image_url"]["url"] == url
    assert logged["audio"] == DATA
    assert LEAKS[0] not in str(logged)


@pytest.mark.parametrize(
    ("text", "data"),
    [
        (DATA, True),
        (f"data:audio/wav;base64,{DATA}", True),
        (f"data:text/plain;charset=utf-8;base64,{DATA}", True),
        (f"{DATA} {DATA}", False),
        (f"{DATA}é", False),
        (f"data:{LEAKS[0]};base64,{DATA}", False),
        (f"hello,{DATA}", False),
        (f"data:image/png;base64,{DATA},{DATA}", False),
    ],
)
def test_data_is_base64_without_a_break(text: str, data: bool) -> None:
    assert is_data(text) is data
