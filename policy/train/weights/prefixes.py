"""Keys and values of prompts that were read before, for as long as the weights stay as they are.

All prompts of a conductor begin with the same instructions, and a prompt may come again: what is equal from the first
token on is not read twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from policy.start.synthetic.model import Pair

Ids = Sequence[int]
BYTES_MAX = 512 << 20  # of keys and values; those used longest ago go first


class Prefixes:
    """Prompts by their tokens. `version`: whatever changes with the weights."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._version: object = None
        self._held: OrderedDict[tuple[int, ...], list[Pair]] = OrderedDict()

    def at(self, version: object) -> Prefixes:
        """Itself, without what other weights have read."""
        if version != self._version:
            self._held.clear()
            self._version = version
        return self

    def longest(self, ids: Ids) -> tuple[int, Sequence[Pair]]:
        """How many of the first tokens have been read, and the pairs of at least these, by layer: [heads, tokens,
        head_dim] each."""
        best, found = 0, tuple[int, ...]()
        for held in self._held:
            if (length := common([held, ids])) > best:
                best, found = length, held
        if not best:
            return 0, ()
        self._held.move_to_end(found)
        return best, self._held[found]

    def add(self, ids: Ids, pairs: list[Pair]) -> None:
        """Hold what was read of a prompt."""
        self._held[tuple(ids)] = pairs
        total = sum(map(_size_bytes, self._held.values()))
        while total > self._bytes_max and len(self._held) > 1:
            total -= _size_bytes(self._held.popitem(last=False)[1])


def common(prompts: Sequence[Ids]) -> int:
    """How many of the first tokens are the same in all of them."""
    count = 0
    for tokens in zip(*prompts, strict=False):
        if tokens.count(tokens[0]) < len(tokens):
            break
        count += 1
    return count


def _size_bytes(pairs: Sequence[Pair]) -> int:
    return sum(tensor.nbytes for pair in pairs for tensor in pair)
