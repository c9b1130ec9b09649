"""Another pool in the place of the one that serves: all or nothing, written down first, and no request of two pools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest

from gateway.core.access.audit import Act
from gateway.core.money.amounts import cost_nano
from gateway.core.pool.revision import revision_of
from gateway.core.pool.workers import Price, pool_hash
from gateway.errors import ConfigError, NotFound, Unavailable
from gateway.service.admin.keys import KeyAdmin
from gateway.service.admin.pools import Pools
from gateway.service.ports.pools import LoadedPool
from gateway.service.ports.request import WorkerCall
from tests.fakes.admin import FakeAdmin
from tests.fakes.pools import FakePools, FakePoolWorkers, FakeSource, SpyPoolMetrics, loaded
from tests.fakes.store import FakeStore
from tests.fakes.workers import FakeWorkers, Says
from tests.kit import PRICE, Kit, TestClock, ask, model_worker, pool_file

ANN = Act("key:ann", "a new model")
DEAR = Price(input_usd_per_mtok=Decimal(100), output_usd_per_mtok=Decimal(200))
FIRST = pool_file()
SECOND = pool_file(model_worker("delta", "dune"))


class World:
    """`Pools` over fakes; `order` is what happened in which order."""

    def __init__(self, first: Any = FIRST, planner: str | None = None, **secrets: str) -> None:
        self.store = FakeStore()
        self.admin = FakeAdmin(self.store)
        self.revisions = FakePools(self.admin)
        self.source, self.workers = FakeSource(loaded(first, **secrets)), FakePoolWorkers()
        self.metrics, self.order = SpyPoolMetrics(), list[str]()
        self.pools = Pools(
            loaded(first, **secrets),
            self.source,
            self.revisions,
            self.workers,
            TestClock(),
            self.metrics,
            self.admin,
            planner=planner,
            place={"file": "pool.yaml", "host": "here"},
        )
        self.pools.tell(learn=self._learn, follow=lambda file: self.order.append(f"took {revision_of(file)[:6]}"))

    def _learn(self, values: Sequence[str]) -> None:
        kept = [link.entry.act for link in self.admin.links]
        self.order.append(f"learned {','.join(values)} after {kept}")

    def acts(self) -> list[str]:
        return [link.entry.act for link in self.admin.links]


async def test_a_changed_file_is_written_down_then_known_then_taken() -> None:
    world = World(alpha="old-key-1")
    world.source.now = loaded(SECOND, alpha="new-key-2")
    found = await world.pools.reload(ANN)
    first, second = revision_of(FIRST), revision_of(SECOND)
    assert (found["before"], found["hash"], found["changed"], found["applied"]) == (first, second, True, True)
    assert found["changes"]["workers"] == {"added": ["delta"]}
    assert found["changes"]["rekeyed"] == ["alpha"]
    assert "key-2" not in str(found)
    assert world.order == ["learned new-key-2 after ['pool.reloaded']", f"took {second[:6]}"]
    assert world.workers.taken == [second]
    assert world.pools.now.hash == second
    (entry,) = [link.entry for link in world.admin.links]
    assert (entry.actor, entry.target, entry.why) == ("key:ann", "pools", "a new model")
    assert entry.before == {"hash": first}
    assert entry.after == {"hash": second, "file": "pool.yaml", "host": "here", "changes": found["changes"]}
    assert (await world.pools.revision(second))["pool"]["workers"].keys() >= {"delta"}
    assert [one["in_use"] for one in await world.pools.revisions(10)] == [True]
    assert (world.metrics.in_use, world.metrics.results) == ([first, second], ["changed"])
    with pytest.raises(NotFound):
        await world.pools.revision("nope")


async def test_a_file_that_says_the_same_is_no_act() -> None:
    world = World(alpha="key")
    found = await world.pools.reload(ANN)
    assert (found["changed"], found["applied"], found["changes"]) == (False, False, {})
    assert (world.acts(), world.order, world.workers.taken, world.workers.closed) == ([], [], [], [])
    assert world.metrics.results == ["unchanged"]


async def test_another_key_alone_is_a_change_under_the_same_hash() -> None:
    world = World(alpha="key-before")
    world.source.now = loaded(FIRST, alpha="key-after")
    found = await world.pools.reload(ANN)
    assert (found["hash"], found["changes"]) == (found["before"], {"rekeyed": ["alpha"]})
    assert world.acts() == ["pool.reloaded"]
    assert not (await world.pools.reload(ANN))["changed"]


async def test_another_secret_of_a_tools_environment_is_a_change() -> None:
    world = World()
    world.source.now = LoadedPool(FIRST, {"alpha TOKEN": "before", "alphabet": "x"})
    assert (await world.pools.reload(ANN))["changes"] == {"rekeyed": ["alpha"]}
    world.source.now = LoadedPool(FIRST, {"alpha TOKEN": "after", "alphabet": "x"})
    assert (await world.pools.reload(ANN))["changes"] == {"rekeyed": ["alpha"]}
    assert not (await world.pools.reload(ANN))["changed"]


async def test_a_dry_run_says_the_same_and_does_nothing() -> None:
    world = World()
    world.source.now = loaded(SECOND)
    dry = await world.pools.reload(ANN, dry=True)
    assert (dry["changed"], dry["applied"]) == (True, False)
    assert (world.acts(), world.order, world.workers.taken, world.metrics.results) == ([], [], [], [])
    assert world.pools.now.hash == revision_of(FIRST)
    assert world.workers.closed == [revision_of(SECOND)]
    wet = await world.pools.reload(ANN)
    assert (wet["changes"], wet["lines"]) == (dry["changes"], dry["lines"])
    assert world.workers.closed == [revision_of(SECOND)]


@pytest.mark.parametrize("what", ["file", "adapter", "store"])
async def test_a_pool_that_cannot_be_loaded_changes_nothing(what: str) -> None:
    world = World()
    world.source.now = loaded(SECOND)
    mistake: Exception = ConfigError("pool.yaml:7: workers[0].handle: is missing; add it (docs/pool.md)")
    if what == "file":
        world.source.now = mistake  # type: ignore[assignment]
    elif what == "adapter":
        world.workers.refuses = mistake  # type: ignore[assignment]
    else:
        world.store.away = True
        mistake = Unavailable("")
    with pytest.raises(type(mistake)) as caught:
        await world.pools.reload(ANN)
    assert what == "store" or str(caught.value) == str(mistake)
    world.store.away = False
    assert (world.acts(), world.order, world.workers.taken) == ([], [], [])
    assert world.workers.closed == ([revision_of(SECOND)] if what == "store" else [])
    assert world.pools.now.hash == revision_of(FIRST)
    assert world.metrics.results == ["refused"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"url": "http://127.0.0.1:2/v1"}, "url"),
        ({"price": DEAR}, "price.input_usd_per_mtok, price.output_usd_per_mtok"),
        ({"model": "other", "description": "new words"}, "model"),
        ({}, "api_key"),
        (None, "name"),
    ],
)
async def test_the_worker_that_plans_is_refused_by_name(changed: dict[str, Any] | None, said: str) -> None:
    planner = model_worker("chief", "crown")
    world = World(pool_file(planner), planner="chief", chief="key-1")
    others = [] if changed is None else [model_worker("chief", "crown", **changed)]
    key = "key-1" if changed else "key-2"
    world.source.now = loaded(pool_file(*others), chief=key)
    with pytest.raises(ConfigError, match=rf"worker `chief` is the conductor.*its {said} cannot change.*restart"):
        await world.pools.reload(ANN)
    world.source.now = loaded(pool_file(model_worker("chief", "crown", description="plans well")), chief="key-1")
    assert (await world.pools.reload(ANN))["applied"]  # how it is shown to planners may change


async def test_two_at_once_take_it_once() -> None:
    world = World()
    world.source.now = loaded(SECOND)
    found = await asyncio.gather(world.pools.reload(ANN), world.pools.reload(ANN))
    assert sorted(one["applied"] for one in found) == [False, True]
    assert world.acts() == ["pool.reloaded"]


async def test_the_first_pool_is_written_down_as_soon_as_the_store_is_there() -> None:
    world = World()
    world.store.away = True

    async def back(seconds: float) -> None:
        assert seconds > 0
        world.store.away = False

    await world.pools.note_first(back)
    await world.pools.note_first(back)
    assert world.acts() == ["pool.loaded"]
    (entry,) = [link.entry for link in world.admin.links]
    assert (entry.actor, entry.after) == ("baton", {"hash": revision_of(FIRST), "file": "pool.yaml", "host": "here"})


async def test_keys_that_name_what_goes_are_said_beforehand() -> None:
    before = pool_file(model_worker("delta", "dune")).model_copy(
        update={"pools": {"default": ("alpha",), "b": ("delta",)}}
    )
    world = World(before)
    keys = KeyAdmin(world.admin, {1: b"pepper-for-tests-0123456789"}, TestClock(), before.pools)
    named, _ = await keys.create_key("named", pools=["b"])
    worker, _ = await keys.create_key("worker", pools=["b", "default"], workers=["delta"])
    revoked, _ = await keys.create_key("revoked", pools=["b"])
    await keys.create_key("default")
    await keys.revoke_key(revoked.public_id)
    world.source.now = loaded(pool_file())
    found = await world.pools.reload(ANN, dry=True)
    assert found["keys"] == {named.public_id: ["b"], worker.public_id: ["b", "delta"]}
    assert f"key {named.public_id} names what is gone: b" in found["lines"]
    world.store.away = True
    assert (await world.pools.reload(ANN, dry=True))["keys"] == {}


# ---------------------------------------------------------------- requests


async def test_a_request_ends_on_the_pool_it_began_with() -> None:
    """Held, called and paid as it was when it came, although its worker was made dearer and then removed meanwhile."""
    answer, called = asyncio.Event(), asyncio.Event()

    class Waiting(FakeWorkers):
        async def complete(self, call: WorkerCall) -> Any:
            called.set()
            await answer.wait()
            return await super().complete(call)

    before = pool_file(model_worker("delta", "dune"))
    after = pool_file(model_worker("delta", "dune", price=DEAR, url="http://127.0.0.1:9/v1"))
    kit = Kit(workers=Waiting({"delta": Says("42")}), pools=before)
    running = await kit.start(ask(model="delta"))
    await called.wait()
    kit.catalog.adopt(after)
    later = await kit.start(ask(model="delta"))
    kit.catalog.adopt(FIRST)
    with pytest.raises(NotFound):
        await kit.start(ask(model="delta"))
    answer.set()
    await asyncio.gather(running.finished.wait(), later.finished.wait())
    old, new = running.record, later.record
    assert (old.status, new.status) == ("done", "done")
    assert (old.pool_revision, new.pool_revision) == (revision_of(before), revision_of(after))
    assert old.pool_hash == pool_hash(before.pool("default"))
    usage = Says().usage
    assert (old.cost_nano, new.cost_nano) == (cost_nano(PRICE, usage), cost_nano(DEAR, usage))
    assert await kit.posted_nano() == old.cost_nano + new.cost_nano
    assert await kit.open_nano() == 0
    calls = [(call.worker.url, call.revision) for call in kit.workers.calls]
    assert calls == [(str(one.worker("delta").url), revision_of(one)) for one in (before, after)]


async def test_a_child_loop_is_of_its_parents_pool() -> None:
    plans = (
        '{"steps":[{"worker":"echo","task":"again","see":[]}]}',
        '{"steps":[{"worker":"atlas","task":null,"see":[]}]}',
    )
    kit = Kit(plans)
    running = await kit.serve()
    children = [row for row in kit.store.rows.rollouts if row["parent_id"] == running.record.id]
    assert [row["pool_revision"] for row in children] == [running.record.pool_revision] == [revision_of(FIRST)]
