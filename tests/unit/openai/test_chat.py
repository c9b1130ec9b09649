"""Each property of a chat request: which values are good, what the error says of a bad one, where it goes."""

from __future__ import annotations

import copy
import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import completion_create_params as openai_types

from gateway.core.openai.chat import FIELDS, ROLES, STOPS_MAX, ChatRequest, parse_request
from gateway.core.openai.options import NAME_CHARS_MAX, TOOLS_MAX
from gateway.core.openai.shapes import REFUSED, REFUSED_PREFIXES
from gateway.core.pool.workers import Capability
from gateway.errors import BadRequest

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
NAN = float("nan")

TOOL = {"type": "function", "function": {"name": "f"}}
BESIDE: dict[str, dict[str, Any]] = {  # what a property needs beside it
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL]},
    "function_call": {"functions": [{"name": "f"}]},
}
# name: (good values, bad values with OpenAI's code)
WRONG = "invalid_type"
VALUES: dict[str, tuple[list[Any], list[tuple[Any, str]]]] = {
    "model": (["baton", "x" * 256], [("x" * 257, "string_above_max_length"), (1, WRONG), (["baton"], WRONG)]),
    "messages": ([HELLO], [({}, WRONG), ("Hello", WRONG), (0, WRONG), (True, WRONG)]),
    "stream": ([True, False], [("true", WRONG), (1, WRONG), (0, WRONG)]),
    "stream_options": ([{}, {"include_usage": True}], [(True, WRONG), ([], WRONG), ("x", WRONG)]),
    "metadata": ([{}, {"k" * 64: "v" * 512}, {str(i): "" for i in range(16)}], [
        ({"k" * 65: ""}, "string_above_max_length"), ({"k": "v" * 513}, "string_above_max_length"), ({"k": 1}, WRONG),
        ({str(i): "" for i in range(17)}, "object_above_max_properties"), ([], WRONG), ("x", WRONG),
    ]),
    "user": (["ann", "x" * 512], [("x" * 513, "string_above_max_length"), (7, WRONG), ({}, WRONG)]),
    "safety_identifier": (["ann"], [("x" * 513, "string_above_max_length"), (7, WRONG)]),
    "store": ([True, False], [(1, WRONG), ("no", WRONG)]),
    "service_tier": (["auto", "default", "flex", "scale", "priority", "fast"], [(1, WRONG), ("slow", "invalid_value")]),
    "prompt_cache_key": (["a"], [(1, WRONG), ("x" * 513, "string_above_max_length")]),
    "prompt_cache_retention": (["24h", "in_memory"], [(24, WRONG), ("1h", "invalid_value")]),
    "prompt_cache_options": ([{}, {"mode": "explicit", "ttl": "30m"}], [("x", WRONG)]),
    "n": ([1, 128], [(0, "integer_below_min_value"), (-1, "integer_below_min_value"), (129, "integer_above_max_value"),
        (1.0, WRONG), (True, WRONG), ("1", WRONG)]),
    "max_tokens": ([1, 10_000_000], [(0, "integer_below_min_value"), (10_000_001, "integer_above_max_value"),
        (2.5, WRONG), (True, WRONG), ("8", WRONG), (NAN, WRONG)]),
    "max_completion_tokens": ([1, 10_000_000], [(0, "integer_below_min_value"), (False, WRONG), ("8", WRONG)]),
    "temperature": ([0, 2, 0.7], [(-0.1, "decimal_below_min_value"), (2.1, "decimal_above_max_value"), (NAN, WRONG),
        (True, WRONG), ("hot", WRONG), (float("inf"), WRONG)]),
    "top_p": ([0, 1, 0.5], [(-0.1, "decimal_below_min_value"), (1.01, "decimal_above_max_value"), (NAN, WRONG)]),
    "frequency_penalty": ([-2, 2, 0.5], [(-2.1, "decimal_below_min_value"), (2.1, "decimal_above_max_value"),
        (False, WRONG)]),
    "presence_penalty": ([-2, 2, 0.5], [(-2.1, "decimal_below_min_value"), (NAN, WRONG), ("0", WRONG)]),
    "seed": ([0, -(2**63), 2**63 - 1], [(2**63, "integer_above_max_value"), (1.0, WRONG), (True, WRONG)]),
    "stop": (["END", ["a"], ["a", "b", "c", "d"]], [([], "empty_array"),
        (["a"] * (STOPS_MAX + 1), "array_above_max_length"),
        ([1], WRONG), (1, WRONG), ({}, WRONG)]),
    "logprobs": ([True, False], [(1, WRONG), ("true", WRONG)]),
    "top_logprobs": ([0, 20], [(-1, "integer_below_min_value"), (21, "integer_above_max_value"), (2.0, WRONG)]),
    "logit_bias": ([{}, {"50256": -100}, {"1": 100.0}], [({"1": 101}, "decimal_above_max_value"), ({"1": "x"}, WRONG),
        ({"1": NAN}, WRONG), ([], WRONG), ({str(i): 0 for i in range(4097)}, "object_above_max_properties"),
        ({"hello": 1}, "invalid_value")]),
    "response_format": ([{"type": "text"}, {"type": "json_object"}], [("text", WRONG), ([], WRONG)]),
    "tools": ([[TOOL], [TOOL] * TOOLS_MAX], [([], "empty_array"), ([TOOL] * (TOOLS_MAX + 1), "array_above_max_length"),
        (["search"], WRONG), ({}, WRONG)]),
    "tool_choice": (["none", "auto", "required", TOOL], [("any", "invalid_value"), (1, WRONG), ([], WRONG)]),
    "parallel_tool_calls": ([True, False], [(1, WRONG), ("yes", WRONG)]),
    "functions": ([[{"name": "f"}]], [([{"name": "f"}] * (TOOLS_MAX + 1), "array_above_max_length"), (["f"], WRONG),
        ({}, WRONG)]),
    "function_call": (["auto", {"name": "f"}], [(1, WRONG), ("f", "invalid_value")]),
    "reasoning_effort": (["none", "minimal", "low", "medium", "high", "xhigh", "max"], [("huge", "invalid_value"),
        (1, WRONG)]),
    "verbosity": (["low", "medium", "high"], [("none", "invalid_value"), (2, WRONG)]),
    "prediction": ([{"type": "content", "content": "x"}], [("x", WRONG), ([], WRONG)]),
    "modalities": ([["text"]], [("text", WRONG), (["text"] * 3, "array_above_max_length"), ([1], WRONG), ([],
        "empty_array")]),
    "audio": ([{"voice": "alloy", "format": "mp3"}, {"voice": {"id": "v"}, "format": "wav"}], [("a", WRONG)]),
    "web_search_options": ([{}, {"search_context_size": "low"}], [(True, WRONG), ([], WRONG)]),
}  # fmt: skip


