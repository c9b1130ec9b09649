"""Turns chat chunks into the typed events of a streamed response. Pure; it never raises, and ignores whatever does not
have OpenAI's form.

An item begins with its first piece. Reasoning and text end when another item begins; if they continue later, they begin
a new item. All calls end together at the end of the stream, because their pieces may be interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.core.openai.finish import INCOMPLETE
from gateway.core.openai.responses.items import citations, text_part
from gateway.core.openai.responses.reply import (
    REASONING,
    Head,
    call_item,
    failed_response,
    finished_response,
    hosted_items,
    message_item,
    reasoning_item,
    response_in_progress,
    token_logprobs,
)
from gateway.core.openai.responses.request import wants_logprobs, wants_state
from gateway.core.openai.vendor import sealed

Event = dict[str, Any]
CALLS_MAX = 128
CALL_EVENTS = {"arguments": "function_call_arguments", "input": "custom_tool_call_input"}
PARTS = {"content": "output_text", "refusal": "refusal"}


class Events:
    """Makes the events of one response, each with its `sequence_number`. Call `open` first, then `chunk` for each
    chunk, then `completed` or `failed` once."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._logprobs = wants_logprobs(head.echo)
        self._sealing = wants_state(head.echo)
        self._names = head.tool_names
        self._number = 0
        self._items: list[dict[str, Any]] = []  # the items sent so far, in the order of `output_index`
        self._open: int | None = None  # index of the unfinished message or reasoning item
        self._notes: int | None = None  # index of the reasoning item whose summary has notes
        self._calls: dict[int, int] = {}  # a call's index in the chunks → its index in `_items`
        self._finish: str | None = None

    def open(self) -> list[Event]:
        """The first two events of the response."""
        return [
            self._event("response.created", response=response_in_progress(self._head)),
            self._event("response.in_progress", response=response_in_progress(self._head)),
        ]

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> list[Event]:
        """The events of one chunk. Only the choice with index 0 counts."""
        return [event for choice in choices if choice.get("index", 0) == 0 for event in self._choice(choice)]

    def note(self, text: str) -> list[Event]:
        """The events of a line about what happens before the reply, as a part of a reasoning item's summary. Nothing
        once the reply has begun."""
        if any(index != self._notes for index in range(len(self._items))):
            return []
        events: list[Event] = []
        if self._notes is None:
            events += self._begin(reasoning_item(self._head, 0, "", "in_progress"))
            self._notes = self._open
        item = self._item()
        item["summary"].append({"type": "summary_text", "text": text})
        place = {"item_id": item["id"], "output_index": self._open, "summary_index": len(item["summary"]) - 1}
        kind = "response.reasoning_summary"
        empty, full = ({"type": "summary_text", "text": value} for value in ("", text))
        return [
            *events,
            self._event(f"{kind}_part.added", **place, part=empty),
            self._event(f"{kind}_text.delta", **place, delta=text),
            self._event(f"{kind}_text.done", **place, text=text),
            self._event(f"{kind}_part.done", **place, part=full),
        ]

    def completed(self, completion: Mapping[str, Any], completed_s: int) -> list[Event]:
        """The last events of a successful response: the end of every item, then the complete object."""
        status = "incomplete" if self._finish in INCOMPLETE else "completed"
        last_phase = "commentary" if self._calls else "final_answer"
        events = [*self._close_all(status, last_phase), *self._seal(completion)]
        if all(index == self._notes for index in range(len(self._items))):
            events += [*self._piece("content", "", []), *self._close(status, last_phase)]
        response = finished_response(self._head, completion, completed_s, self._items)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def failed(self, error: Mapping[str, Any]) -> list[Event]:
        """The last events of a response that failed. OpenAI's SDKs raise an exception on the second one."""
        details = {name: error.get(name) for name in ("code", "message", "param")}
        return [
            self._event("response.failed", response=failed_response(self._head, error, self._items)),
            self._event("error", **details, error=dict(error)),
        ]

    def _seal(self, completion: Mapping[str, Any]) -> Iterator[Event]:
        """The end of the first reasoning item, with what the vendor needs back; of a new one where there is none."""
        choices = completion.get("choices") or [{}]
        state = sealed(choices[0].get("message") or {}) if self._sealing else None
        index = next((at for at, item in enumerate(self._items) if item["type"] == "reasoning"), None)
        if state is not None and index is None:
            yield from self._begin(reasoning_item(self._head, 0, "", "completed"))
            index, self._open = self._open, None
        if index is not None and self._sealing:
            self._items[index] |= {} if state is None else {"encrypted_content": state}
            yield self._event("response.output_item.done", output_index=index, item=_copy(self._items[index]))

    # ------------------------------------------------------------ pieces

    def _choice(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        delta = choice.get("delta")
        if isinstance(delta, Mapping):
            reasoning = next((delta[name] for name in REASONING if isinstance(delta.get(name), str)), "")
            if reasoning:
                yield from self._reasoning(reasoning)
            yield from self._hosted(delta)
            logprobs = token_logprobs(choice.get("logprobs")) if self._logprobs else []
            for name in PARTS:
                if isinstance(delta.get(name), str) and delta[name]:
                    yield from self._piece(name, delta[name], logprobs if name == "content" else [])
            yield from self._citations(delta.get("annotations"))
            calls = delta.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                if isinstance(call, Mapping):
                    yield from self._call(call)
        finish = choice.get("finish_reason")
        self._finish = finish if isinstance(finish, str) else self._finish

    def _hosted(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        """The events of the items of hosted tools, each of which is whole."""
        count = sum(item["id"].startswith("ht_") for item in self._items)
        for item in hosted_items(self._head, delta, count):
            yield from self._close("completed", "commentary")
            self._items.append(item)
            place = len(self._items) - 1
            yield self._event("response.output_item.added", output_index=place, item=dict(item))
            yield self._event("response.output_item.done", output_index=place, item=dict(item))

    def _reasoning(self, text: str) -> Iterator[Event]:
        """The events of a piece of reasoning."""
        if self._open_item("reasoning") is None or self._open == self._notes:
            yield from self._begin(reasoning_item(self._head, self._count("reasoning"), "", "in_progress"))
            yield from self._add_part({"type": "reasoning_text", "text": ""})
        self._part()["text"] += text
        yield self._event("response.reasoning_text.delta", **self._place(), delta=text)

    def _piece(self, name: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """The events of a piece of text or of a refusal."""
        if self._open_item("message") is None:
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
            yield self._event(
                "response.output_text.delta", **self._place(), delta=text, logprobs=_event_logprobs(logprobs)
            )

    def _citations(self, annotations: Any) -> Iterator[Event]:
        """The events of the sources that text cites. They belong to the unfinished text, or to a new one."""
        new = citations(annotations if isinstance(annotations, list) else ())
        if new and (self._open_item("message") is None or self._part()["type"] != "output_text"):
            yield from self._piece("content", "", [])
        for citation in new:
            citations_sent = self._part()["annotations"]
            citations_sent.append(citation)
            place = {**self._place(), "annotation_index": len(citations_sent) - 1}
            yield self._event("response.output_text.annotation.added", **place, annotation=citation)

    def _call(self, piece: Mapping[str, Any]) -> Iterator[Event]:
        index = piece.get("index")
        index = index if isinstance(index, int) else len(self._calls)
        known = self._items[self._calls[index]]["type"] == "custom_tool_call" if index in self._calls else None
        custom = piece.get("type") == "custom" if known is None else known
        kind, content = ("custom", "input") if custom else ("function", "arguments")
        details = piece.get(kind)
        details = details if isinstance(details, Mapping) else {}
        if index not in self._calls:
            if len(self._calls) >= CALLS_MAX:
                return
            yield from self._close("completed", "commentary")
            first = {"id": piece.get("id"), "type": kind, kind: {"name": details.get("name")}}
            item = call_item(self._head, len(self._calls), first, "in_progress", self._names)
            self._calls[index] = len(self._items)
            self._items.append(item)
            yield self._event("response.output_item.added", output_index=self._calls[index], item=dict(item))
        at = self._calls[index]
        text = details.get(content)
        if isinstance(text, str) and text:
            self._items[at][content] += text
            place = {"item_id": self._items[at]["id"], "output_index": at}
            yield self._event(f"response.{CALL_EVENTS[content]}.delta", **place, delta=text)

    # ------------------------------------------------------------ items

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed", "commentary")
        self._open = len(self._items)
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=self._open, item={**_copy(item), "content": []})

    def _add_part(self, part: dict[str, Any]) -> Iterator[Event]:
        self._item()["content"].append(part)
        yield self._event("response.content_part.added", **self._place(), part=_copy(part))

    def _end_part(self) -> Iterator[Event]:
        if not self._item()["content"]:
            return
        part, place = self._part(), self._place()
        if part["type"] == "output_text":
            content = {"text": part["text"], "logprobs": _event_logprobs(part["logprobs"])}
            yield self._event("response.output_text.done", **place, **content)
        elif part["type"] == "refusal":
            yield self._event("response.refusal.done", **place, refusal=part["refusal"])
        else:
            yield self._event("response.reasoning_text.done", **place, text=part["text"])
        yield self._event("response.content_part.done", **place, part=_copy(part))

    def _close(self, status: str, phase: str) -> Iterator[Event]:
        """End the unfinished message or reasoning item, if there is one. `phase`: of the message."""
        if self._open is None:
            return
        yield from self._end_part()
        self._item()["status"] = status
        if self._item()["type"] == "message":
            self._item()["phase"] = phase
        first = self._open == next(at for at, item in enumerate(self._items) if item["type"] == self._item()["type"])
        if not (self._sealing and first and self._item()["type"] == "reasoning"):  # else it ends in `_seal`
            yield self._event("response.output_item.done", output_index=self._open, item=_copy(self._item()))
        self._open = None

    def _close_all(self, status: str, phase: str) -> Iterator[Event]:
        yield from self._close(status, phase)
        for at in self._calls.values():
            item = self._items[at]
            place = {"item_id": item["id"], "output_index": at}
            if item["type"] == "custom_tool_call":
                yield self._event("response.custom_tool_call_input.done", **place, input=item["input"])
            else:
                call = {"name": item["name"], "arguments": item["arguments"]}
                yield self._event("response.function_call_arguments.done", **place, **call)
                item["status"] = status
            yield self._event("response.output_item.done", output_index=at, item=dict(item))

    def _open_item(self, kind: str) -> int | None:
        """The index of the unfinished item if it is of that kind."""
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

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def _event_logprobs(logprobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Log-probabilities in the form of text events: without the bytes, which only complete parts carry."""
    return [{**_logprob(token), "top_logprobs": list(map(_logprob, token["top_logprobs"]))} for token in logprobs]


def _logprob(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "logprob": token["logprob"]}


def _copy(part: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an item or part with its lists: an event must not change when its item grows."""
    lists = {name: [_copy(element) if isinstance(element, dict) else element for element in value]
             for name, value in part.items() if isinstance(value, list)}  # fmt: skip
    return {**part, **lists}


def begun_events(response: Mapping[str, Any]) -> list[Event]:
    """The first two events of a response, as `Events.open` makes them, from its object as it is at any later time."""
    late: Mapping[str, Any] = {
        "error": None,
        "incomplete_details": None,
        "completed_at": None,
        "output": [],
        "usage": None,
    }
    first = {**response, **late, "status": "in_progress", "service_tier": "auto"}
    names = "response.created", "response.in_progress"
    return [{"type": name, "sequence_number": at, "response": first} for at, name in enumerate(names)]


def failed_events(response: Mapping[str, Any]) -> list[Event]:
    """The last events of a response in the background that failed, or was cancelled, with nothing in between."""
    error = response.get("error") or {"message": "the response was cancelled", "code": "cancelled"}
    details = {name: error.get(name) for name in ("code", "message", "param")}
    return [
        {"type": "response.failed", "sequence_number": 2, "response": dict(response)},
        {"type": "error", "sequence_number": 3, **details, "error": dict(error)},
    ]
