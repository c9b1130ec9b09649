"""Chat chunks → the typed events of a streamed response. Pure, and total: whatever a worker sends, what is not of
OpenAI's shape is left out.

An item is announced with the first piece of it. Reasoning and text end when something else begins, and begin anew as
another item should they go on; calls end together at the end, since their pieces may come interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.core.openai.responses.items import call_body, text_part
from gateway.core.openai.responses.reply import (
    INCOMPLETE,
    REASONING,
    Head,
    begun,
    call_item,
    ended,
    failed,
    message_item,
    reasoning_item,
    token_logprobs,
)
from gateway.core.openai.responses.request import wants_logprobs

Event = dict[str, Any]
CALLS_MAX = 128
PARTS = {"content": "output_text", "refusal": "refusal"}


class Events:
    """The events of one response, each with its `sequence_number`. `open` first, one of the ends last."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._logprobs = wants_logprobs(head.echo)
        self._number = 0
        self._items: list[dict[str, Any]] = []  # what has been told, in the order of `output_index`
        self._open: int | None = None  # index of the message or reasoning that is being told
        self._calls: dict[int, int] = {}  # a call's index in the chunks → its index here
        self._finish: str | None = None

    def open(self) -> list[Event]:
        """The first two events."""
        return [
            self._event("response.created", response=begun(self._head)),
            self._event("response.in_progress", response=begun(self._head)),
        ]

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> list[Event]:
        """The events of one chunk; of its choices only the first counts."""
        return [event for choice in choices if choice.get("index", 0) == 0 for event in self._choice(choice)]

    def completed(self, completion: Mapping[str, Any], completed_s: int) -> list[Event]:
        """The last events of a response that was made: every item's end, then the whole object."""
        status = "incomplete" if self._finish in INCOMPLETE else "completed"
        events = list(self._close_all(status))
        if not self._items:
            events += [*self._piece("content", "", []), *self._close(status)]
        whole = ended(self._head, completion, completed_s, self._items)
        return [*events, self._event(f"response.{whole['status']}", response=whole)]

    def failed(self, error: Mapping[str, Any]) -> list[Event]:
        """The last events of a response that broke off. The second is the one that OpenAI's SDKs raise on."""
        told = {name: error.get(name) for name in ("code", "message", "param")}
        return [
            self._event("response.failed", response=failed(self._head, error, self._items)),
            self._event("error", **told, error=dict(error)),
        ]

    # ------------------------------------------------------------ pieces

    def _choice(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        delta = choice.get("delta")
        if isinstance(delta, Mapping):
            thought = next((delta[name] for name in REASONING if isinstance(delta.get(name), str)), "")
            if thought:
                yield from self._thought(thought)
            logprobs = token_logprobs(choice.get("logprobs")) if self._logprobs else []
            for name in PARTS:
                if isinstance(delta.get(name), str) and delta[name]:
                    yield from self._piece(name, delta[name], logprobs if name == "content" else [])
            calls = delta.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                if isinstance(call, Mapping):
                    yield from self._call(call)
        finish = choice.get("finish_reason")
        self._finish = finish if isinstance(finish, str) else self._finish

    def _thought(self, text: str) -> Iterator[Event]:
        if self._opened("reasoning") is None:
            yield from self._begin(reasoning_item(self._head, self._count("reasoning"), "", "in_progress"))
            yield from self._add_part({"type": "reasoning_text", "text": ""})
        self._part()["text"] += text
        yield self._event("response.reasoning_text.delta", **self._place(), delta=text)

    def _piece(self, name: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """A piece of text or of a refusal."""
        if self._opened("message") is None:
            yield from self._begin(message_item(self._head, self._count("message"), [], "in_progress"))
        kind = PARTS[name]
        item = self._item()
        if not item["content"] or item["content"][-1]["type"] != kind:
            yield from self._end_part()
            yield from self._add_part(text_part("") if kind == "output_text" else {"type": "refusal", "refusal": ""})
        part = self._part()
        if kind == "refusal":
            part["refusal"] += text
            yield self._event("response.refusal.delta", **self._place(), delta=text)
            return
        part["text"] += text
        part["logprobs"] += logprobs
        if text:
            yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=_told(logprobs))

    def _call(self, piece: Mapping[str, Any]) -> Iterator[Event]:
        index = piece.get("index")
        index = index if isinstance(index, int) else len(self._calls)
        function = piece.get("function") if isinstance(piece.get("function"), Mapping) else {}
        if index not in self._calls:
            if len(self._calls) >= CALLS_MAX:
                return
            yield from self._close("completed")
            first = {"id": piece.get("id"), "function": {"name": (function or {}).get("name")}}
            item = call_item(self._head, len(self._calls), call_body(first, "in_progress"))
            self._calls[index] = len(self._items)
            self._items.append(item)
            yield self._event("response.output_item.added", output_index=self._calls[index], item=dict(item))
        at = self._calls[index]
        text = (function or {}).get("arguments")
        if isinstance(text, str) and text:
            self._items[at]["arguments"] += text
            place = {"item_id": self._items[at]["id"], "output_index": at}
            yield self._event("response.function_call_arguments.delta", **place, delta=text)

    # ------------------------------------------------------------ items

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = len(self._items)
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=self._open, item={**item, "content": []})

    def _add_part(self, part: dict[str, Any]) -> Iterator[Event]:
        self._item()["content"].append(part)
        yield self._event("response.content_part.added", **self._place(), part=_copy(part))

    def _end_part(self) -> Iterator[Event]:
        if not self._item()["content"]:
            return
        part, place = self._part(), self._place()
        if part["type"] == "output_text":
            told = {"text": part["text"], "logprobs": _told(part["logprobs"])}
            yield self._event("response.output_text.done", **place, **told)
        elif part["type"] == "refusal":
            yield self._event("response.refusal.done", **place, refusal=part["refusal"])
        else:
            yield self._event("response.reasoning_text.done", **place, text=part["text"])
        yield self._event("response.content_part.done", **place, part=_copy(part))

    def _close(self, status: str) -> Iterator[Event]:
        """End the message or reasoning that is being told."""
        if self._open is None:
            return
        yield from self._end_part()
        self._item()["status"] = status
        yield self._event("response.output_item.done", output_index=self._open, item=_copy(self._item()))
        self._open = None

    def _close_all(self, status: str) -> Iterator[Event]:
        yield from self._close(status)
        for at in self._calls.values():
            item = self._items[at]
            place = {"item_id": item["id"], "output_index": at}
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **place, **told)
            item["status"] = status
            yield self._event("response.output_item.done", output_index=at, item=dict(item))

    def _opened(self, kind: str) -> int | None:
        return self._open if self._open is not None and self._items[self._open]["type"] == kind else None

    def _count(self, kind: str) -> int:
        return sum(item["type"] == kind for item in self._items)

    def _item(self) -> dict[str, Any]:
        return self._items[self._open or 0]

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self._item()["content"][-1]
        return part

    def _place(self) -> dict[str, Any]:
        item = self._item()
        return {"item_id": item["id"], "output_index": self._open, "content_index": len(item["content"]) - 1}

    def _event(self, kind: str, **told: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **told}


def _told(logprobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Log-probabilities as text events have them: without the bytes, which only a whole part spells out."""
    return [{**_bare(token), "top_logprobs": [_bare(one) for one in token["top_logprobs"]]} for token in logprobs]


def _bare(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "logprob": token["logprob"]}


def _copy(thing: Mapping[str, Any]) -> dict[str, Any]:
    """As it is now: an event must not change when its item grows."""
    lists = {name: [_copy(one) if isinstance(one, dict) else one for one in value]
             for name, value in thing.items() if isinstance(value, list)}  # fmt: skip
    return {**thing, **lists}
