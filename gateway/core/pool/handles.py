"""Handles for workers whose pool file gives none: neutral words, because a planner would bring its prejudice to a
brand's name. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable
from itertools import count

_TEXT = """
amber basil birch briar cedar clover coral cove dune elm ember fern finch fjord flint grove harbor hazel heron holly
iris ivory jade juniper kelp lark laurel linden lotus maple marsh mesa moss myrtle nettle oak olive onyx orchid
otter pebble pine plume poppy quartz quill raven reed ridge robin rowan sage slate sorrel spruce swift tansy thorn
thyme tulip umber violet willow wren yarrow zinnia
"""
WORDS = tuple(_TEXT.split())


def neutral_handles(names: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """A handle for each name, none of them twice or in `taken`. The order of the names changes nothing, and another
    name changes the handles of few."""
    used, handles = set(taken), dict[str, str]()
    for name in sorted(names):
        first = zlib.crc32(name.encode("utf-8", "surrogatepass")) % len(WORDS)
        words = (*WORDS[first:], *WORDS[:first])
        numbered = (f"{word}{number}" for number in count(2) for word in words)
        free = next((word for word in words if word not in used), None)
        handles[name] = free or next(word for word in numbered if word not in used)
        used.add(handles[name])
    return handles
