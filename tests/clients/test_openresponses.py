"""The seven requests of OpenResponses' compliance tests (openresponses.org), to the conductor and to a worker by name.

Each reply must have every property that the specification requires, and those that it defines in its form.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.clients import strict
from tests.clients.conftest import Facts

HEART = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8Dwn4EIwDiqEAAAZ/wDAXHQ/PkAAAAA"
    "SUVORK5CYII="
)
REQUIRED = (  # of a ResponseResource
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage", "max_tool_calls"),
    *("max_output_tokens", "store", "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key"),
    "user",
)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
CALLED = [
    ("response.output_item.added", "function_call"),
    ("response.function_call_arguments.delta", None),
    ("response.function_call_arguments.done", None),
    ("response.output_item.done", "function_call"),
]


def message_of(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


SEEN = [{"type": "input_text", "text": "What is in this image?"}, {"type": "input_image", "image_url": HEART}]
TEMPLATES: dict[str, tuple[dict[str, Any], bool, str]] = {  # name: (body, streams, type of an item of the output)
    "basic-response": ({"input": [message_of("user", "Say hello in three words.")]}, False, "message"),
    "streaming-response": ({"input": [message_of("user", "Count from 1 to 5.")]}, True, "message"),
    "system-prompt": (
        {"input": [message_of("system", "Talk like a pirate."), message_of("user", "Hello.")]},
        False,
        "message",
    ),
    "tool-calling": (
        {"input": [message_of("user", "The weather in Paris?")], "tools": [WEATHER]},
        False,
        "function_call",
    ),
    "tool-calling-streaming": (
        {"input": [message_of("user", "The weather in Paris?")], "tools": [WEATHER]},
        True,
        "function_call",
    ),
    "image-input": ({"input": [message_of("user", SEEN)]}, False, "message"),
    "multi-turn": (
        {
            "input": [
                message_of("user", "My name is Alice."),
                message_of("assistant", "Hello Alice!"),
                message_of("user", "What is my name?"),
            ]
        },
        False,
        "message",
    ),
}


@pytest.mark.parametrize("model", ["baton", "scribe"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_of_openresponses(facts: Facts, model: str, name: str) -> None:
    body, streams, kind = TEMPLATES[name]
    headers = {"authorization": f"Bearer {facts.key}"}
    asked = {"model": model, "stream": streams, **body}
    reply = httpx.post(f"{facts.base_url}/responses", json=asked, headers=headers, timeout=30)
    assert reply.status_code == 200, reply.text
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")] if streams else []
    response = events[-1]["response"] if streams else reply.json()
    assert [one for one in REQUIRED if one not in response] == []
    assert strict.problems(Response, response) == []
    assert [problem for event in events for problem in strict.problems(ResponseStreamEvent, event)] == []
    assert response["status"] == "completed"
    assert kind in [item["type"] for item in response["output"]]
    if streams and kind == "function_call":
        seen = {(one["type"], (one.get("item") or {}).get("type")) for one in events}
        assert set(CALLED) <= seen
