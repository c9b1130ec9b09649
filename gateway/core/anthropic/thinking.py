"""A worker's thinking as Anthropic's blocks, and back. Pure.

A signature is opaque to clients, so it carries the origin of the worker that signed (`core/openai/vendor.py`): a client
that returns its blocks unchanged gets them to that vendor again, and to no other. A turn with tool calls whose state
the gateway keeps needs nothing from the client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gateway.core.openai.vendor import OURS, REASONING, ids_with_state

Block = dict[str, Any]
Display = Literal["shown", "omitted", "hidden"]  # what a reply shows of thinking
_SIGNED = re.compile(r"btn\.(?P<origin>[0-9a-f]{12})\.(?P<text>.*)", re.DOTALL)


def origin_of(fields: Mapping[str, Any]) -> str | None:
    """The origin that a message or a delta is marked with, or None."""
    extra = fields.get("extra_content")
    marker = extra.get(OURS) if isinstance(extra, Mapping) else None
    origin = marker.get("origin") if isinstance(marker, Mapping) else None
    return origin if isinstance(origin, str) else None


def thinking_blocks(fields: Mapping[str, Any], display: Display, origin: str | None) -> list[Block]:
    """The blocks of a message or a delta: the worker's own, else its reasoning text without a signature."""
    if display == "hidden":
        return []
    own = fields.get("thinking_blocks")
    blocks = [block for raw in own if (block := _block(raw, origin))] if isinstance(own, list) else []
    if blocks:
        return [_displayed(block, display) for block in blocks]
    texts = (fields.get(name) for name in REASONING)
    text = next((text for text in texts if isinstance(text, str) and text), "")
    return [{"type": "thinking", "thinking": text, "signature": ""}] if text and display == "shown" else []


def _block(raw: Any, origin: str | None) -> Block | None:
    """A worker's block with exactly the properties that Anthropic's has; None for anything else."""
    if not isinstance(raw, Mapping):
        return None
    if raw.get("type") == "redacted_thinking" and isinstance(raw.get("data"), str):
        return {"type": "redacted_thinking", "data": _signed(raw["data"], origin)}
    texts = {name: raw.get(name) or "" for name in ("thinking", "signature")}
    if raw.get("type") == "thinking" and all(isinstance(text, str) for text in texts.values()) and any(texts.values()):
        return {"type": "thinking", **texts, "signature": _signed(texts["signature"], origin)}
    return None


def _signed(text: str, origin: str | None) -> str:
    return f"btn.{origin}.{text}" if text and origin else text


def _displayed(block: Block, display: Display) -> Block:
    """The block as the request wants to see it: with `omitted`, its signature stays and its text does not."""
    return {**block, "thinking": ""} if display == "omitted" and block["type"] == "thinking" else block


def with_thinking(message: Block, blocks: Sequence[Block]) -> Block:
    """An assistant message with the blocks that a client returned. Text that nobody signed becomes
    `reasoning_content`. Signatures of another house stay unmarked, so that the request names them and sends them to
    nobody."""
    unsigned = "".join(block["thinking"] for block in blocks if not _signature(block))
    message = message | ({"reasoning_content": unsigned} if unsigned else {})
    signed = [block for block in blocks if _signature(block)]
    if not signed or ids_with_state([message]):
        return message
    matches = [_SIGNED.fullmatch(_signature(block)) for block in signed]
    origins = {match["origin"] for match in matches if match}
    if len(origins) != 1:
        return message | {"thinking_blocks": signed}
    own = [_restored(block, match["text"]) for block, match in zip(signed, matches, strict=True) if match]
    return message | {"thinking_blocks": own, "extra_content": {OURS: {"origin": origins.pop()}}}


def _signature(block: Mapping[str, Any]) -> str:
    return str(block.get("data") or block.get("signature") or "")


def _restored(block: Block, text: str) -> Block:
    return {**block, ("data" if "data" in block else "signature"): text}
