"""What a client asks of files and batches, the lines of an input file, and the objects of the API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Batch, FileObject

from gateway.core.openai.batches.create import MAX_COST, check_upload, keep_s, parse_batch
from gateway.core.openai.batches.lines import ERRORS_MAX, InputReader, body_of, not_served, replied
from gateway.core.openai.batches.objects import NO_TOKENS, BatchLine, BatchOrder, LineTokens, OpenBatch, UploadedFile
from gateway.errors import BadRequest

CHAT = "/v1/chat/completions"
ASKED = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    given = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "m"}} | changes
    return json.dumps({name: value for name, value in given.items() if value is not None}).encode()


def read(*texts: bytes, **limits: Any) -> tuple[list[BatchLine], list[tuple[Any, ...]]]:
    """The good lines, and the errors as (code, param, line)."""
    reader = InputReader("batch_1", CHAT, **{"line_bytes_max": 1000} | limits)
    lines = [one for text in texts for one in reader.feed(text)] + reader.end()
    return lines, [(error["code"], error["param"], error["line"]) for error in reader.errors]


def test_a_batch_is_read_with_its_options() -> None:
    headers = {MAX_COST: "0.5", "x-baton-pool": "fast"}
    expiry = {"anchor": "created_at", "seconds": 3600}
    order = parse_batch(ASKED | {"metadata": {"a": "b"}, "output_expires_after": expiry}, headers, [CHAT], 10**10)
    assert order == BatchOrder(CHAT, "file-1", "24h", {"a": "b"}, {"x-baton-pool": "fast"}, 500_000_000, 3600)
    assert order.window_s == 86_400
    assert parse_batch(ASKED | {"metadata": None}, {}, [CHAT], 7).budget_nano == 7
    assert parse_batch(ASKED, {MAX_COST: "0.5"}, [CHAT], 7).budget_nano == 7


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": None}, "endpoint"),
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"endpoint": 1}, "endpoint"),
        ({"completion_window": "24"}, "completion_window"),
        ({"completion_window": "169h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": True}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "hours": 1}}, "hours"),
        ({"model": "m"}, "model"),
    ],
)
def test_what_is_wrong_with_a_batch_is_named(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_batch(ASKED | changes, {}, [CHAT], 1)
    assert refused.value.param == param


def test_a_batch_is_an_object_and_its_budget_an_amount() -> None:
    with pytest.raises(BadRequest):
        parse_batch([], {}, [CHAT], 1)
    with pytest.raises(BadRequest) as refused:
        parse_batch(ASKED, {MAX_COST: "much"}, [CHAT], 1)
    assert refused.value.param == MAX_COST


def test_an_upload_is_for_batches_and_has_a_name() -> None:
    assert check_upload("batch", "a\nb.jsonl") == "ab.jsonl"
    assert check_upload("batch", None) == "file"
    for purpose in (None, "fine-tune"):
        with pytest.raises(BadRequest) as refused:
            check_upload(purpose, "a")
        assert refused.value.param == "purpose"
    assert keep_s({"anchor": "created_at", "seconds": "86400"}, "expires_after") == 86_400


def test_lines_are_read_however_the_file_is_cut() -> None:
    text = line("a") + b"\n\n" + line("b") + b"\r\n" + line("c")
    for at in range(len(text)):
        lines, errors = read(text[:at], text[at:])
        assert [(one.n, one.custom_id) for one in lines] == [(0, "a"), (2, "b"), (3, "c")]
        assert errors == []
    assert body_of(read(line("a"))[0][0]) == {"model": "m"}


def test_each_wrong_line_is_named() -> None:
    wrong = [
        b"{",
        b"[]",
        *(line("w", **{name: None}) for name in ("method", "url", "body")),
        line(None),
        line(7),
        line("x" * 513),
        line("w", method="GET"),
        line("w", url="/v1/embeddings"),
        line("w", body=[]),
        line("w", body={"stream": True}),
        line("w", body={"text": "x" * 1000}),
    ]
    lines, errors = read(b"\n".join([line("a"), *wrong, line("a")]))
    assert [one.custom_id for one in lines] == ["a"]
    assert errors == [
        ("invalid_json_line", None, 2),
        ("invalid_json_line", None, 3),
        ("missing_required_parameter", "method", 4),
        ("missing_required_parameter", "url", 5),
        ("missing_required_parameter", "body", 6),
        ("missing_required_parameter", "custom_id", 7),
        ("invalid_value", "custom_id", 8),
        ("invalid_value", "custom_id", 9),
        ("invalid_method", "method", 10),
        ("mismatched_endpoint", "url", 11),
        ("invalid_value", "body", 12),
        ("invalid_value", "body.stream", 13),
        ("line_too_large", None, 14),
        ("duplicate_custom_id", "custom_id", 15),
    ]


def test_a_file_has_some_lines_and_not_too_many() -> None:
    assert read(b"\n \n")[1] == [("empty_file", None, None)]
    lines, errors = read(*(line(str(n)) + b"\n" for n in range(9)), lines_max=3)
    assert (len(lines), errors) == (3, [("too_many_lines", None, None)])
    assert len(read(b"{\n" * 2 * ERRORS_MAX)[1]) == ERRORS_MAX


def test_a_line_without_an_end_is_given_up_early() -> None:
    lines, errors = read(line("a") + b"\n" + b"x" * 1001, b"y" * 10_000 + b"\n" + line("b"))
    assert [one.custom_id for one in lines] == ["a"]
    assert errors == [("line_too_large", None, 2)]


def test_results_have_openais_shape() -> None:
    one = BatchLine("batch_4f", 7, "a", line("a"))
    for usage, tokens in (
        ({"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}, (3, 4, 2, 0)),
        ({"input_tokens": 5, "output_tokens": 6, "output_tokens_details": {"reasoning_tokens": 1}}, (5, 6, 0, 1)),
        ({"total_tokens": 9, "prompt_tokens_details": None}, (0, 0, 0, 0)),
        (None, (0, 0, 0, 0)),
    ):
        good = replied(one, 200, "req_1", {"usage": usage})
        assert (good.failed, good.tokens) == (False, LineTokens(*tokens))
    bad = replied(one, 400, "req_1", {"usage": {"prompt_tokens": 3}})
    assert (bad.failed, bad.tokens) == (True, NO_TOKENS)
    assert replied(one, 200, "req_1", [1]).tokens == NO_TOKENS
    assert json.loads(bad.text)["id"] == "batch_req_4f00007"
    missing = json.loads(not_served(one, ("code", "why")).text)
    assert (missing["response"], missing["error"]) == (None, {"code": "code", "message": "why"})


def test_objects_are_those_of_the_sdk() -> None:
    file = UploadedFile("file-1", "key", "in.jsonl", "batch", 3, 10, 20).as_json()
    assert FileObject.model_validate(file, strict=True).model_dump() == file
    order = parse_batch(ASKED | {"metadata": {"a": "b"}}, {}, [CHAT], 1)
    error = {"code": "c", "message": "m", "param": None, "line": 1}
    used = LineTokens(4, 5, 2, 1)
    for batch in (
        OpenBatch("batch_1", "key", order, "validating", 10, 20),
        OpenBatch(
            "batch_1",
            "key",
            order,
            "failed",
            10,
            20,
            {"failed": 11},
            (error,),
            (3, 1, 2),
            used,
            "f1",
            "f2",
        ),
    ):
        shown = batch.as_json()
        assert Batch.model_validate(shown, strict=True).model_dump() == shown | {"model": None}
