"""A task of one family of the arena by name."""

from __future__ import annotations

from random import Random

from policy.simulators.arena.families.tasks import FAMILIES, Split, Task, _make_plain


def make_family_task(name: str, seed: int, split: Split = "train") -> Task:
    """Raises KeyError on an unknown family."""
    rng = Random(f"arena {name} {split} {seed}")
    return _make_plain(rng, {family.name: family for family in FAMILIES}[name], split, f"arena-{name}-{split}-{seed}")
