"""The grammar mask of every place in a plan, computed once for all rows that came there by the same tokens.

The sampler and the trainer read the same masks, so a row is scored under what it was sampled under.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from policy.serve.tokens import Tokens

BYTES_MAX = 128 << 20  # of masks and matchers kept between steps
KEYS_MAX = 1024  # of schemas whose text is known
MATCHER_BYTES = 12 << 10  # measured, of llguidance 1.9 with plan schemas
Bits = npt.NDArray[np.uint8]


class OutsideGrammar(ValueError):
    """A token that the schema does not allow where it stands."""


class Place:
    """One place in the plans of a schema. `bits`: the tokens allowed here, one bit each; `forced`: the only one."""

    __slots__ = ("_matcher", "_next", "bits", "forced")

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher = matcher
        self._next: dict[int, Place] = {}
        self.bits: Bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(self.bits, count=vocab, bitorder="little"))
        self.forced: int | None = int(allowed[0]) if len(allowed) == 1 else None

    def after(self, token: int, vocab: int) -> Place:
        """The place that `token` leads to. Raises OutsideGrammar."""
        if token not in self._next:
            matcher = self._matcher.deep_copy()
            if not matcher.consume_token(token):
                raise OutsideGrammar(f"token {token} is outside the grammar: plan and schema do not belong together")
            self._next[token] = Place(matcher, vocab)
        return self._next[token]

    def size_bytes(self) -> int:
        """Of the masks and matchers from here on."""
        total, left = 0, [self]
        while left:
            place = left.pop()
            total += int(place.bits.nbytes) + MATCHER_BYTES
            left += place._next.values()
        return total


class Masks:
    """Places by schema; `forget` bounds what is kept."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._roots: OrderedDict[str, Place] = OrderedDict()
        self._keys: dict[int, tuple[Mapping[str, Any], str]] = {}  # by id, of schemas that many calls share

    def root(self, schema: Mapping[str, Any]) -> Place:
        """The beginning of a plan. Raises BadSchema."""
        key = self._key(schema)
        if key not in self._roots:
            self._roots[key] = Place(self._tokens.matcher(schema), self._tokens.vocab)
        self._roots.move_to_end(key)
        return self._roots[key]

    def _key(self, schema: Mapping[str, Any]) -> str:
        known, key = self._keys.get(id(schema), (None, ""))
        if known is not schema:
            key = json.dumps(schema)
            if len(self._keys) >= KEYS_MAX:
                self._keys.clear()
            self._keys[id(schema)] = schema, key
        return key

    def after(self, place: Place, token: int) -> Place:
        """The place behind `token`. Raises OutsideGrammar."""
        return place.after(token, self._tokens.vocab)

    def of(self, schema: Mapping[str, Any], plan_ids: Sequence[int]) -> list[Bits]:
        """The mask that each of these tokens was drawn under. Raises OutsideGrammar, BadSchema."""
        place, found = self.root(schema), []
        for index, token in enumerate(plan_ids):
            found.append(place.bits)
            if not (place.bits[token >> 3] >> (token & 7)) & 1:
                raise OutsideGrammar(f"token {token} is outside the grammar: plan and schema do not belong together")
            if token not in self._tokens.eos_ids and index + 1 < len(plan_ids):
                place = self.after(place, token)
        return found

    def forget(self, bytes_max: int = BYTES_MAX) -> None:
        """Drop the schemas used longest ago until the rest fits."""
        sizes = {key: place.size_bytes() for key, place in self._roots.items()}
        total = sum(sizes.values())
        for key in list(self._roots):
            if total <= bytes_max:
                return
            total -= sizes[key]
            del self._roots[key]


def unpacked(bits: Sequence[Bits], vocab: int) -> npt.NDArray[np.bool_]:
    """Masks as [len(bits), vocab] bool."""
    return np.unpackbits(np.stack(bits), axis=1, count=vocab, bitorder="little").astype(bool)
