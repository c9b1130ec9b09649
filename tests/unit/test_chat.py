"""Each property of a chat request: which values are good, what the error says of a bad one, where it goes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.chat import FIELDS, REFUSED, REFUSED_PREFIXES, ROLES, ChatRequest, parse_request
from gateway.errors import BadRequest

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
NAN = float("nan")

# name: (good values, bad values)
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "model": (["baton", "x" * 256], ["x" * 257, 1, ["baton"]]),
    "messages": ([HELLO], [{}, "Hello", 0, True]),
    "stream": ([True, False], ["true", 1, 0]),
    "stream_options": ([{}, {"include_usage": True}], [True, [], "x"]),
    "metadata": ([{}, {"k" * 64: "v" * 512}, {str(i): "" for i in range(16)}], [
        {"k" * 65: ""}, {"k": "v" * 513}, {"k": 1}, {str(i): "" for i in range(17)}, [], "x",
    ]),
    "user": (["ann", "x" * 512], ["x" * 513, 7, {}]),
    "safety_identifier": (["ann"], ["x" * 513, 7]),
    "store": ([True, False], [1, "no"]),
    "service_tier": (["auto"], [1, "x" * 65]),
    "prompt_cache_key": (["a"], [1, "x" * 513]),
    "prompt_cache_retention": (["24h"], [24, "x" * 65]),
    "n": ([1, 128], [0, -1, 129, 1.0, True, "1"]),
    "max_tokens": ([1, 10_000_000], [0, -1, 10_000_001, 2.5, True, "8", NAN]),
    "max_completion_tokens": ([1, 10_000_000], [0, 10_000_001, False, "8"]),
    "temperature": ([0, 2, 0.7], [-0.1, 2.1, NAN, True, "1", float("inf")]),
    "top_p": ([0, 1, 0.5], [-0.1, 1.01, NAN, True, "1"]),
    "frequency_penalty": ([-2, 2, 0.5], [-2.1, 2.1, NAN, False]),
    "presence_penalty": ([-2, 2, 0.5], [-2.1, 2.1, NAN, "0"]),
    "seed": ([0, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 1.0, True, "7"]),
    "stop": (["END", ["a"], ["a", "b", "c", "d"]], [[], ["a"] * 5, [1], 1, {}]),
    "logprobs": ([True, False], [1, "true"]),
    "top_logprobs": ([0, 20], [-1, 21, True, 2.0]),
    "logit_bias": ([{}, {"50256": -100}, {"1": 100.0}], [{"1": 101}, {"1": "x"}, {"1": NAN}, [], {
        str(i): 0 for i in range(4097)
    }]),
    "response_format": ([{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {}}], [
        {}, {"type": "xml"}, {"type": ["text"]}, "text", [],
    ]),
    "tools": ([[], [{}], [{}] * 128], [[{}] * 129, ["search"], {}, "x"]),
    "tool_choice": (["none", "auto", "required", {"type": "function"}], ["any", 1, []]),
    "parallel_tool_calls": ([True, False], [1, "yes"]),
    "functions": ([[{}]], [[{}] * 129, ["f"], {}]),
    "function_call": (["auto", {"name": "f"}], [1, []]),
    "reasoning_effort": (["none", "minimal", "low", "medium", "high", "xhigh"], ["huge", 1, ["low"]]),
    "verbosity": (["low", "medium", "high"], ["none", 2]),
    "prediction": ([{}], ["x", []]),
    "modalities": ([["text"], ["text", "audio"]], ["text", ["a"] * 5, [1]]),
    "audio": ([{"voice": "a"}], ["a", []]),
    "web_search_options": ([{}], [True, []]),
}  # fmt: skip


def parse(strict: bool = False, **body: Any) -> ChatRequest:
    return parse_request({"model": "baton", "messages": HELLO, **body}, messages_max=10, strict=strict)


def refusal(**body: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        parse(**body)
    assert refused.value.status == 400
    return refused.value


def test_the_table_above_covers_every_field() -> None:
    assert set(VALUES) == set(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_good_values_go_where_the_table_says(name: str) -> None:
    for value in VALUES[name][0]:
        chat = parse(**{name: value})
        assert (name in chat.params) is (FIELDS[name][0] == "last")
        if name in chat.params:
            assert chat.params[name] == value
        assert chat.dropped == ()


@pytest.mark.parametrize("name", FIELDS)
def test_bad_values_name_their_field_and_say_what_is_good(name: str) -> None:
    for value in VALUES[name][1]:
        error = refusal(**{name: value})
        assert (error.param, error.code) == (name, "invalid_type"), value
        assert error.message == f"`{name}` must be {FIELDS[name][2]}"


@pytest.mark.parametrize("name", sorted(set(FIELDS) - {"model", "messages"}))
def test_null_is_the_same_as_absent(name: str) -> None:
    absent: dict[str, Any] = {name: None}
    assert parse(**absent) == parse()


@pytest.mark.parametrize("name", ["model", "messages"])
def test_model_and_messages_are_needed(name: str) -> None:
    error = refusal(**{name: None})
    assert (error.param, error.code) == (name, "missing_required_parameter")


@pytest.mark.parametrize("name", [*sorted(REFUSED), *(f"{prefix}region_name" for prefix in REFUSED_PREFIXES)])
@pytest.mark.parametrize("value", [None, "http://evil.example", {}])
def test_what_could_redirect_or_unlock_is_refused_whatever_its_value(name: str, value: object) -> None:
    error = refusal(**{name: value})
    assert (error.param, error.code) == (name, "refused_field")


def test_unknown_properties_are_dropped_and_counted_or_refused_when_strict() -> None:
    chat = parse(zeta=1, top_k=40)
    assert chat.dropped == ("top_k", "zeta")
    assert chat.params == {}
    with pytest.raises(BadRequest) as refused:
        parse(strict=True, zeta=1, top_k=40)
    assert (refused.value.param, refused.value.code) == ("top_k", "unknown_parameter")
    assert parse(strict=True, seed=1).params == {"seed": 1}


@pytest.mark.parametrize("body", [None, [], "x", 1])
def test_a_body_is_an_object(body: object) -> None:
    with pytest.raises(BadRequest, match="JSON object"):
        parse_request(body, messages_max=10)


def test_what_baton_itself_reads() -> None:
    chat = parse(stream=True, stream_options={"include_usage": True}, metadata={"a": "b"}, user="ann", store=True)
    assert chat.stream
    assert chat.include_usage
    assert chat.metadata == {"a": "b"}
    assert chat.end_user == "ann"
    assert chat.messages == tuple(HELLO)
    assert parse() == ChatRequest(model="baton", messages=tuple(HELLO), params={})


def test_the_newer_name_of_the_end_user_goes_first() -> None:
    assert parse(user="old", safety_identifier="new").end_user == "new"
    assert parse(user="old", safety_identifier="").end_user == "old"
    assert parse(user="").end_user is None


def test_usage_is_sent_for_true_and_nothing_else() -> None:
    assert not parse(stream_options={"include_usage": "false"}).include_usage
    assert not parse(stream_options={}).include_usage


def test_the_newer_bound_on_tokens_goes_first() -> None:
    assert parse().output_tokens is None
    assert parse(max_tokens=7).output_tokens == 7
    assert parse(max_tokens=7, max_completion_tokens=9).output_tokens == 9
    assert parse(max_tokens=7, max_completion_tokens=None).output_tokens == 7


def test_choices_are_n() -> None:
    assert parse().choices == 1
    assert parse(n=3).choices == 3


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([], "messages", "empty_array"),
        (HELLO * 11, "messages", "invalid_request"),
        (["Hello"], "messages[0]", "invalid_type"),
        ([{"content": "Hello"}], "messages[0].role", "invalid_value"),
        ([*HELLO, {"role": "robot", "content": "Hello"}], "messages[1].role", "invalid_value"),
        ([{"role": ["user"], "content": "Hello"}], "messages[0].role", "invalid_value"),
        ([{"role": "user"}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "tool", "content": None}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "user", "content": 7}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": ["Hello"]}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": [{"type": "video"}]}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content", "invalid_type"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}],
            "messages[0].content[1].text",
            "invalid_type",
        ),
    ],
)
def test_bad_messages_are_named_to_the_part(messages: list[Any], param: str, code: str) -> None:
    error = refusal(messages=messages)
    assert (error.param, error.code) == (param, code)


def test_good_messages_pass_untouched() -> None:
    messages = [
        *({"role": role, "content": "x"} for role in ROLES),
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": "u"}}],
        },
        {"role": "user", "content": []},
        {"role": "tool", "tool_call_id": "1", "content": "", "name": "f"},
    ]
    assert parse(messages=copy.deepcopy(messages)).messages == tuple(messages)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)) | st.text(max_size=8), json_values, max_size=6))
def test_any_body_is_a_request_or_a_named_refusal(body: dict[str, Any]) -> None:
    for whole in (body, {"model": "baton", "messages": HELLO, **body}):
        try:
            chat = parse_request(json.loads(json.dumps(whole)), messages_max=10)
        except BadRequest:
            continue
        assert set(chat.params) <= set(FIELDS)
        assert chat.messages
