"""How much better than its likes each row was, and which rows teach nothing. Formulas are policy.train.step.grpo's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policy.train.settings import Settings
from policy.train.step import grpo
from policy.train.step.rows import Row, grouped


@dataclass(frozen=True, slots=True)
class Weighed:
    """`advantages` [rows] and `live` [rows]: false where a row has none. `dead_share` is of groups."""

    advantages: Tensor
    live: Tensor
    dead_share: float


def weighed(rows: Sequence[Row], settings: Settings) -> Weighed:
    """Rewards against a baseline. A row whose prompt nobody else answered (a later round that alone came to its state)
    is measured against its episode's group, as far as that has more than one."""
    rewards = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    groups, opening, means, spread = _baseline(rows, rewards, settings)
    centred = rewards - means
    if settings.advantage == "leave_one_out":  # RLOO, arXiv:2402.14740
        counts = torch.bincount(groups)[groups]
        centred = centred * counts / (counts - 1).clamp_min(1)
    live = (spread > max(settings.std_min, grpo.DEAD_STD)) & (centred.abs() > grpo.DEAD_STD)
    if settings.divide_by_std:
        centred = centred / spread.clamp_min(max(settings.std_floor, grpo.DEAD_STD))
    dead = grpo.dead_share(rewards[opening], groups[opening], max(settings.std_min, grpo.DEAD_STD))
    return Weighed(torch.where(live, centred, 0.0).float(), live, dead)


def _baseline(rows: Sequence[Row], rewards: Tensor, settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Groups [rows], which rows open an episode [rows], and the mean and std that each row is measured by [rows]."""
    opening = torch.tensor([row.first for row in rows])
    if settings.advantage == "batch":
        groups = torch.zeros(len(rows), dtype=torch.long)
    elif settings.advantage == "category":
        number: dict[str, int] = {}
        groups = torch.tensor([number.setdefault(row.category, len(number)) for row in rows])
    else:
        return _by_prompt(rows, rewards, opening)
    return groups, opening, _means(rewards, groups), grpo.group_std(rewards, groups)


def _by_prompt(rows: Sequence[Row], rewards: Tensor, opening: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own, episodes = (torch.tensor(numbers) for numbers in grouped(rows))
    alone = torch.bincount(own)[own] < 2
    means, spread = _means(rewards, own), grpo.group_std(rewards, own)
    base_of = {group: index for index, group in enumerate(own.tolist()) if bool(opening[index])}
    for index in torch.nonzero(alone & ~opening)[:, 0].tolist():
        base = base_of.get(int(episodes[index]))
        if base is not None:
            means[index], spread[index] = means[base], spread[base]
    return own, opening, means, spread


def _means(values: Tensor, groups: Tensor) -> Tensor:
    return values - grpo.group_advantages(values, groups) if len(values) else values