def parse(strict: bool = False, **body: Any) -> ChatRequest:
    return parse_request({"model": "baton", "messages": HELLO, **body}, messages_max=10, strict=strict)


PNG = "data:image/png;base64,iVBORw0KGgo="


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def asks(**changed: Any) -> dict[str, Any]:
    """An assistant's turn with one tool call."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **changed}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def refusal(**body: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        parse(**body)
    assert refused.value.status == 400
    return refused.value


def test_the_table_above_covers_every_field() -> None:
    assert set(VALUES) | {"moderation"} == set(FIELDS)


def test_every_property_of_openais_specification_is_known() -> None:
    """The 37 of the newest published SDK (openai 3.52); those of the installed one are read from it."""
    installed = openai_types.CompletionCreateParamsStreaming.__annotations__.keys()
    base = openai_types.CompletionCreateParamsBase.__annotations__.keys()
    assert len(FIELDS) == 37
    assert (installed | base) - FIELDS.keys() == set()


def test_a_property_that_no_worker_supports_is_refused_by_name() -> None:
    error = refusal(moderation={"model": "omni-moderation-latest"})
    assert (error.param, error.code) == ("moderation", "unsupported_parameter")


def test_a_pool_file_can_say_of_each_property_for_workers_that_it_is_not_taken() -> None:
    last = {name for name, (fate, _, _) in FIELDS.items() if fate == "last"}
    assert set(get_args(Capability)) == last - {"audio"} | {"image", "audio", "file", "stream"}


@pytest.mark.parametrize("name", VALUES)
def test_good_values_go_where_the_table_says(name: str) -> None:
    for value in VALUES[name][0]:
        chat = parse(**{**BESIDE.get(name, {}), name: value})
        is_bought = name == "service_tier" and value not in ("auto", "default")
        assert (name in chat.params) is (FIELDS[name][0] == "last" or is_bought)
        if name in chat.params:
            assert chat.params[name] == value
        assert chat.dropped == ()


@pytest.mark.parametrize("name", VALUES)
def test_bad_values_name_their_field_and_say_what_is_good(name: str) -> None:
    for value, code in VALUES[name][1]:
        error = refusal(**{**BESIDE.get(name, {}), name: value})
        assert (error.param, error.code) == (name, code), value
        assert error.message.startswith(f"`{name}` must be ")


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
def test_properties_that_redirect_or_unlock_are_refused_with_any_value(name: str, value: object) -> None:
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


def test_properties_that_baton_itself_reads() -> None:
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
    assert not parse(stream=True, stream_options={"include_usage": False}).include_usage
    assert not parse(stream=True, stream_options={}).include_usage
    assert refusal(stream=True, stream_options={"include_usage": "false"}).param == "stream_options.include_usage"
    assert parse(stream=True, stream_options={"include_obfuscation": True}).obfuscate


def test_the_newer_bound_on_tokens_goes_first() -> None:
    assert parse().output_tokens is None
    assert parse(max_tokens=7).output_tokens == 7
    assert parse(max_completion_tokens=9).output_tokens == 9
    assert parse(max_tokens=7, max_completion_tokens=None).output_tokens == 7


def test_choices_are_n() -> None:
    assert parse().choices == 1
    assert parse(n=3).choices == 3


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([], "messages", "empty_array"),
        (HELLO * 11, "messages", "array_above_max_length"),
        (["Hello"], "messages[0]", "invalid_type"),
        ([{"content": "Hello"}], "messages[0].role", "missing_required_parameter"),
        ([*HELLO, {"role": "robot", "content": "Hello"}], "messages[1].role", "invalid_value"),
        ([{"role": ["user"], "content": "Hello"}], "messages[0].role", "invalid_value"),
        ([{"role": "user"}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "tool", "content": None}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "user", "content": 7}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": ["Hello"]}], "messages[0].content[0]", "invalid_type"),
        ([{"role": "user", "content": [{"type": "video"}]}], "messages[0].content[0].type", "invalid_value"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0].type", "invalid_value"),
        ([{"role": "user", "content": [{}]}], "messages[0].content[0].type", "missing_required_parameter"),
        ([{"role": "user", "content": "x", "name": "a b"}], "messages[0].name", "invalid_value"),
        ([{"role": "user", "content": "x", "name": "n" * 65}], "messages[0].name", "string_above_max_length"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id", "missing_required_parameter"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].role", "invalid_value"),
        ([{"role": "function", "content": "x"}], "messages[0].name", "missing_required_parameter"),
        ([{"role": "assistant"}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].tool_calls", "empty_array"),
        ([{"role": "assistant", "tool_calls": [7]}], "messages[0].tool_calls[0]", "invalid_type"),
        ([asks(id=None)], "messages[0].tool_calls[0].id", "missing_required_parameter"),
        ([asks(type="magic")], "messages[0].tool_calls[0].type", "invalid_value"),
        ([asks(function=None)], "messages[0].tool_calls[0].function", "missing_required_parameter"),
        ([asks(function={"name": "f"})], "messages[0].tool_calls[0].function.arguments", "missing_required_parameter"),
        (
            [asks(function={"name": "f", "arguments": {}})],
            "messages[0].tool_calls[0].function.arguments",
            "invalid_type",
        ),
        ([asks()], "messages[0].tool_calls", "invalid_value"),
        ([asks(), *HELLO], "messages[0].tool_calls", "invalid_value"),
        ([asks(), {"role": "tool", "content": "x", "tool_call_id": "2"}], "messages[1].role", "invalid_value"),
        ([{"role": "system", "content": [image(PNG)]}], "messages[0].content[0].type", "invalid_value"),
        ([said(image("http://a.example/x.png"))], "messages[0].content[0].image_url.url", "invalid_value"),
        ([said(image("ftp://a.example/x.png"))], "messages[0].content[0].image_url.url", "invalid_value"),
        ([said(image("data:image/png,xx"))], "messages[0].content[0].image_url.url", "invalid_value"),
        ([said(image("data:image/png;base64,%%%"))], "messages[0].content[0].image_url.url", "invalid_value"),
        ([said(image("data:image/svg+xml;base64,PHN2Zz4="))], "messages[0].content[0].image_url.url", "media_type"),
        ([said(image("data:image/png;base64,/9j/4AAQ"))], "messages[0].content[0].image_url.url", "media_type"),
        ([said(image(PNG, detail="ultra"))], "messages[0].content[0].image_url.detail", "invalid_value"),
        (
            [said(image("data:image/png;base64," + "A" * 12_000_000))],
            "messages[0].content[0].image_url.url",
            "media_too_large",
        ),
        (
            [said({"type": "input_audio", "input_audio": {"data": "UklG", "format": "ogg"}})],
            "messages[0].content[0].input_audio.format",
            "invalid_value",
        ),
        (
            [said({"type": "file", "file": {"file_id": "file-1"}})],
            "messages[0].content[0].file.file_id",
            "unsupported_parameter",
        ),
        ([said({"type": "file", "file": {}})], "messages[0].content[0].file.file_data", "missing_required_parameter"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}],
            "messages[0].content[1].text",
            "missing_required_parameter",
        ),
    ],
)
def test_bad_messages_are_named_to_the_part(messages: list[Any], param: str, code: str) -> None:
    error = refusal(messages=messages)
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(("at", "wrong"), [(0, None), (1 << 20, "%"), ((1 << 20) - 1, "="), ((1 << 20) + 5, "=")])
def test_all_of_a_long_image_is_checked(at: int, wrong: str | None) -> None:
    long = list(PNG.partition(",")[2].rstrip("=") + "A" * (3 << 20))
    if wrong is not None:
        long[at] = wrong
    messages = [said(image("data:image/png;base64," + "".join(long)[: 4 * (len(long) // 4)]))]
    if wrong is None:
        assert list(parse(messages=messages).messages) == messages
    else:
        assert refusal(messages=messages).code == "invalid_value"


def test_good_messages_pass_untouched() -> None:
    messages = [
        *({"role": role, "content": "x", **({"name": "f"} if role == "function" else {})} for role in ROLES[:4]),
        {"role": "function", "name": "f", "content": None},
        {"role": "assistant", "content": "x", "reasoning_content": "hm", "refusal": "no", "audio": {"id": "a"}},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        asks(),
        {"role": "tool", "tool_call_id": "1", "content": "", "name": "f"},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "g", "input": "x"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "y"}]},
        said({"type": "text", "text": "Look"}, image(PNG, detail="high"), image("https://a.example/x.png")),
        said({"type": "input_audio", "input_audio": {"data": "UklGRgAAAABXQVZF", "format": "wav"}}),
        said({"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0xLjc=", "filename": "a.pdf"}}),
        {"role": "user", "content": []},
    ]
    chat = parse_request({"model": "m", "messages": copy.deepcopy(messages)}, messages_max=20)
    assert chat.messages == tuple(messages)
    assert chat.dropped == ()


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"top_logprobs": 2}, "top_logprobs", "invalid_parameter_combination"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs", "invalid_parameter_combination"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_parameter_combination"),
        ({"tool_choice": "auto"}, "tool_choice", "invalid_parameter_combination"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "invalid_parameter_combination"),
        ({"function_call": "auto"}, "function_call", "invalid_parameter_combination"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "invalid_parameter_combination"),
        ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions", "invalid_parameter_combination"),
        ({"modalities": ["text", "audio"]}, "audio", "missing_required_parameter"),
        ({"modalities": ["video"]}, "modalities[0]", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice",
            "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function", "missing_required_parameter"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "g"}}]}}}, "tool_choice.allowed_tools.tools[0]", "invalid_value"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", "invalid_value"),
        ({"tools": [{}]}, "tools[0].type", "missing_required_parameter"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "no spaces"}}]}, "tools[1].function.name",
            "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "n" * (NAME_CHARS_MAX + 1)}}]}, "tools[0].function.name",
            "string_above_max_length"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters", "invalid_type"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format.grammar", "missing_required_parameter"),
        ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name",
            "missing_required_parameter"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True}}},
            "response_format.json_schema.schema", "missing_required_parameter"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema":
            {"$ref": "https://a.example/s"}}}}, "response_format.json_schema.schema", "invalid_json_schema"),
        ({"prediction": {"type": "content"}}, "prediction.content", "missing_required_parameter"),
        ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction.content[0].text",
            "missing_required_parameter"),
        ({"audio": {"voice": "alloy", "format": "ogg"}}, "audio.format", "invalid_value"),
        ({"audio": {"voice": {}, "format": "wav"}}, "audio.voice.id", "missing_required_parameter"),
        ({"web_search_options": {"user_location": {"type": "exact", "approximate": {}}}},
            "web_search_options.user_location.type", "invalid_value"),
        ({"prompt_cache_options": {"ttl": "9h"}}, "prompt_cache_options.ttl", "invalid_value"),
    ],
)  # fmt: skip
def test_refusals_of_combinations_and_of_inner_values_name_the_path(
    body: dict[str, Any], param: str, code: str
) -> None:
    error = refusal(**body)
    assert (error.param, error.code) == (param, code)


def test_unknown_properties_inside_are_left_out_and_named_by_their_path() -> None:
    chat = parse(
        messages=[{"role": "user", "content": [{"type": "text", "text": "x", "sugar": {}}], "mood": "gay"}],
        tools=[{**TOOL, "sauce": 1}],
    )
    assert chat.dropped == ("messages[0].mood", "messages[0].content[0].sugar", "tools[0].sauce")
    assert chat.messages == ({"role": "user", "content": [{"type": "text", "text": "x"}]},)
    assert chat.params == {"tools": [TOOL]}
    with pytest.raises(BadRequest) as refused:
        parse(strict=True, tools=[{**TOOL, "sauce": 1}])
    assert (refused.value.param, refused.value.code) == ("tools[0].sauce", "unknown_parameter")


def test_the_needs_of_a_request_follow_from_its_properties() -> None:
    chat = parse(messages=[said(image(PNG))], seed=1, n=3, max_tokens=9, prompt_cache_key="k")
    assert chat.needs == {"image", "seed"}


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


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    "message",
    [
        {"content": "6", "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
        {"content": "6", "annotations": [{"type": "url_citation", "url_citation": {"url": "u"}}], "parsed": {"x": 1}},
        {"content": "6", "reasoning": "hm", "reasoning_content": "hm"},
        {"content": None, "audio": {"id": "audio_1", "data": "AAAA", "transcript": "6", "expires_at": 1}},
        {
            "content": None,
            "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
            "provider_specific_fields": {"web_search_results": []},
            "extra_content": {"baton": {"origin": "0123456789ab"}},
        },
    ],
)
def test_strict_mode_takes_the_message_of_a_reply_as_it_came(message: dict[str, Any]) -> None:
    """`messages.append(reply.choices[0].message)` is how every SDK continues a conversation."""
    calls = [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    calls[0]["function"]["parsed_arguments"] = {}  # type: ignore[index]
    turn = {"role": "assistant", **message}
    turn["tool_calls"] = calls if "tool_calls" not in message else None
    answer = [{"role": "tool", "tool_call_id": "c", "content": "1"}] if turn["tool_calls"] else []
    body = {"model": "baton", "messages": [user("hi"), turn, *answer, user("and 7?")]}
    chat = parse_request(body, messages_max=10, strict=True)
    assert chat.dropped == ()
    assert not {"annotations", "parsed", "function_call", "tool_calls" if not answer else ""} & set(chat.messages[1])
    assert "index" not in str(chat.messages[1])
    assert chat.messages[1].get("audio", {"id": "audio_1"}) == {"id": "audio_1"}


def test_state_of_an_unknown_vendor_is_left_out_and_named() -> None:
    turn = {"role": "assistant", "content": "x", "thinking_blocks": [{"type": "thinking"}], "extra_content": {"a": 1}}
    chat = parse_request({"model": "baton", "messages": [user("hi"), turn, user("on")]}, messages_max=10)
    assert chat.messages[1] == {"role": "assistant", "content": "x"}
    assert chat.dropped == ("messages[1].thinking_blocks", "messages[1].extra_content")


def test_only_the_known_parts_of_returned_state_are_passed_on() -> None:
    state = {
        "thinking_blocks": [{"type": "text", "text": "evil"}, {"type": "thinking", "thinking": "a", "x": 1}, "?"],
        "reasoning_details": [{"type": "reasoning.text", "text": "a", "x": {"deep": 1}}],
        "provider_specific_fields": {"thought_signatures": ["s"], "web_search_results": [{"type": "image"}]},
        "extra_content": {"baton": {"origin": "0123456789ab"}, "google": {"thought_signature": "s", "x": {}}, "y": 1},
    }
    turn = {"role": "assistant", "content": "x", **state}
    chat = parse_request({"model": "baton", "messages": [user("hi"), turn, user("on")]}, messages_max=10)
    assert chat.messages[1] == {
        "role": "assistant",
        "content": "x",
        "thinking_blocks": [{"type": "thinking", "thinking": "a"}],
        "reasoning_details": [{"type": "reasoning.text", "text": "a"}],
        "provider_specific_fields": {"thought_signatures": ["s"]},
        "extra_content": {"baton": {"origin": "0123456789ab"}, "google": {"thought_signature": "s"}},
    }


@pytest.mark.parametrize("place", ["thinking_blocks", "reasoning_details", "provider_specific_fields", "extra_content"])
def test_a_refused_name_inside_returned_state_is_refused(place: str) -> None:
    turn = {"role": "assistant", "content": "x", place: [{"deep": {"api_base": "http://127.0.0.1:1"}}]}
    with pytest.raises(BadRequest, match="api_base") as caught:
        parse_request({"model": "baton", "messages": [user("hi"), turn]}, messages_max=10)
    assert caught.value.code == "refused_field"
