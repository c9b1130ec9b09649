"""What is fuzzed. A target takes any bytes; whatever it raises beyond what its reader says it raises is a bug.

Each also holds its reader to something that is true of every input: that text read in pieces is text read whole, that
what was accepted can be written down and read again, that records before damage come back.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from gateway.adapters.journal import segments
from gateway.adapters.upstream.sse import SseError, SseEvent, SseParser
from gateway.core.loop.plan import PlanLimits, validate
from gateway.core.loop.reader import PlanReader
from gateway.core.money.amounts import input_tokens_bound
from gateway.core.openai.body import decode_json
from gateway.core.openai.chat import parse_request
from gateway.core.openai.responses.request import parse_responses_request
from gateway.errors import BatonError

ALLOWED = PlanLimits(("atlas", "birch", "self"), steps_max=5, depth_capped=frozenset({"self"}))
EVENT_BYTES_MAX = 4096
MESSAGES_MAX = 64
RECORD = segments.encode(segments.PAYLOAD_START + b"x")


def chat(data: bytes) -> None:
    """A request's body, for either API: read, or refused by name."""
    try:
        body = decode_json(bytearray(data))
    except BatonError:
        return
    for parse in (
        lambda: parse_request(body, messages_max=MESSAGES_MAX),
        lambda: parse_responses_request(body, items_max=MESSAGES_MAX),
    ):
        try:
            read = parse()
        except BatonError as error:
            json.dumps(error.body()).encode()
            continue
        if hasattr(read, "messages"):
            assert input_tokens_bound(read.messages) > 0


def plan(data: bytes) -> None:
    """A plan: valid or refused by name, and never more than is allowed. Read in pieces it has the same steps."""
    try:
        found = validate(data, ALLOWED)
    except BatonError:
        found = None
    if found is not None:
        assert 0 < len(found.steps) <= ALLOWED.steps_max
        assert all(step.worker in ALLOWED.handles for step in found.steps)
        assert all(see < index for index, step in enumerate(found.steps) for see in step.see)
        assert validate(json.dumps(found.as_json()), ALLOWED) == found
    _in_pieces(data.decode(errors="replace"), None if found is None else len(found.steps))


def _in_pieces(text: str, steps: int | None) -> None:
    reader, count = PlanReader(), 0
    try:
        for start in range(0, len(text), 7):
            count += len(reader.feed(text[start : start + 7]))
    except BatonError:
        assert steps is None
        return
    assert steps is None or count == steps


def sse(data: bytes) -> None:
    """An event stream: the same events however it is cut, or an error that is ours."""
    cut = data[0] % 17 + 1 if data else 1
    assert _events(data, len(data) or 1) == _events(data, cut)


def _events(data: bytes, size: int) -> list[SseEvent] | None:
    parser, events = SseParser(EVENT_BYTES_MAX), []
    try:
        for start in range(0, len(data), size):
            events += parser.feed(data[start : start + size])
        return [*events, *parser.end()]
    except SseError:
        return None


def spool(data: bytes) -> None:
    """A journal's segment with anything behind its good records: those come back first, in order."""
    good = [segments.PAYLOAD_START + bytes([number]) * number for number in range(1, 4)]
    whole = b"".join(map(segments.encode, good))
    handle, name = tempfile.mkstemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)  # noqa: S108 - no file of ours stays there
    path = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(whole + data)
        size = path.stat().st_size
        chunk = segments.read(path, 0, size, records_max=1000, bytes_max=1 << 20)
        assert chunk.payloads[:3] == good
        assert segments.good_end(path) >= len(whole)
        cut = segments.cut_torn_tail(path)
        assert path.stat().st_size == size - cut >= len(whole)
    finally:
        path.unlink()


TARGETS: dict[str, Callable[[bytes], None]] = {"chat": chat, "plan": plan, "sse": sse, "spool": spool}
SEEDS: dict[str, tuple[bytes, ...]] = {
    "chat": (
        b'{"model":"baton","messages":[{"role":"user","content":"hi"}],"stream":true,"n":2}',
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AA=="}}]}]}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f",'
        b'"parameters":{"type":"object"}}}],"tool_choice":{"type":"function","function":{"name":"f"}}}',
        b'{"model":"m","messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":'
        b'{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"c","content":"1"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema","json_schema":'
        b'{"name":"s","strict":true,"schema":{"type":"object","properties":{},"additionalProperties":false}}}}',
        b'{"model":"m","input":[{"role":"user","content":[{"type":"input_text","text":"a"}]},{"type":"function_call_output",'
        b'"call_id":"c","output":"1"}],"text":{"format":{"type":"text"}},"tools":[{"type":"function","name":"f"}]}',
    ),
    "plan": (
        b'{"steps":[{"worker":"atlas","task":null,"see":[]},{"worker":"birch","task":"Check.","see":[0]}]}',
        b'<think>no</think>```json\n{"steps":[{"worker":"atlas","task":"a","see":"all"}]}\n```',
        b'{"steps":[]}',
    ),
    "sse": (
        b'data: {"a":1}\n\ndata: [DONE]\n\n',
        b": wait\r\nevent: x\r\ndata: a\r\ndata: b\r\n\r\n",
    ),
    "spool": (b"", RECORD[:-1], RECORD, b"\0" * 64),
}
