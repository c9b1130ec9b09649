"""Text completions and embeddings: what a request may hold, and the shapes of replies."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.money.amounts import Usage
from gateway.core.openai.chat import choices_in
from gateway.core.openai.tasks.replies import reply_of, to_log
from gateway.core.openai.texts import (
    as_chat,
    check_embeddings,
    chunk_as_chat,
    parse_completion,
    parse_embedding,
)
from gateway.errors import BadRequest, UpstreamProtocol


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "Say", **fields}


@pytest.mark.parametrize("given", ["a", ["a", "b"], [1, 2, 3], [[1, 2], [3]], ["a"] * 2048])
def test_texts_and_token_ids_alone_and_in_batches(given: Any) -> None:
    assert parse_completion(ask(prompt=given)).params["prompt"] == given
    assert parse_embedding({"model": "m", "input": given}).params["input"] == given


@pytest.mark.parametrize(
    "given",
    [[], [[]], 5, {"a": 1}, ["a", 1], [1, "a"], [[1], "a"], ["a", [1]], [1.5], [True], [-1], [[-1]], ["a"] * 2049],
)
def test_other_inputs_are_refused_by_name(given: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_completion(ask(prompt=given))
    assert refused.value.param == "prompt"
    with pytest.raises(BadRequest) as refused:
        parse_embedding({"model": "m", "input": given})
    assert refused.value.param == "input"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "m"}, "prompt"),
        ({"prompt": "a"}, "model"),
        (ask(max_tokens=-1), "max_tokens"),
        (ask(logprobs=6), "logprobs"),
        (ask(logprobs=True), "logprobs"),
        (ask(n=0), "n"),
        (ask(best_of=1, n=2), "best_of"),
        (ask(best_of=2, stream=True), "best_of"),
        (ask(stream_options={}), "stream_options"),
        (ask(api_base="http://evil"), "api_base"),
        (ask(extra_headers={}), "extra_headers"),
    ],
)
def test_a_bad_completion_names_its_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_completion(body)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "m"}, "input"),
        ({"model": "m", "input": ""}, "input"),
        ({"model": "m", "input": ["a", ""]}, "input"),
        ({"model": "m", "input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"model": "m", "input": "a", "dimensions": 0}, "dimensions"),
        ({"model": "m", "input": "a", "base_url": "x"}, "base_url"),
        ("nonsense", None),
    ],
)
def test_a_bad_embedding_request_names_its_field(body: Any, param: str | None) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_embedding(body)
    assert refused.value.param == param


def test_what_is_unknown_is_dropped_or_refused() -> None:
    assert parse_completion(ask(messages=[], zeta=1)).dropped == ("messages", "zeta")
    with pytest.raises(BadRequest, match="zeta"):
        parse_completion(ask(zeta=1), strict=True)


def test_a_request_in_full() -> None:
    chat = parse_completion(
        ask(stream=True, stream_options={"include_usage": True}, user="u", metadata={"a": "b"}, n=2)
    )
    assert (chat.endpoint, chat.messages, chat.stream, chat.include_usage) == ("completions", (), True, True)
    assert (chat.end_user, dict(chat.metadata), dict(chat.params)) == ("u", {"a": "b"}, {"prompt": "Say", "n": 2})
    assert chat.needs == {"prompt", "n"}


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"prompt": "a", "n": 2}, 2),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": [1, 2, 3], "n": 2}, 2),
        ({"prompt": [[1], [2], [3]], "n": 2, "best_of": 5}, 15),
    ],
)
def test_how_many_replies_a_worker_makes(body: dict[str, Any], count: int) -> None:
    assert choices_in(body) == count


def test_a_text_completion_there_and_back() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": None, "text_offset": [0]}
    given = {"choices": [{"index": 0, "text": "hi", "logprobs": logprobs, "finish_reason": "length"}], "model": "up"}
    chat = parse_completion(ask())
    reply = reply_of(chat, as_chat(given), completion_id="cmpl-1", created_s=7, usage=Usage(1, 2))
    assert reply["object"] == "text_completion"
    assert reply["choices"] == given["choices"]
    assert (reply["id"], reply["created"], reply["model"]) == ("cmpl-1", 7, "m")
    assert reply["usage"]["total_tokens"] == 3
    assert to_log("completions", reply) == reply


@pytest.mark.parametrize("choices", [None, [], ["x"], [{"text": 5}], [{}], [{"text": None}]])
def test_a_reply_without_texts_is_a_protocol_error(choices: Any) -> None:
    with pytest.raises(UpstreamProtocol):
        as_chat({"choices": choices})


def test_chunks() -> None:
    usage: dict[str, Any] = {"choices": [], "usage": {}}
    assert chunk_as_chat(usage) == usage
    turned = chunk_as_chat({"choices": [{"index": 1, "text": "a"}, {"index": 0, "finish_reason": "stop"}]})
    assert turned["choices"] == [
        {"index": 1, "delta": {"content": "a"}},
        {"index": 0, "finish_reason": "stop", "delta": {"content": ""}},
    ]
    with pytest.raises(UpstreamProtocol):
        chunk_as_chat({"choices": [{"text": {}}]})


@pytest.mark.parametrize("asked", ["float", "base64", None])
@pytest.mark.parametrize("sent", [[0.5, -1.0, 0.25], "AAAAPwAAgL8AAIA+"])
def test_an_embedding_comes_in_the_encoding_asked_for_whichever_the_worker_knows(asked: str | None, sent: Any) -> None:
    body = {"model": "m", "input": ["a"], **({"encoding_format": asked} if asked else {})}
    data = check_embeddings({"data": [{"index": 0, "embedding": sent}]}, body)
    reply = reply_of(parse_embedding(body), data, completion_id="x", created_s=0, usage=Usage(3))
    wanted = "AAAAPwAAgL8AAIA+" if asked == "base64" else [0.5, -1.0, 0.25]
    assert reply == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": wanted}],
        "model": "m",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    assert to_log("embeddings", reply) == {**reply, "data": [], "embeddings": 1}


def test_embeddings_come_in_the_order_of_their_inputs() -> None:
    items = [{"index": 1, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}]
    chat = parse_embedding({"model": "m", "input": ["a", "b"]})
    reply = reply_of(chat, {"data": items}, completion_id="x", created_s=0, usage=Usage(3))
    assert [item["embedding"] for item in reply["data"]] == [[1.0], [2.0]]


@pytest.mark.parametrize("data", [None, [], [{}], ["x"], [{"embedding": [1.0]}] * 2])
def test_a_reply_of_another_number_of_embeddings_is_a_protocol_error(data: Any) -> None:
    with pytest.raises(UpstreamProtocol):
        check_embeddings({"data": data}, {"input": "a"})
