"""Replies of workers to requests that are no conversation: checked, billed by units, and as the client gets them. Pure.

A reply in text or in bytes (speech, subtitles) is an object with `content` and `content_type` inside the gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.core.money.amounts import Usage
from gateway.core.money.units import UNITS
from gateway.core.openai.chat import ChatRequest, Endpoint
from gateway.core.openai.reply import completion
from gateway.core.openai.tasks.fields import FIELDS, Sound
from gateway.core.openai.texts import embedding_list, text_completion
from gateway.errors import UpstreamProtocol

SOUND_BYTES_PER_S_MIN = 1000  # the poorest MP3 that players take
_LISTS = {"moderations": "results", "rerank": "results", "images": "data"}  # what a reply must have


def is_raw(endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
    """Whether the reply to this request is bytes or text and no JSON object."""
    if endpoint == "speech":
        return True
    texts = ("text", "srt", "vtt")
    return endpoint in ("transcriptions", "translations") and body.get("response_format") in texts


def check_task(endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    """Return a worker's reply if it has what its API promises. Raises UpstreamProtocol."""
    if "content_type" in body:
        if not body.get("content"):
            raise UpstreamProtocol("the worker's reply is empty")
        return body
    name = _LISTS.get(endpoint)
    if name is None:
        if not isinstance(body.get("text"), str):
            raise UpstreamProtocol("the worker's reply has no `text`")
    elif not isinstance(body.get(name), list) or not all(isinstance(item, dict) for item in body[name]):
        raise UpstreamProtocol(f"the worker's reply has no list of `{name}`")
    return {key: value for key, value in body.items() if key != "choices"}  # which only chat replies have


def most_units(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, int]:
    """The most units that a request may cost, by the names of `core/money/units.py`."""
    if endpoint == "moderations":
        inputs = body["input"]
        return {"texts": len(inputs) if isinstance(inputs, list) else 1}
    if endpoint == "rerank":
        return {"searches": -(-len(body["documents"]) // UNITS["searches"].documents)}
    if endpoint == "images":
        return {"images": int(body.get("n") or 1)}
    if endpoint == "speech":
        return {"characters": len(body["input"])}
    sound: Sound = body["file"]
    return {"seconds": -(-len(sound.data) // SOUND_BYTES_PER_S_MIN)}


def units_of(endpoint: Endpoint, body: Mapping[str, Any], reply: Mapping[str, Any]) -> dict[str, int]:
    """The units that a reply cost: as the worker reports them, else as many as the request may cost."""
    most = most_units(endpoint, body)
    if endpoint == "images":
        return {"images": min(most["images"], len(reply["data"]))}
    if "seconds" in most and (seconds := _seconds(reply)) is not None:
        return {"seconds": min(most["seconds"], seconds)}
    return most


def _seconds(reply: Mapping[str, Any]) -> int | None:
    """The length of a recording that a reply reports, rounded up."""
    usage = reply.get("usage")
    reported = [usage.get("seconds") if isinstance(usage, Mapping) else None, reply.get("duration")]
    for value in reported:
        if isinstance(value, str):
            value = float(value) if value.replace(".", "", 1).isdigit() else None
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 10**7:
            return int(-(-value // 1))
    return None


def client_reply(reply: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The reply that the client gets: the worker's, under the model name that the client asked for."""
    return {**reply, "model": model} if "model" in reply else dict(reply)


def logged_task(reply: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a reply that the log keeps: everything but bytes of images and of sound."""
    if "content_type" in reply:
        content = reply["content"]
        content_logged = {"text": content} if isinstance(content, str) else {"bytes": len(content)}
        return {"content_type": reply["content_type"], **content_logged}
    if not isinstance(reply.get("data"), list):
        return dict(reply)
    images = [{name: value for name, value in item.items() if name != "b64_json"} for item in reply["data"]]
    return {**reply, "data": images}


def logged_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a request as the log keeps them: an upload by its name, type and size."""
    return {name: _logged(value) for name, value in params.items()}


def _logged(value: Any) -> Any:
    if isinstance(value, Sound):
        return {"name": value.name, "type": value.kind, "bytes": len(value.data)}
    return value


def reply_of(
    chat: ChatRequest, body: Mapping[str, Any], *, completion_id: str, created_s: int, usage: Usage
) -> dict[str, Any]:
    """The reply to the client, in the form of the endpoint that it called."""
    if chat.endpoint in FIELDS:
        return client_reply(body, chat.model)
    if chat.endpoint == "embeddings":
        return embedding_list(body, chat, usage)
    reply = completion(body, completion_id=completion_id, created_s=created_s, model=chat.model, usage=usage)
    return text_completion(reply) if chat.endpoint == "completions" else reply


def to_log(endpoint: Endpoint, reply: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a reply that the log keeps: no embedding vectors, and no bytes of images and sound."""
    if endpoint in FIELDS:
        return logged_task(reply)
    data = reply.get("data")
    return dict(reply) if data is None else {**reply, "data": [], "embeddings": len(data)}
