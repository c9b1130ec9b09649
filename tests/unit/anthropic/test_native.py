"""What only Anthropic's wire can say: it stays with those who speak it, and others lack it by name."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.anthropic.native import filled, layout, without_native
from gateway.core.anthropic.request import parse_message_request
from gateway.core.anthropic.worker import Words, natives_of, worded

USE = {"type": "tool_use", "id": "t1", "name": "find", "input": {}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
TEXT = {"type": "text", "text": "a"}
OPENAI = Words("", by_litellm=False, takes=frozenset(("top_k", "thinking")))
CLAUDE = Words(
    "claude-sonnet-4-5", by_litellm=True, takes=frozenset(("thinking", "cache_control", "context_management"))
)
BEDROCK = Words("", by_litellm=True, takes=frozenset(("thinking",)))


def read(*turns: Any, **fields: Any) -> Any:
    messages = [{"role": role, "content": content} for role, content in turns] or [{"role": "user", "content": "hi"}]
    return parse_message_request(
        {"model": "m", "max_tokens": 9000, "messages": messages, **fields}, messages_max=9
    ).chat


@pytest.mark.parametrize(
    "content", [[], [TEXT], [THOUGHT, TEXT, USE, USE], [USE], [{**USE, "caller": {"type": "direct"}}]]
)
def test_a_plain_turn_needs_no_layout(content: list[dict[str, Any]]) -> None:
    assert layout(content) is None


@pytest.mark.parametrize(
    "content",
    [
        [TEXT, TEXT],
        [USE, TEXT],
        [THOUGHT, USE, THOUGHT, USE],
        [{**TEXT, "citations": [{"type": "x"}]}],
        [{**USE, "cache_control": {"type": "ephemeral"}}],
        [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}],
    ],
)
def test_a_layout_gives_the_turn_back(content: list[dict[str, Any]]) -> None:
    order = layout(content)
    assert order is not None
    thoughts = [block for block in content if block["type"] == "thinking"]
    calls = [{name: USE[name] for name in USE} for block in content if block["type"] == "tool_use"]
    assert list(filled(order, thoughts, calls)) == content
    assert list(filled(order, [], calls)) == [block for block in content if block["type"] != "thinking"]


def test_a_worker_with_another_wire_lacks_them_by_name() -> None:
    hosted = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    cited = {**TEXT, "citations": [{"type": "x"}]}
    document = {"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}
    chat = read(
        ("user", [document]), ("assistant", [hosted, cited]), ("user", "go"),
        cache_control={"type": "ephemeral"}, context_management={"edits": []},
    )  # fmt: skip
    params, own = natives_of(OPENAI, chat.params)
    params, messages, lost = worded(OPENAI, params, own, chat.messages, 100, named=True)
    assert lost == ["citations", "web_search_tool_result", "cache_control", "context_management"]
    assert [message["content"] for message in messages] == ["x", "a", "go"]
    assert not {"anthropic", "thinking"} & params.keys()
    _, kept, _ = worded(CLAUDE, *natives_of(CLAUDE, chat.params), chat.messages, 100, named=True)
    assert kept is chat.messages


@pytest.mark.parametrize(
    ("words", "thinking", "effort"),
    [
        (OPENAI, None, "low"),
        (BEDROCK, {"type": "enabled", "budget_tokens": 3000}, None),
        (CLAUDE, {"type": "enabled", "budget_tokens": 3000}, None),
    ],
)
def test_a_budget_goes_to_whoever_takes_one(words: Words, thinking: Any, effort: str | None) -> None:
    chat = read(thinking={"type": "enabled", "budget_tokens": 3000})
    params, own = natives_of(words, chat.params)
    assert (params.get("thinking"), params.get("reasoning_effort")) == (thinking, effort)
    params, _, lost = worded(words, params, own, chat.messages, 9000, named=True)
    assert lost == []


@pytest.mark.parametrize(
    ("asked", "bound", "lost"),
    [
        ({"reasoning_effort": "low"}, 4000, []),
        ({"reasoning_effort": "low"}, 500, ["thinking"]),
        ({"reasoning_effort": "low", "tool_choice": "required"}, 4000, ["reasoning_effort"]),
        ({"reasoning_effort": "none"}, 4000, []),
        ({}, 4000, []),
    ],
)
def test_a_model_that_no_longer_thinks_gets_no_thoughts(asked: dict[str, Any], bound: int, lost: list[str]) -> None:
    turns: list[Any] = [
        {"role": "assistant", "content": "a", "thinking_blocks": [THOUGHT]},
        {"role": "user", "content": "b"},
    ]
    params, messages, left_out = worded(CLAUDE, dict(asked), {}, turns, bound, named=False)
    assert left_out == lost
    assert ("thinking_blocks" not in messages[0]) == bool(lost)
    assert ("thinking" in params) == (asked.get("reasoning_effort") == "low" and not lost)


def test_messages_without_any_stay_as_they_are() -> None:
    plain: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
    ]
    assert without_native(plain, caches=False) == (plain, [])
    marked = [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]
    assert without_native(marked, caches=False) == ([{"role": "user", "content": "a"}], [])
    assert without_native(marked, caches=True) == (marked, [])
