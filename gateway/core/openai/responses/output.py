"""The items of a reply as they grow out of the deltas of a chat message, and the events that tell of it. Pure.

An item begins with its mark (core/openai/marks.py), or with its first piece where the worker gives no marks. It ends
when another one begins. Calls without marks end together at the end of the reply, because their pieces may be
interleaved. A whole message is cut into deltas first, so that items are the same whole and streamed.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.core.openai import marks
from gateway.core.openai.responses.bodies import (
    NO_NAMES,
    Names,
    call_body,
    call_prefix,
    citations,
    event_logprobs,
    item_id,
    text_part,
    token_logprobs,
)

Event = dict[str, Any]
Item = dict[str, Any]
FORMAT = "openai-responses-v1"  # of the details of a message that a worker of this API needs back
ENCRYPTED, HOSTED_ITEM = "reasoning.encrypted", "responses.item"  # types of these details
REASONING = ("reasoning_content", "reasoning")  # the names that workers use for reasoning text
CALLS_MAX = 128
CALL_EVENTS = {"arguments": "function_call_arguments", "input": "custom_tool_call_input"}
PARTS = {"content": "output_text", "refusal": "refusal"}
COMMENTARY, FINAL = "commentary", "final_answer"  # phases, where no mark tells one
_OWN = re.compile(r"(?!(?:msg|fc|ctc|rs|resp)_)[a-z]{1,8}_[\w-]{1,200}")
_HEX = "0" * 32  # of ids that are taken off again
_REASONING_PARTS = {marks.SUMMARY: ("summary", "summary_text"), marks.TEXT: ("content", "reasoning_text")}


class Output:
    """The items of one reply. `response_hex`: the ids of its items contain it. `names`: of the tools as the client
    knows them. `logprobs`: whether it wants those. `sealing`: whether the first reasoning item ends with the reply."""

    def __init__(self, response_hex: str, names: Names, *, logprobs: bool = False, sealing: bool = False) -> None:
        self.items: list[Item] = []  # in the order of `output_index`
        self.states: dict[int, Mapping[str, Any]] = {}  # index of an item → the detail that its worker needs back
        self.is_marked = False
        self.calls: dict[int, int] = {}  # a call's index in the deltas → its index in `items`
        self._hex, self._names, self._logprobs, self._sealing = response_hex, names, logprobs, sealing
        self._open: int | None = None  # index of the unfinished message or reasoning item
        self._notes: int | None = None  # index of the reasoning item whose summary has notes
        self._in_gap = False
        self._ended: set[int] = set()  # indices of the calls that have ended
        self._hosted: dict[Any, int] = {}  # ids and indices of the worker → indices of hosted items in `items`

    @property
    def is_empty(self) -> bool:
        """Whether nothing but notes is in it."""
        return all(index == self._notes for index in range(len(self.items)))

    def choice(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        """The events of a choice of a chunk, or of a piece of a whole one."""
        delta = choice.get("delta")
        if not isinstance(delta, Mapping):
            return
        for mark in _list(delta.get(marks.FIELD)):
            yield from self._mark(mark)
        for event in _list(delta.get(marks.EVENTS)):
            yield from self._progress(event)
        reasoning = next((delta[name] for name in REASONING if isinstance(delta.get(name), str)), "")
        if reasoning and not self._in_gap:
            yield from self._reasoning(reasoning)
        for detail in _list(delta.get("reasoning_details")):
            yield from self._detail(detail)
        logprobs = token_logprobs(choice.get("logprobs")) if self._logprobs else []
        for name in PARTS:
            if isinstance(delta.get(name), str) and delta[name]:
                yield from self._piece(name, delta[name], logprobs if name == "content" else [])
        yield from self._citations(delta.get("annotations"))
        for call in _list(delta.get("tool_calls")):
            yield from self._call(call)

    def note(self, text: str) -> Iterator[Event]:
        """The events of a line about what happens before the reply, as a part of a reasoning item's summary. Nothing
        once the reply has begun."""
        if not self.is_empty:
            return
        if self._notes is None:
            yield from self._begin(self._new_reasoning())
            self._notes = self._open
        yield from self._begin_part("summary", {"type": "summary_text", "text": ""})
        yield from self._add_reasoning("summary", text)
        yield from self._end_part()

    def close(self, status: str) -> Iterator[Event]:
        """The events of the end of every item but a reasoning item that is to be sealed."""
        yield from self._close(status, COMMENTARY if self.calls else FINAL)
        yield from self._close_calls(status)

    def end(self, status: str, state: str | None) -> Iterator[Event]:
        """The events of the end of the reply. `state`: what the vendor needs back, for the first reasoning item."""
        yield from self.close(status)
        yield from self._seal(state)
        if self.is_empty and not self.is_marked:
            yield from self._piece("content", "", [])
            yield from self._close(status, FINAL)

    def _seal(self, state: str | None) -> Iterator[Event]:
        index = next((at for at, item in enumerate(self.items) if item["type"] == "reasoning"), None)
        if state is not None and index is None:
            yield from self._begin(self._new_reasoning())
            index, self._open = self._open, None
            self._item(index)["status"] = "completed"
        if index is not None and self._sealing:
            self.items[index] |= {} if state is None else {"encrypted_content": state}
            yield _event("response.output_item.done", output_index=index, item=copied(self.items[index]))

    # ------------------------------------------------------------ marks

    def _mark(self, mark: Mapping[str, Any]) -> Iterator[Event]:
        kind = str(mark.get("type"))
        self.is_marked, self._in_gap = self.is_marked or kind != marks.ITEM, kind == marks.GAP
        if kind == marks.PART and self._open_item("message") is not None:
            yield from self._end_part()
            self._item()["content"].append({"type": ""})  # its kind comes with its text
        elif kind in _REASONING_PARTS:
            name, part = _REASONING_PARTS[kind]
            if self._open_item("reasoning") is None:
                yield from self._begin(self._new_reasoning())
            yield from self._end_part()
            yield from self._begin_part(name, {"type": part, "text": ""})
        elif kind in (marks.MESSAGE, marks.REASONING, marks.CALL, marks.STATE):
            yield from self._close("completed", COMMENTARY)
            yield from self._close_calls("completed")
            if kind == marks.MESSAGE:
                item = self._new_message()
                phase = {"phase": mark["phase"]} if "phase" in mark else {}
                yield from self._begin({name: value for name, value in item.items() if name != "phase"} | phase)
            elif kind == marks.REASONING:
                yield from self._begin(self._new_reasoning())

    def _progress(self, event: Mapping[str, Any]) -> Iterator[Event]:
        """The events of a hosted tool at work: its item begins, or something happens in it."""
        item = event.get("item")
        if event.get("type") == "response.output_item.added" and isinstance(item, Mapping):
            yield from self._close("completed", COMMENTARY)
            at = self._add_hosted(item)
            self._hosted |= {_key(item.get("id")): at, _key(event.get("output_index")): at}
            yield _event("response.output_item.added", output_index=at, item=dict(self.items[at]))
            return
        by_index = self._hosted.get(_key(event.get("output_index")))
        at_or_none = self._hosted.get(_key(event.get("item_id")), by_index)
        if at_or_none is not None:
            fields = {name: value for name, value in event.items() if name not in ("type", "sequence_number")}
            place = {"output_index": at_or_none, "item_id": self.items[at_or_none]["id"]}
            yield _event(str(event.get("type")), **{**fields, **place})

    def _detail(self, detail: Mapping[str, Any]) -> Iterator[Event]:
        """The events of a detail: the whole item of a hosted tool. What a worker needs back of its reasoning stays."""
        if detail.get("type") == ENCRYPTED and detail.get("format") == FORMAT:
            if self._open_item("reasoning") is None:
                yield from self._begin(self._new_reasoning())
            self.states[self._open or 0] = detail
        item = hosted_item(detail)
        if item is None:
            return
        at = self._hosted.pop(_key(item.get("id")), None)
        if at is None:
            yield from self._close("completed", COMMENTARY)
            at = self._add_hosted(item)
            yield _event("response.output_item.added", output_index=at, item=dict(self.items[at]))
        self.items[at], self.states[at] = {**item, "id": self.items[at]["id"]}, detail
        yield _event("response.output_item.done", output_index=at, item=dict(self.items[at]))

    def _add_hosted(self, item: Mapping[str, Any]) -> int:
        """Add an item under the worker's own id, which an answer to it names; under another where it has none."""
        own = item.get("id")
        name = own if isinstance(own, str) and _OWN.fullmatch(own) else item_id("ht", self._hex, len(self.items))
        self.items.append({**item, "id": name})
        return len(self.items) - 1

    # ------------------------------------------------------------ pieces

    def _reasoning(self, text: str) -> Iterator[Event]:
        """The events of a piece of reasoning."""
        if self._open_item("reasoning") is None or self._open == self._notes:
            yield from self._begin(self._new_reasoning())
        item = self._item()
        if not item["content"] and not item["summary"]:
            yield from self._begin_part("content", {"type": "reasoning_text", "text": ""})
        yield from self._add_reasoning("content" if item["content"] else "summary", text)

    def _add_reasoning(self, name: str, text: str) -> Iterator[Event]:
        self._item()[name][-1]["text"] += text
        kind = "reasoning_text" if name == "content" else "reasoning_summary_text"
        yield _event(f"response.{kind}.delta", **self._place(), delta=text)

    def _piece(self, name: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """The events of a piece of text or of a refusal."""
        if self._open_item("message") is None:
            yield from self._begin(self._new_message())
        kind = PARTS[name]
        content = self._item()["content"]
        if not content or content[-1]["type"] != kind:
            if content and not content[-1]["type"]:
                content.pop()
            else:
                yield from self._end_part()
            part = text_part("") if kind == "output_text" else {"type": "refusal", "refusal": ""}
            yield from self._begin_part("content", part)
        part = self._item()["content"][-1]
        if kind == "refusal":
            part["refusal"] += text
            yield _event("response.refusal.delta", **self._place(), delta=text)
            return
        part["text"] += text
        part["logprobs"] += logprobs
        if text:
            tokens = event_logprobs(logprobs)
            yield _event("response.output_text.delta", **self._place(), delta=text, logprobs=tokens)

    def _citations(self, annotations: Any) -> Iterator[Event]:
        """The events of the sources that text cites. They belong to the unfinished text, or to a new one."""
        cited = citations(annotations if isinstance(annotations, list) else ())
        if cited and (self._open_item("message") is None or not self._texts()):
            yield from self._piece("content", "", [])
        for citation in cited:
            before = self._texts()[-1]["annotations"]
            before.append(citation)
            place = {**self._place(), "annotation_index": len(before) - 1}
            yield _event("response.output_text.annotation.added", **place, annotation=citation)

    def _texts(self) -> list[Item]:
        """The parts of the unfinished message, where the last is text."""
        content: list[Item] = self._item()["content"]
        return content if content and content[-1]["type"] == "output_text" else []

    def _call(self, piece: Mapping[str, Any]) -> Iterator[Event]:
        index = piece.get("index")
        index = index if isinstance(index, int) else len(self.calls)
        known = self.items[self.calls[index]]["type"] == "custom_tool_call" if index in self.calls else None
        custom = piece.get("type") == "custom" if known is None else known
        kind, content = ("custom", "input") if custom else ("function", "arguments")
        details = piece.get(kind)
        details = details if isinstance(details, Mapping) else {}
        if index not in self.calls:
            if len(self.calls) >= CALLS_MAX:
                return
            yield from self._close("completed", COMMENTARY)
            first = {"id": piece.get("id"), "type": kind, kind: {"name": details.get("name")}}
            name = item_id(call_prefix(first), self._hex, len(self.calls))
            self.calls[index] = len(self.items)
            self.items.append({"id": name, **call_body(first, "in_progress", self._names)})
            yield _event("response.output_item.added", output_index=self.calls[index], item=dict(self.items[-1]))
        at = self.calls[index]
        text = details.get(content)
        if isinstance(text, str) and text:
            self.items[at][content] += text
            place = {"item_id": self.items[at]["id"], "output_index": at}
            yield _event(f"response.{CALL_EVENTS[content]}.delta", **place, delta=text)

    # ------------------------------------------------------------ items

    def _new_message(self) -> Item:
        name = item_id("msg", self._hex, self._count("message"))
        return {"id": name, "type": "message", "status": "in_progress", "role": "assistant", "content": [],
                "phase": None}  # fmt: skip

    def _new_reasoning(self) -> Item:
        name = item_id("rs", self._hex, self._count("reasoning"))
        return {"id": name, "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}

    def _begin(self, item: Item) -> Iterator[Event]:
        yield from self._close("completed", COMMENTARY)
        self._open = len(self.items)
        self.items.append(item)
        yield _event("response.output_item.added", output_index=self._open, item=copied(item))

    def _begin_part(self, name: str, part: Item) -> Iterator[Event]:
        """Add a part to `content` or `summary` of the unfinished item."""
        self._item()[name].append(part)
        kind = "content_part" if name == "content" else "reasoning_summary_part"
        yield _event(f"response.{kind}.added", **self._place(), part=copied(part))

    def _end_part(self) -> Iterator[Event]:
        """The end of the last part of the unfinished item, if it has one."""
        item = self._item()
        parts = item["content"] or item.get("summary") or [{}]
        part, place = parts[-1], self._place()
        match part.get("type"):
            case "output_text":
                content = {"text": part["text"], "logprobs": event_logprobs(part["logprobs"])}
                yield _event("response.output_text.done", **place, **content)
            case "refusal":
                yield _event("response.refusal.done", **place, refusal=part["refusal"])
            case "reasoning_text":
                yield _event("response.reasoning_text.done", **place, text=part["text"])
            case "summary_text":
                yield _event("response.reasoning_summary_text.done", **place, text=part["text"])
                yield _event("response.reasoning_summary_part.done", **place, part=copied(part))
                return
            case _:
                return
        yield _event("response.content_part.done", **place, part=copied(part))

    def _close(self, status: str, phase: str) -> Iterator[Event]:
        """End the unfinished message or reasoning item, if there is one. `phase`: of a message without a mark."""
        if self._open is None:
            return
        item = self._item()
        if self._open != self._notes:
            yield from self._end_part()
        item["status"] = status
        if item["type"] == "message":
            item["content"] = [part for part in item["content"] if part["type"]]
            if not self.is_marked:
                item["phase"] = phase
        first = self._open == next(at for at, one in enumerate(self.items) if one["type"] == item["type"])
        if not (self._sealing and first and item["type"] == "reasoning"):  # else it ends in `_seal`
            yield _event("response.output_item.done", output_index=self._open, item=copied(item))
        self._open = None

    def _close_calls(self, status: str) -> Iterator[Event]:
        for index, at in self.calls.items():
            if index in self._ended:
                continue
            self._ended.add(index)
            item = self.items[at]
            place = {"item_id": item["id"], "output_index": at}
            if item["type"] == "custom_tool_call":
                yield _event("response.custom_tool_call_input.done", **place, input=item["input"])
            else:
                call = {"name": item["name"], "arguments": item["arguments"]}
                yield _event("response.function_call_arguments.done", **place, **call)
                item["status"] = status
            yield _event("response.output_item.done", output_index=at, item=dict(item))

    def _open_item(self, kind: str) -> int | None:
        """The index of the unfinished item if it is of that kind."""
        return self._open if self._open is not None and self.items[self._open]["type"] == kind else None

    def _count(self, kind: str) -> int:
        return sum(item["type"] == kind for item in self.items)

    def _item(self, index: int | None = None) -> Item:
        return self.items[(self._open if index is None else index) or 0]

    def _place(self) -> dict[str, Any]:
        """Where the last part of the unfinished item is."""
        item = self._item()
        name = "summary" if item["type"] == "reasoning" and not item["content"] else "content"
        index = {"summary_index" if name == "summary" else "content_index": len(item[name]) - 1}
        return {"item_id": item["id"], "output_index": self._open, **index}


def output_of(message: Mapping[str, Any], names: Names = NO_NAMES) -> Output:
    """The items of a whole message that is part of a conversation. `names`: see Output."""
    output = Output(_HEX, names)
    for piece in marks.pieces({"message": message}):
        deque(output.choice(piece), 0)
    deque(output.close("completed"), 0)
    return output


def hosted_item(detail: Mapping[str, Any]) -> Item | None:
    """The item of a hosted tool that a detail holds; None for another one."""
    if detail.get("type") != HOSTED_ITEM or detail.get("format") != FORMAT:
        return None
    try:
        item = json.loads(detail["data"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return item if isinstance(item, dict) and isinstance(item.get("type"), str) else None


def _event(kind: str, **fields: Any) -> Event:
    return {"type": kind, **fields}


def _key(value: Any) -> str | int:
    return value if isinstance(value, str | int) else ""


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def copied(part: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an item or part with its lists: an event must not change when its item grows."""
    lists = {name: [copied(element) if isinstance(element, dict) else element for element in value]
             for name, value in part.items() if isinstance(value, list)}  # fmt: skip
    return {**part, **lists}
