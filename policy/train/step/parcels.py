"""Rows cut into pieces that one forward pass can hold: alike in length and in rows a prompt, so that little is padding.

Pure; lengths are tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Parcel:
    """`rows` are indices into what was given, prompt by prompt; `owners`: each one's prompt, ascending."""

    prompts: list[Ids]
    owners: list[int]
    rows: list[int]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Rows of one prompt, and the longest of what comes after it."""

    prompt: Ids
    rows: list[int]
    plan: int


def parcels(prompts: Sequence[Ids], plans: Sequence[int], tokens_max: int, shared: bool) -> list[Parcel]:
    """Each row's prompt and the length of its plan → parcels of at most `tokens_max` tokens, padding included, or of a
    single row where that alone is longer. `shared`: a prompt is held once for all its rows, else with each of them."""
    units = [part for unit in _units(prompts, plans) for part in _split(unit, tokens_max, shared)]
    units.sort(key=lambda unit: (-len(unit.rows), -unit.plan.bit_length(), -len(unit.prompt), unit.rows[0]))
    found: list[list[_Unit]] = []
    for unit in units:
        last = found[-1] if found else []
        if last and 2 * len(unit.rows) >= len(last[0].rows) and _size([*last, unit], shared) <= tokens_max:
            last.append(unit)
        else:
            found.append([unit])
    return [_parcel(units) for units in found]


def _units(prompts: Sequence[Ids], plans: Sequence[int]) -> list[_Unit]:
    rows: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        rows.setdefault(tuple(prompt), []).append(index)
    return [_Unit(prompt, own, max(plans[index] for index in own)) for prompt, own in rows.items()]


def _split(unit: _Unit, tokens_max: int, shared: bool) -> list[_Unit]:
    """Into parts that fit."""
    if shared:
        most = (tokens_max - len(unit.prompt)) // max(1, unit.plan)
    else:
        most = tokens_max // max(1, len(unit.prompt) + unit.plan)
    step = max(1, most)
    return [_Unit(unit.prompt, unit.rows[at : at + step], unit.plan) for at in range(0, len(unit.rows), step)]


def _size(units: Sequence[_Unit], shared: bool) -> int:
    longest, plan = max(len(unit.prompt) for unit in units), max(unit.plan for unit in units)
    if not shared:
        return sum(len(unit.rows) for unit in units) * (longest + plan)
    return len(units) * (longest + max(len(unit.rows) for unit in units) * plan)


def _parcel(units: Sequence[_Unit]) -> Parcel:
    owners = [index for index, unit in enumerate(units) for _ in unit.rows]
    return Parcel([unit.prompt for unit in units], owners, [row for unit in units for row in unit.rows])
