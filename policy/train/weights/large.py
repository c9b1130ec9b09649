"""Any causal language model that transformers loads, behind the interface of weights.py. The one file that imports it.

Prompts are read once a row when scoring (no kernel here shares them); when decoding, once a prompt, and the cache is
copied to its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gateway.errors import ConfigError
from policy.train.weights.forked import padded
from policy.train.weights.small import Decoding, Ids

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LargeWeights:
    """As `Weights` says."""

    shares_prompts = False

    def __init__(self, model: nn.Module, vocab: int, context: int) -> None:
        self.model = model
        self.vocab = vocab
        self.context = context
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, directory: Path, context: int, dtype: str, device: str) -> LargeWeights:
        """From a Hugging Face directory. Raises ConfigError where transformers or the model is missing."""
        try:
            from transformers import AutoModelForCausalLM
        except ModuleNotFoundError:
            raise ConfigError(
                "this model needs transformers: install the extra with `pip install 'baton[train,embedded]'`"
            ) from None
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype], local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--init {directory}: {str(error).splitlines()[0]}") from None
        model = model.to(device).eval()  # no dropout: sampled and scored log-probs must be equal
        return cls(model, int(model.get_output_embeddings().weight.shape[0]), context)

    def scores(self, prompts: Sequence[Ids], owners: Sequence[int], plans: Sequence[Ids]) -> Tensor:
        """As the interface says."""
        rows = [(*prompts[owner], *plan[:-1]) for owner, plan in zip(owners, plans, strict=True)]
        ids, present = padded(rows, self.device)
        states = self._states(ids, present)
        starts = torch.tensor([len(prompts[owner]) - 1 for owner in owners], device=self.device)
        places = starts[:, None] + torch.arange(max(map(len, plans)), device=self.device)
        each = torch.arange(len(rows), device=self.device)[:, None]
        logits: Tensor = self._head(states[each, places.clamp_max(ids.shape[1] - 1)])
        return logits

    def begin(self, prompts: Sequence[Ids], owners: Sequence[int]) -> Decoding:
        """As the interface says."""
        return _Cached(self, prompts, owners)

    def _states(self, ids: Tensor, present: Tensor) -> Tensor:
        out = self._body(input_ids=ids, attention_mask=present.long(), use_cache=False)
        states: Tensor = out.last_hidden_state
        return states

    @property
    def _body(self) -> Any:
        return self.model.base_model

    @property
    def _head(self) -> Any:
        return self.model.get_output_embeddings()


class _Cached:
    """Rows side by side over one key-value cache; what a row has not said is masked out."""

    def __init__(self, weights: LargeWeights, prompts: Sequence[Ids], owners: Sequence[int]) -> None:
        self._weights = weights
        ids, present = padded(prompts, weights.device)
        out = weights._body(input_ids=ids, attention_mask=present.long(), use_cache=True)
        lengths = present.sum(1)
        last = out.last_hidden_state[torch.arange(len(ids), device=weights.device), lengths - 1]
        rows = torch.tensor(owners, device=weights.device)
        self._cache = out.past_key_values
        self._cache.batch_select_indices(rows)
        self._present, self._lengths = present[rows], lengths[rows]
        self.scores = weights._head(last)[rows]

    def feed(self, tokens: Sequence[Ids]) -> None:
        """As the interface says."""
        ids, present = padded(tokens, self._weights.device)
        positions = (self._lengths[:, None] + present.long().cumsum(1) - 1).clamp_min(0)
        self._present = torch.cat([self._present, present], 1)
        out = self._weights._body(
            input_ids=ids,
            attention_mask=self._present.long(),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._cache = out.past_key_values
        counts = present.sum(1)
        self._lengths = self._lengths + counts
        rows = torch.arange(len(ids), device=self._weights.device)
        self.scores = self._weights._head(out.last_hidden_state[rows, counts - 1])

    def keep(self, rows: Sequence[int]) -> None:
        """As the interface says."""
        chosen = torch.tensor(rows, device=self._weights.device)
        self._cache.batch_select_indices(chosen)
        self._present, self._lengths = self._present[chosen], self._lengths[chosen]
        self.scores = self.scores[chosen]
