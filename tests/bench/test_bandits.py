"""How soon the served rule is right, on a part of the grid of `python -m bench.simulated.bandits`."""

from __future__ import annotations

from statistics import median

import pytest

from bench.simulated.bandits import (
    BANDITS,
    CHEAP_USD,
    Rule,
    Truth,
    World,
    cells,
    drop,
    figures,
    grid_cell,
    many,
    markdown,
    newcomer,
    outcomes_until,
    regret,
)

SEEDS = 6
INSTANT = [
    (Truth(0.0, 0.0, CHEAP_USD), Truth(1.0, 0.0, CHEAP_USD * 37)),  # the cheap one is always wrong, both at once
    (Truth(0.0, 0.0, CHEAP_USD), Truth(1.0, 3.0, CHEAP_USD * 100)),
    (Truth(0.25, 0.0, CHEAP_USD), Truth(0.9, 3.0, CHEAP_USD * 100)),
    (Truth(1.0, 3.0, CHEAP_USD), Truth(1.0, 0.0, CHEAP_USD * 100)),  # equals: price decides
]


def came(values: list[int | None]) -> list[int]:
    assert None not in values
    return [one for one in values if one is not None]


@pytest.mark.parametrize("cell", INSTANT)
def test_speed_and_price_never_keep_a_wrong_worker(cell: tuple[Truth, Truth]) -> None:
    assert median(came(grid_cell(SEEDS, cell))) <= 20


def test_a_spread_of_the_grid_comes_within_twenty_outcomes_in_the_median() -> None:
    every = [outcomes_until(World(cell, seed=at), Rule()) for at, cell in enumerate(cells()[::29])]
    assert figures(every)["median"] <= 20
    assert sum(one is None for one in every) <= 1


def test_eight_workers_take_at_most_sixty() -> None:
    assert median(came(many(SEEDS, 8))) <= 60


def test_a_fall_is_answered_within_thirty_outcomes_and_a_newcomer_leads_within_150() -> None:
    assert median(came(drop(SEEDS, 50))) <= 30
    assert median(came(newcomer(SEEDS, 100))) <= 150


def test_without_an_exploring_share_it_comes_as_well() -> None:
    for cell in INSTANT:
        worlds = [World(cell, seed) for seed in range(SEEDS)]
        assert median(came([outcomes_until(world, Rule(0.0)) for world in worlds])) <= 40


def test_it_loses_less_than_ucb1() -> None:
    pair = (Truth(0.5, 0.3, CHEAP_USD), Truth(0.9, 0.3, CHEAP_USD * 10))
    lost = {
        name: sum(regret(World(pair, seed), BANDITS[name](), 120) for seed in range(SEEDS)) for name in ("rule", "UCB1")
    }
    assert lost["rule"] < lost["UCB1"]


def test_the_tables_say_never_where_it_never_came() -> None:
    none = figures([None, None, None])
    assert (none["median"], none["never"]) == (None, 3)
    regrets = {name: {"two": 1.0, "two_worst": 2.0, "eight": 3.0, "eight_worst": 4.0} for name in BANDITS}
    body = {"grid": none | {"cells": 1}, "many": {}, "drop": {}, "newcomer": {}, "regret": regrets}
    assert "| two workers, 1 cells | 3 | never | never | 3 |" in markdown(body)
