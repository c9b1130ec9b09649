"""Rows that share their prompts, as trees: a prompt is one trunk, the tokens of its rows are branches behind it.

A tree is one sequence of the model's batch. Every token has the position that it has in its own row, and a mask of four
dimensions lets it see its trunk and its branch alone; any decoder of transformers with full attention takes both. So a
prompt is computed once for all its rows, with or without gradient, and its keys and values are held once.

Shapes: P trees, R rows, N columns that are held, S columns that are new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policy.start.synthetic.model import Pair

Ids = Sequence[int]
TRUNK = 0  # the branch number of a prompt's tokens
NOTHING = -1  # and of padding
COLUMNS_STEP = 256  # columns that a full cache grows by


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that follow each other in one row, from position `start` of it. `branch`: TRUNK, or the row's own number
    from 1."""

    ids: Ids
    start: int
    branch: int


@dataclass(frozen=True, slots=True)
class Layout:
    """New columns, each [P, S]; `ends`: for each tree, the column behind the last token of each of its stretchs."""

    ids: Tensor
    positions: Tensor
    branch: Tensor
    ends: list[list[int]]


def laid_out(trees: Sequence[Sequence[Stretch]], device: torch.device) -> Layout:
    """The stretchs of each tree side by side, padded behind."""
    most = max(sum(len(stretch.ids) for stretch in tree) for tree in trees)
    columns: list[list[tuple[int, int, int]]] = []
    ends: list[list[int]] = []
    for tree in trees:
        columns.append([])
        ends.append([])
        for stretch in tree:
            columns[-1] += [(token, stretch.start + at, stretch.branch) for at, token in enumerate(stretch.ids)]
            ends[-1].append(len(columns[-1]))
        columns[-1] += [(0, 0, NOTHING)] * (most - len(columns[-1]))
    ids, positions, branch = torch.tensor(columns, device=device).unbind(2)
    return Layout(ids, positions, branch, ends)


def visible(held: Tensor, new: Tensor) -> Tensor:
    """What each new column may look at, [P, 1, S, N + S] bool: the trunk and its own branch, up to itself. `held`
    [P, N], `new` [P, S]: branch numbers. Padding looks at something, for a softmax over nothing is no number."""
    every = torch.cat([held, new], 1)[:, None]
    seen = (every == TRUNK) | (every == new[:, :, None])
    size = new.shape[1]
    later = torch.ones((size, size), dtype=torch.bool, device=new.device).triu(1)
    seen[:, :, held.shape[1] :] &= ~later
    return seen[:, None]


class Columns:
    """The keys and values of P trees, as a model of transformers updates a cache; and the branch of each column."""

    def __init__(self, trees: int, device: torch.device) -> None:
        self.branch: Tensor = torch.empty((trees, 0), dtype=torch.long, device=device)
        self._pairs: list[Pair] = []

    def __len__(self) -> int:
        return int(self.branch.shape[1])

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> Pair:
        """Write the new columns of one layer, [P, heads, S, head_dim] each; all of that layer's columns."""
        end = len(self) + keys.shape[2]
        if layer_idx == len(self._pairs):
            self._pairs.append((_room(keys, end), _room(values, end)))
        if end > self._pairs[layer_idx][0].shape[2]:
            self._pairs[layer_idx] = _grown(self._pairs[layer_idx], len(self), end)
        held = self._pairs[layer_idx]
        held[0][:, :, len(self) : end] = keys
        held[1][:, :, len(self) : end] = values
        return held[0][:, :, :end], held[1][:, :, :end]

    def get_seq_length(self, *_: Any) -> int:
        """As transformers asks a cache."""
        return len(self)

    def add(self, branch: Tensor) -> None:
        """Count columns that every layer has written: their branches [P, S]."""
        self.branch = torch.cat([self.branch, branch], 1)

    def read(self, tree: int) -> list[Pair]:
        """The trunk of one tree, a copy, by layer: [heads, columns, head_dim] each."""
        trunk = torch.nonzero(self.branch[tree] == TRUNK)[:, 0]
        return [
            (keys[tree].index_select(1, trunk), values[tree].index_select(1, trunk)) for keys, values in self._pairs
        ]

    def write(self, trunks: Sequence[tuple[int, Sequence[Pair]]]) -> None:
        """Begin with a trunk for each tree: how many columns of it, and `read`'s pairs, which may have more."""
        most = max(length for length, _ in trunks)
        if not most:
            return
        for layer, (keys, values) in enumerate(next(pairs for length, pairs in trunks if length)):
            shape = (len(trunks), keys.shape[0], most + COLUMNS_STEP, keys.shape[2])
            pair = keys.new_zeros(shape), values.new_zeros((*shape[:3], values.shape[2]))
            for tree, (length, pairs) in enumerate(trunks):
                for room, held in zip(pair, pairs[layer] if length else (), strict=False):
                    room[tree, :, :length] = held[:, :length]
            self._pairs.append(pair)
        lengths = torch.tensor([length for length, _ in trunks], device=self.branch.device)
        present = torch.arange(most, device=self.branch.device) < lengths[:, None]
        self.branch = torch.where(present, TRUNK, NOTHING)

    def keep(self, trees: Sequence[int], branches: Sequence[int]) -> None:
        """Go on with these trees and branches alone; columns of others are forgotten once they are many."""
        which = torch.tensor(trees, device=self.branch.device)
        known = torch.tensor([TRUNK, *branches], device=self.branch.device)
        branch = self.branch[which]
        branch = torch.where(torch.isin(branch, known), branch, NOTHING)
        live = branch != NOTHING
        most = int(live.sum(1).max())
        if len(trees) == len(self.branch) and len(self) - most < COLUMNS_STEP:
            self.branch = branch
            return
        order = (~live).long().argsort(dim=1, stable=True)[:, :most]
        self.branch = branch.gather(1, order)
        self._pairs = [(_picked(keys, which, order), _picked(values, which, order)) for keys, values in self._pairs]


def _room(like: Tensor, columns: int) -> Tensor:
    """Zeros, for a column that nothing was written to must not hold a NaN."""
    shape = (*like.shape[:2], columns + COLUMNS_STEP, like.shape[3])
    return like.new_zeros(shape)


def _grown(pair: Pair, held: int, columns: int) -> Pair:
    grown = _room(pair[0], columns), _room(pair[1], columns)
    for new, old in zip(grown, pair, strict=True):
        new[:, :, :held] = old[:, :, :held]
    return grown


def _picked(tensor: Tensor, trees: Tensor, order: Tensor) -> Tensor:
    """The columns [P, n] of these trees, with room behind."""
    room = tensor.new_zeros((len(trees), tensor.shape[1], order.shape[1] + COLUMNS_STEP, tensor.shape[3]))
    for to, (tree, columns) in enumerate(zip(trees.tolist(), order, strict=True)):
        room[to, :, : order.shape[1]] = tensor[tree].index_select(1, columns)
    return room
