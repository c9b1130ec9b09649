"""Turns chat chunks into the typed events of a streamed response. Pure; it never raises, and ignores whatever does not
have OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.core.openai.finish import INCOMPLETE
from gateway.core.openai.responses.output import Event
from gateway.core.openai.responses.reply import (
    Head,
    failed_response,
    finished_response,
    new_output,
    response_in_progress,
    sources,
    state_in,
)


class Events:
    """Makes the events of one response, each with its `sequence_number`. Call `open` first, then `chunk` for each
    chunk, then `completed` or `failed` once."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._output = new_output(head)
        self._number = 0
        self._finish: str | None = None

    def open(self) -> list[Event]:
        """The first two events of the response."""
        response = response_in_progress(self._head)
        return self._numbered(
            {"type": name, "response": response} for name in ("response.created", "response.in_progress")
        )

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> list[Event]:
        """The events of one chunk. Only the choice with index 0 counts."""
        events: list[Event] = []
        for choice in choices:
            if choice.get("index", 0) == 0:
                events += self._numbered(self._output.choice(choice))
                finish = choice.get("finish_reason")
                self._finish = finish if isinstance(finish, str) else self._finish
        return events

    def note(self, text: str) -> list[Event]:
        """The events of a line about what happens before the reply."""
        return self._numbered(self._output.note(text))

    def completed(self, completion: Mapping[str, Any], completed_s: int) -> list[Event]:
        """The last events of a successful response: the end of every item, then the complete object."""
        status = "incomplete" if self._finish in INCOMPLETE else "completed"
        events = [event for piece in sources(completion) for event in self._numbered(self._output.choice(piece))]
        events += self._numbered(self._output.end(status, state_in(self._head, completion)))
        response = finished_response(self._head, completion, completed_s, self._output.items)
        return events + self._numbered([{"type": f"response.{response['status']}", "response": response}])

    def failed(self, error: Mapping[str, Any]) -> list[Event]:
        """The last events of a response that failed. OpenAI's SDKs raise an exception on the second one."""
        details = {name: error.get(name) for name in ("code", "message", "param")}
        response = failed_response(self._head, error, self._output.items)
        return self._numbered(
            [{"type": "response.failed", "response": response}, {"type": "error", **details, "error": dict(error)}]
        )

    def _numbered(self, events: Iterable[Event]) -> list[Event]:
        made = []
        for event in events:
            made.append({"type": event["type"], "sequence_number": self._number, **event})
            self._number += 1
        return made


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
