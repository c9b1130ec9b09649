"""Moderation, rerank, images, speech and transcription: their properties, their replies and their units."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from gateway.core.money.amounts import Usage, cost_nano
from gateway.core.money.details import details_json
from gateway.core.money.units import UNITS, units_nano
from gateway.core.openai.chat import Endpoint
from gateway.core.openai.tasks.fields import FIELDS, REQUIRED, Sound, parse_task
from gateway.core.openai.tasks.replies import (
    check_task,
    is_raw,
    logged_params,
    most_units,
    reply_of,
    to_log,
    units_of,
)
from gateway.core.pool.prices import Price
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import BadRequest, UpstreamProtocol

SOUND = Sound("a.mp3", "audio/mpeg", b"x" * 2500)
GOOD: dict[Endpoint, dict[str, Any]] = {
    "moderations": {"model": "m", "input": ["a", "b"]},
    "rerank": {"model": "m", "query": "q", "documents": ["a", {"text": "b"}]},
    "images": {"model": "m", "prompt": "p", "n": 3},
    "speech": {"model": "m", "input": "hello", "voice": "alloy"},
    "transcriptions": {"model": "m", "file": SOUND},
    "translations": {"model": "m", "file": SOUND},
}


@pytest.mark.parametrize("endpoint", GOOD)
def test_a_request_is_read_and_names_what_it_lacks(endpoint: Endpoint) -> None:
    chat = parse_task(endpoint, GOOD[endpoint] | {"user": "u", "metadata": {"a": "b"}, "odd": 1})
    assert (chat.endpoint, chat.model, chat.end_user, chat.metadata) == (endpoint, "m", "u", {"a": "b"})
    assert (chat.messages, chat.dropped) == ((), ("odd",))
    assert chat.params == {name: value for name, value in GOOD[endpoint].items() if name != "model"}
    assert endpoint in FIELDS
    for name in REQUIRED[endpoint]:
        with pytest.raises(BadRequest) as refused:
            parse_task(endpoint, {key: value for key, value in GOOD[endpoint].items() if key != name})
        assert refused.value.param == name
    with pytest.raises(BadRequest) as unknown:
        parse_task(endpoint, GOOD[endpoint] | {"odd": 1}, strict=True)
    assert unknown.value.param == "odd"


@pytest.mark.parametrize(
    ("endpoint", "changes", "param"),
    [
        ("moderations", {"input": []}, "input"),
        ("rerank", {"documents": []}, "documents"),
        ("rerank", {"documents": ["x" * (2**24 + 1)]}, "documents"),
        ("images", {"n": 11}, "n"),
        ("images", {"size": "big"}, "size"),
        ("images", {"stream": True}, "stream"),
        ("images", {"partial_images": 1}, "partial_images"),
        ("speech", {"input": ""}, "input"),
        ("speech", {"input": "x" * 4097}, "input"),
        ("speech", {"voice": 1}, "voice"),
        ("speech", {"stream_format": "sse"}, "stream_format"),
        ("transcriptions", {"file": "a"}, "file"),
        ("transcriptions", {"stream": True}, "stream"),
        ("translations", {"temperature": 2}, "temperature"),
    ],
)
def test_what_is_wrong_is_named(endpoint: Endpoint, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_task(endpoint, GOOD[endpoint] | changes)
    assert refused.value.param == param


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(BadRequest):
        parse_task("images", [])


def test_an_upload_shows_no_bytes() -> None:
    assert "xxx" not in str(GOOD["transcriptions"])
    assert logged_params({"file": SOUND, "language": "en"}) == {
        "file": {"name": "a.mp3", "type": "audio/mpeg", "bytes": 2500},
        "language": "en",
    }


@pytest.mark.parametrize(
    ("endpoint", "reply"),
    [
        ("moderations", {"results": None}),
        ("rerank", {"results": [1]}),
        ("images", {}),
        ("transcriptions", {"text": None}),
        ("speech", {"content": b"", "content_type": "audio/mpeg"}),
    ],
)
def test_a_reply_without_what_it_promises_is_refused(endpoint: Endpoint, reply: dict[str, Any]) -> None:
    with pytest.raises(UpstreamProtocol):
        check_task(endpoint, reply)


def test_a_reply_goes_out_as_it_came_under_the_clients_name() -> None:
    reply = check_task("moderations", {"results": [], "model": "vendor", "choices": []})
    chat = parse_task("moderations", GOOD["moderations"])
    made = reply_of(chat, reply, completion_id="x", created_s=1, usage=Usage())
    assert made == {"results": [], "model": "m"}
    assert check_task("speech", {"content": b"a", "content_type": "audio/mpeg"})["content"] == b"a"
    assert [is_raw("transcriptions", {"response_format": form}) for form in ("vtt", "json", None)] == [
        True,
        False,
        False,
    ]
    assert (is_raw("speech", {}), is_raw("images", {"response_format": "text"})) == (True, False)


def test_the_log_keeps_no_bytes() -> None:
    assert to_log("speech", {"content": b"abc", "content_type": "audio/mpeg"}) == {
        "content_type": "audio/mpeg",
        "bytes": 3,
    }
    assert to_log("transcriptions", {"content": "WEBVTT", "content_type": "text/plain"})["text"] == "WEBVTT"
    assert to_log("images", {"data": [{"b64_json": "x", "url": "u"}]}) == {"data": [{"url": "u"}]}
    assert to_log("rerank", {"results": []}) == {"results": []}
    assert to_log("embeddings", {"data": [1, 2]}) == {"data": [], "embeddings": 2}
    assert to_log("chat", {"choices": []}) == {"choices": []}


@pytest.mark.parametrize(
    ("endpoint", "body", "units"),
    [
        ("moderations", {"input": "a"}, {"texts": 1}),
        ("moderations", GOOD["moderations"], {"texts": 2}),
        ("rerank", {"documents": ["a"] * 101}, {"searches": 2}),
        ("images", {}, {"images": 1}),
        ("images", GOOD["images"], {"images": 3}),
        ("speech", GOOD["speech"], {"characters": 5}),
        ("translations", GOOD["translations"], {"seconds": 3}),
    ],
)
def test_a_request_has_a_most_number_of_units(endpoint: Endpoint, body: dict[str, Any], units: dict[str, int]) -> None:
    assert most_units(endpoint, body) == units
    assert units.keys() <= UNITS.keys()


@pytest.mark.parametrize(
    ("reply", "seconds"),
    [
        ({"duration": 1.2}, 2),
        ({"duration": "1.2"}, 2),
        ({"duration": "long"}, 3),
        ({"usage": {"seconds": 1}}, 1),
        ({"usage": {"seconds": True}}, 3),
        ({"usage": {"seconds": 99}}, 3),
        ({}, 3),
    ],
)
def test_a_recording_costs_the_seconds_that_the_worker_reports(reply: dict[str, Any], seconds: int) -> None:
    assert units_of("transcriptions", GOOD["transcriptions"], reply) == {"seconds": seconds}


def test_other_replies_cost_what_was_made() -> None:
    assert units_of("images", GOOD["images"], {"data": [{}]}) == {"images": 1}
    assert units_of("images", GOOD["images"], {"data": [{}] * 9}) == {"images": 3}
    assert units_of("speech", GOOD["speech"], {}) == {"characters": 5}


def test_units_cost_their_price_rounded_up_and_are_no_tokens() -> None:
    price = Price(unit_usd=Decimal("0.006"), input_usd_per_mtok=Decimal(2))
    assert units_nano(price, {"seconds": 1, "cached_tokens": 5}) == 100_000
    assert units_nano(Price(unit_usd=Decimal(15)), {"characters": 1}) == 15_000
    assert units_nano(Price(), {"images": 3}) == 0
    assert cost_nano(price, Usage(10, 0, details={"images": 2})) == 20_000 + 12_000_000
    assert details_json({"images": 2, "cached_tokens": 1})["prompt_tokens_details"] == {"cached_tokens": 1}


def test_a_worker_is_priced_by_its_task() -> None:
    given: dict[str, Any] = {"name": "w", "handle": "hand", "kind": "openai", "url": "http://x/v1", "model": "m"}
    spec = WorkerSpec(**given, task="images", price=Price(unit_usd=Decimal("0.04")))
    assert "unit_usd" in spec.identity
    tokens = Price(input_usd_per_mtok=Decimal(1), output_usd_per_mtok=Decimal(2))
    assert "unit_usd" not in WorkerSpec(**given, task="images", price=tokens).identity
    with pytest.raises(ValueError, match="priced by tokens"):
        WorkerSpec(**given, price=Price(unit_usd=Decimal(1)))
    with pytest.raises(ValueError, match="needs input_usd_per_mtok"):
        WorkerSpec(**given, task="images", price=Price(input_usd_per_mtok=Decimal(1)))
    with pytest.raises(ValueError, match="has no task images"):
        WorkerSpec(name="w", handle="hand", kind="tool", url="http://x", task="images")
