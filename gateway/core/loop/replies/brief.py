"""A reply in brief, by its kind, within a budget of tokens; what was cut is always said. Pure.

A short answer stands as it is. Code is shown as its signatures, then head and tail; prose as its opening and its
claims, the first sentence of each paragraph and each heading; JSON in its canonical form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway.core.loop.replies.code import signatures
from gateway.core.loop.replies.kinds import Reply, canonical

BYTES_PER_TOKEN = 4  # of text, about
NOTE_TOKENS = 12  # that the note about what was cut takes
OPENING_SHARE = 0.4  # of a budget for prose
SIGNATURES_SHARE = 0.5  # of a budget for code
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+[.)]))")
_SENTENCE = re.compile(r".+?[.!?…](?=[\"')\]]*\s|[\"')\]]*$)|.+", re.DOTALL)


def brief(reply: Reply, tokens_max: int) -> str:
    """The reply in at most about `tokens_max` tokens (four bytes each). A longer one ends with a note in parentheses of
    how much of it was cut."""
    text = _full_text(reply)
    if _tokens(text) <= tokens_max:
        return text
    room = max(0, (tokens_max - NOTE_TOKENS) * BYTES_PER_TOKEN)
    excerpt = _cut(reply, text, room)
    return f"{excerpt} ({reply.kind}, {_tokens(text)} tokens, cut)".strip()


def _tokens(text: str) -> int:
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def _full_text(reply: Reply) -> str:
    if reply.kind == "tool_call":
        return "; ".join(f"{name}({arguments})" for name, arguments in reply.calls)
    if reply.kind == "json":
        return canonical(reply.value)
    return reply.answer if reply.kind == "short" else reply.text.strip()


def _cut(reply: Reply, text: str, room: int) -> str:
    if reply.kind == "code":
        lines = [line for block in reply.blocks for line in signatures(block)]
        head = _fitting(lines, int(room * SIGNATURES_SHARE), "; ")
        body = "\n".join(block.text for block in reply.blocks)
        return f"{head} … {ends(body, room - _size(head))}" if head else ends(body, room)
    if reply.kind == "prose":
        return _outline(text, room)
    return ends(text, room)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _fitting(lines: Sequence[str], room: int, between: str) -> str:
    """As many lines from the first on as fit in `room` bytes."""
    sentences: list[str] = []
    for line in lines:
        room -= _size(line) + len(between)
        if room < 0:
            break
        sentences.append(line)
    return between.join(sentences)


def _outline(text: str, room: int) -> str:
    """The opening of a text, then the first sentence of each later paragraph: its claims."""
    paragraphs = [part.strip() for part in _PARAGRAPH.split(text) if part.strip()]
    sentences = [match[0].strip() for match in _SENTENCE.finditer(paragraphs[0])]
    opening = _fitting(sentences, int(room * OPENING_SHARE), " ") or _head(sentences[0], int(room * OPENING_SHARE))
    claims = [match[0].strip() for part in paragraphs[1:] if (match := _SENTENCE.match(part))]
    if not claims:
        return ends(text, room)
    return f"{opening} … {_fitting(claims, room - _size(opening), ' … ')}".rstrip(" …")


def _head(text: str, room: int) -> str:
    return text.encode("utf-8", "surrogatepass")[:room].decode("utf-8", "ignore")


def ends(text: str, room: int) -> str:
    """The head and the tail of a text, in at most about `room` bytes."""
    if _size(text) <= room:
        return text
    half = room // 2
    tail = text.encode("utf-8", "surrogatepass")[-half:].decode("utf-8", "ignore") if half else ""
    return f"{_head(text, half)} … {tail}"
