"""The weights being trained, behind one small interface; and the small conductor's, in plain torch.

`large.py` has the same for any causal language model that transformers loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from policy.serve.shape import Shape, load_weights
from policy.start.synthetic.config import ModelConfig
from policy.start.synthetic.model import Qwen2
from policy.train.weights import forked
from policy.train.weights.forked import Own

Ids = Sequence[int]


class Decoding(Protocol):
    """Rows being decoded side by side, each after one of the prompts that `begin` was given."""

    scores: Tensor  # [rows, vocab]: logits of each row's next token

    def feed(self, tokens: Sequence[Ids]) -> None:
        """One or more further tokens for every row."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone, in this order; prompt by prompt, as they were. `scores` becomes theirs."""
        ...


class Weights(Protocol):
    """A causal language model that decodes and scores plans. Lengths are tokens."""

    model: nn.Module
    vocab: int
    context: int
    device: torch.device
    shares_prompts: bool  # whether a prompt is computed once for all its rows

    def states(self, prompts: Sequence[Ids], owners: Sequence[int], plans: Sequence[Ids]) -> Tensor:
        """The state that each plan token is drawn from, plan after plan [tokens, hidden], with gradient. `owners`: each
        row's prompt, ascending."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Of states [n, hidden] → [n, vocab]."""
        ...

    def begin(self, prompts: Sequence[Ids], owners: Sequence[int]) -> Decoding:
        """Start one row for each owner; ascending."""
        ...


class SmallWeights:
    """`policy.start.synthetic.model.Qwen2`: prompts are computed once for all their rows, in training too."""

    shares_prompts = True

    def __init__(self, model: Qwen2, vocab: int) -> None:
        self.model = model
        self.vocab = vocab
        self.context = model.c.context
        self.device = model.lm_head.weight.device

    @classmethod
    def load(cls, directory: Path, shape: Shape, device: str = "cpu") -> SmallWeights:
        """The weights of a policy directory. Raises VersionRefused."""
        model = Qwen2(_config(shape), shape.vocab)
        stored = {name: torch.from_numpy(array) for name, array in load_weights(directory, shape).items()}
        model.load_state_dict(stored)
        return cls(model.to(device), shape.vocab)

    def states(self, prompts: Sequence[Ids], owners: Sequence[int], plans: Sequence[Ids]) -> Tensor:
        """As the interface says."""
        prefix = forked.prefix_of(self.model, prompts)
        first = prefix.states[torch.tensor(owners, device=self.device)][:, None]
        if max(map(len, plans)) == 1:
            return first[:, 0]
        slots, repeats = _slots(owners)
        fed: list[Ids] = [()] * (repeats * len(prompts))
        for slot, plan in zip(slots, plans, strict=True):
            fed[slot] = plan[:-1]
        further, _ = forked.extend(self.model, prefix, None, *forked.padded(fed, self.device))
        states = torch.cat([first, further[torch.tensor(slots, device=self.device)]], 1)
        return states[forked.present(list(map(len, plans)), self.device)]

    def logits(self, states: Tensor) -> Tensor:
        """As the interface says."""
        return forked.logits(self.model, states)

    def begin(self, prompts: Sequence[Ids], owners: Sequence[int]) -> Decoding:
        """As the interface says."""
        return _Forked(self.model, prompts, owners)


class _Forked:
    """Rows in slots, G to a prompt; slots that no row needs hold nothing and are looked at by nobody."""

    def __init__(self, model: Qwen2, prompts: Sequence[Ids], owners: Sequence[int]) -> None:
        self._model = model
        self._prefix = forked.prefix_of(model, prompts)
        self._own: Own | None = None
        self._owners = list(owners)
        self._slots, self._repeats = _slots(owners)
        self._device = model.lm_head.weight.device
        self.scores = forked.logits(model, self._prefix.states[self._index(owners)])

    def feed(self, tokens: Sequence[Ids]) -> None:
        """As the interface says."""
        fed: list[Ids] = [()] * (self._repeats * len(self._prefix.lengths))
        for slot, ids in zip(self._slots, tokens, strict=True):
            fed[slot] = ids
        states, self._own = forked.extend(self._model, self._prefix, self._own, *forked.padded(fed, self._device))
        lasts = self._index([len(ids) - 1 for ids in tokens])
        self.scores = forked.logits(self._model, states[self._index(self._slots), lasts])

    def keep(self, rows: Sequence[int]) -> None:
        """As the interface says."""
        owners = [self._owners[row] for row in rows]
        prompts = sorted(set(owners))
        number = {prompt: index for index, prompt in enumerate(prompts)}
        before = [self._slots[row] for row in rows]
        self._owners = [number[owner] for owner in owners]
        self._slots, self._repeats = _slots(self._owners)
        self._prefix = self._prefix.chosen(self._index(prompts))
        if self._own is not None:
            source = [before[0]] * (self._repeats * len(prompts))
            for slot, old in zip(self._slots, before, strict=True):
                source[slot] = old
            own = self._own.chosen(self._index(source))
            filled = torch.zeros(len(source), dtype=torch.bool, device=self._device)
            filled[self._index(self._slots)] = True
            self._own = Own(own.pairs, own.present & filled[:, None])
        self.scores = self.scores[self._index(rows)]

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self._device)


def _slots(owners: Sequence[int]) -> tuple[list[int], int]:
    """Where each row lies when every prompt has as many slots as the fullest one needs, and how many that is."""
    counts: dict[int, int] = {}
    nth = []
    for owner in owners:
        nth.append(counts.get(owner, 0))
        counts[owner] = nth[-1] + 1
    repeats = max(counts.values())
    return [owner * repeats + index for owner, index in zip(owners, nth, strict=True)], repeats


def _config(shape: Shape) -> ModelConfig:
    return ModelConfig(
        layers=shape.layers,
        hidden=shape.hidden,
        inner=shape.inner,
        heads=shape.heads,
        heads_kv=shape.heads_kv,
        head_dim=shape.head_dim,
        context=shape.context,
        rope_theta=shape.rope_theta,
        norm_eps=shape.norm_eps,
    )


def trainable(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def changes(model: nn.Module) -> int:
    """How often its weights were changed in place: another number, other weights."""
    return sum(parameter._version for parameter in model.parameters())
