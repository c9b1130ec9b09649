"""Rows that read their prompts each for itself: for models of transformers that take no tree.

When decoding, a prompt is read once, and its cache is copied to its rows. Shapes: R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from policy.train.weights.forked import padded

Ids = Sequence[int]


def states(
    body: Any, device: torch.device, prompts: Sequence[Ids], owners: Sequence[int], plans: Sequence[Ids]
) -> Tensor:
    """As `Weights.states`."""
    ids, present = padded([(*prompts[owner], *plan[:-1]) for owner, plan in zip(owners, plans, strict=True)], device)
    out = body(input_ids=ids, attention_mask=present.long(), use_cache=False)
    places = [
        row * ids.shape[1] + len(prompts[owner]) - 1 + at
        for row, (owner, plan) in enumerate(zip(owners, plans, strict=True))
        for at in range(len(plan))
    ]
    flat: Tensor = out.last_hidden_state.flatten(0, 1)
    return flat.index_select(0, torch.tensor(places, device=device))


class PlainRows:
    """Rows side by side over one key-value cache; a mask hides the padding. `logits`: of states."""

    def __init__(
        self,
        body: Any,
        logits: Callable[[Tensor], Tensor],
        device: torch.device,
        prompts: Sequence[Ids],
        owners: Sequence[int],
    ) -> None:
        self._body, self._logits, self._device = body, logits, device
        ids, present = padded(prompts, device)
        out = body(input_ids=ids, attention_mask=present.long(), use_cache=True)
        lengths = present.sum(1)
        last = out.last_hidden_state[torch.arange(len(ids), device=device), lengths - 1]
        rows = torch.tensor(owners, device=device)
        self._cache = out.past_key_values
        self._cache.batch_select_indices(rows)
        self._present, self._lengths = present[rows], lengths[rows]
        self.scores = logits(last)[rows]

    def feed(self, tokens: Sequence[Ids]) -> None:
        """As `Decoding` says."""
        ids, present = padded(tokens, self._device)
        positions = (self._lengths[:, None] + present.long().cumsum(1) - 1).clamp_min(0)
        self._present = torch.cat([self._present, present], 1)
        out = self._body(
            input_ids=ids,
            attention_mask=self._present.long(),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._cache = out.past_key_values
        counts = present.sum(1)
        self._lengths = self._lengths + counts
        rows = torch.arange(len(ids), device=self._device)
        self.scores = self._logits(out.last_hidden_state[rows, counts - 1])

    def keep(self, rows: Sequence[int]) -> None:
        """As `Decoding` says."""
        chosen = torch.tensor(rows, device=self._device)
        self._cache.batch_select_indices(chosen)
        self._present, self._lengths = self._present[chosen], self._lengths[chosen]
        self.scores = self.scores[chosen]
