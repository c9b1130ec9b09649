"""What differs between two pool files, and the hash that names one."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

from gateway.core.pool.changes import change_lines, changes, lost_names
from gateway.core.pool.revision import canonical_text, revision_of
from gateway.core.pool.workers import PoolFile, Price
from tests.kit import KEY, model_worker, pool_file


def a_file(*workers: Any, **more: Any) -> PoolFile:
    pools = more.pop("pools", {"default": [worker.name for worker in workers]})
    return PoolFile(workers=workers, pools=pools, **more)


def priced(name: str, usd: str, **more: Any) -> Any:
    price = Price(input_usd_per_mtok=Decimal(usd), output_usd_per_mtok=Decimal("2"))
    return model_worker(name, name, price=price, **more)


ONE, TWO = priced("one", "1"), priced("two", "0.50")


def test_equal_files_have_one_hash_however_they_are_written() -> None:
    names = {"pools": {"default": ["one", "two"]}}
    same = a_file(priced("two", "0.5"), priced("one", "1.00"), **names)
    assert canonical_text(a_file(ONE, TWO, **names)) == canonical_text(same)
    assert revision_of(a_file(ONE, TWO, **names)) == revision_of(same)
    assert changes(a_file(ONE, TWO, **names), same) == {}
    assert change_lines({}) == []


def test_everything_that_a_file_says_is_in_its_hash_but_where_its_keys_are() -> None:
    base = a_file(ONE, TWO)
    others = [
        a_file(priced("one", "2"), TWO),
        a_file(ONE),
        a_file(ONE, TWO, pools={"default": ["one"]}),
        a_file(ONE, TWO, pools={"default": ["two", "one"]}),
        a_file(ONE, TWO, pools={"default": ["one", "two"], "b": ["one"]}),
        a_file(ONE, TWO, pools={"default": ["one", "two"], "b": ["one"]}, default="b"),
        a_file(priced("one", "1", params={"seed": 1}), TWO),
        a_file(priced("one", "1", timeout_s=9), TWO),
    ]
    assert len({revision_of(one) for one in (base, *others)}) == len(others) + 1
    keyed = a_file(priced("one", "1", api_key="env:SOME_KEY"), TWO)
    assert revision_of(keyed) == revision_of(base)
    assert "SOME_KEY" not in canonical_text(keyed)


def test_the_text_is_the_whole_pool_and_pure_ascii() -> None:
    text = canonical_text(a_file(priced("one", "0.000001", description="für Übersetzungen \x00"), TWO))
    assert text.isascii()
    said = json.loads(text)
    assert said["workers"]["one"]["price"] == {
        "input_usd_per_mtok": "0.000001",
        "output_usd_per_mtok": "2",
        "call_usd": "0",
    }
    assert said["workers"]["one"]["description"] == "für Übersetzungen \x00"
    assert said["pools"] == {"default": ["one", "two"]}


def test_changes_name_workers_fields_and_pools() -> None:
    before = a_file(ONE, TWO, pools={"default": ["one", "two"], "old": ["two"]})
    after = a_file(
        priced("one", "3", tags=("quick",)),
        priced("three", "1"),
        pools={"default": ["one", "three"], "new": ["one"]},
        default="new",
    )
    found = changes(before, after, ["one", "two", "three"])
    assert found == {
        "workers": {
            "added": ["three"],
            "removed": ["two"],
            "changed": {"one": {"price.input_usd_per_mtok": ["1", "3"], "tags": [[], ["quick"]]}},
        },
        "rekeyed": ["one"],  # of a worker that is new or gone it says nothing
        "pools": {
            "added": {"new": ["one"]},
            "removed": {"old": ["two"]},
            "changed": {"default": [["one", "two"], ["one", "three"]]},
        },
        "default": ["default", "new"],
    }
    assert change_lines(found) == [
        "worker three: added",
        "worker two: removed",
        "worker one: price.input_usd_per_mtok: 1 -> 3",
        "worker one: tags: none -> ['quick']",
        "worker one: another api_key",
        "pool new: added (one)",
        "pool old: removed (two)",
        "pool default: one, two -> one, three",
        "default pool: default -> new",
    ]


def test_a_key_with_every_pool_loses_workers_that_it_names_and_no_pool() -> None:
    before = pool_file().model_copy(update={"pools": {"default": ("alpha",), "other": ("beta", "gamma")}})
    after = before.model_copy(update={"pools": {"default": ("alpha",), "third": ("gamma",)}})
    every = replace(KEY, pools=("*",))
    assert lost_names([every, replace(every, workers=("beta", "gamma"))], before, after) == {KEY.public_id: ["beta"]}
    assert lost_names([every], before, after) == {}


def test_the_kits_own_pool_has_every_kind() -> None:
    kinds = {worker["kind"] for worker in json.loads(canonical_text(pool_file()))["workers"].values()}
    assert kinds == {"openai", "tool", "self"}
