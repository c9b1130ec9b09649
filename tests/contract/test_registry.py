"""`PolicyRegistry`: the fake and PostgreSQL give the same answers and refuse the same moves."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.adapters.postgres.database import async_engine, connected
from gateway.adapters.postgres.policies.registry import Registry
from gateway.errors import BadRequest, Conflict, NotFound, Unavailable
from gateway.service.ports.policies import PolicyRegistry
from tests.fakes.registry import FakeRegistry
from tests.policies import write_policy

PASSED = {"passed": True, "refusals": []}
REFUSED = {"passed": False, "refusals": [{"name": "parse_rate", "said": "0.71 is under 0.99"}]}


@pytest.fixture(params=["fake", "postgres"])
async def registry(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    if request.param == "fake":
        yield FakeRegistry(tmp_path / "policies")
        return
    async with connected(request.getfixturevalue("database_url")) as engine:
        yield Registry(engine, tmp_path / "policies")


async def published(registry: Any, tmp_path: Path, number: int, **manifest: Any) -> str:
    source = write_policy(tmp_path / f"source-{number}", str(number), (float(number), 2.0), **manifest)
    version = await registry.publish(source, by="job:1", gate=PASSED)
    return str(version.id)


async def live(registry: Any, tmp_path: Path, number: int) -> str:
    version = await published(registry, tmp_path, number)
    await registry.move(version, "shadow", by="a")
    await registry.canary(version, 100, by="a")
    await registry.move(version, "live", by="a", why="good")
    return version


async def states(registry: Any) -> dict[str, str]:
    return {version.id: version.state for version in await registry.list("conductor")}


async def test_it_is_a_registry(registry: Any) -> None:
    port: PolicyRegistry = registry
    assert list(await port.list()) == []
    assert (await port.standing("conductor")).held == ()


async def test_a_version_goes_its_whole_way(registry: Any, tmp_path: Path) -> None:
    one = await live(registry, tmp_path, 1)
    two = await published(registry, tmp_path, 2, parent=one)
    found = await registry.get(two)
    assert (found.state, found.parent, found.gate, found.manifest["version"]) == ("candidate", one, PASSED, "2")
    assert (await registry.move(two, "shadow", by="a")).state == "shadow"
    for percent in (1, 5, 25, 100, 5):
        assert (await registry.canary(two, percent, by="a")).percent == percent
    now = await registry.standing("conductor")
    assert (now.live.id, now.canary.id, now.canary.percent) == (one, two, 5)
    await registry.move(two, "live", by="a", why="better")
    now = await registry.standing("conductor")
    assert (now.live.id, now.previous.id, now.canary) == (two, one, None)
    assert await states(registry) == {two: "live", one: "retired"}


async def test_a_rollback_brings_the_previous_live_back(registry: Any, tmp_path: Path) -> None:
    one = await live(registry, tmp_path, 1)
    two = await live(registry, tmp_path, 2)
    assert (await registry.rollback("conductor", by="key:a", why="worse", cause="outcome")).id == two
    assert await states(registry) == {two: "retired", one: "live"}
    told = await registry.events("conductor", 2)
    assert [(one["version"], one["what"], one["was"], one["state"]) for one in told] == [
        ("conductor@1", "restored", "retired", "live"),
        ("conductor@2", "rolled back", "live", "retired"),
    ]
    assert told[1]["detail"] == {"cause": "outcome"}
    with pytest.raises(Conflict, match="conductor@1 replaced no other version"):
        await registry.rollback("conductor", by="key:a", why="worse")


async def test_a_rollback_takes_the_canary_first(registry: Any, tmp_path: Path) -> None:
    one = await live(registry, tmp_path, 1)
    two = await published(registry, tmp_path, 2)
    await registry.move(two, "shadow", by="a")
    await registry.canary(two, 25, by="a")
    assert (await registry.rollback("conductor", by="a", why="odd")).id == two
    assert await states(registry) == {two: "retired", one: "live"}
    with pytest.raises(Conflict):
        await registry.rollback(two, by="a", why="again")


@pytest.mark.parametrize(
    ("way", "to", "told"),
    [
        ((), "canary", "conductor@2 is candidate, not to be made canary; a candidate is shadowed or retired"),
        ((), "live", "conductor@2 is candidate, not to be made live"),
        (("shadow",), "live", "a shadow becomes the canary or is retired"),
        (("shadow",), "shadow", "conductor@2 is shadow, not to be made shadow"),
        (("shadow", "canary"), "shadow", "a canary is promoted or retired"),
        (("shadow", "canary", "live"), "retired", "the live version leaves by `rollback`"),
        (("retired",), "live", "a retired version comes back only as the previous one of a rollback"),
        (("retired",), "candidate", "publish its directory again"),
    ],
)
async def test_an_illegal_move_is_refused_by_name(
    registry: Any, tmp_path: Path, way: tuple[str, ...], to: str, told: str
) -> None:
    await live(registry, tmp_path, 1)
    two = await published(registry, tmp_path, 2)

    async def go(state: str) -> None:
        if state == "canary":
            await registry.canary(two, 1, by="a")
        else:
            await registry.move(two, state, by="a")

    for state in way:
        await go(state)
    before = await states(registry)
    with pytest.raises(Conflict) as refused:
        await go(to)
    assert told in refused.value.message
    assert refused.value.code == "illegal_move"
    assert await states(registry) == before


async def test_there_is_one_shadow_and_one_canary(registry: Any, tmp_path: Path) -> None:
    two, three = await published(registry, tmp_path, 2), await published(registry, tmp_path, 3)
    await registry.move(two, "shadow", by="a")
    with pytest.raises(Conflict, match="conductor@2 is the shadow now"):
        await registry.move(three, "shadow", by="a")
    await registry.canary(two, 1, by="a")
    await registry.move(three, "shadow", by="a")
    with pytest.raises(Conflict, match="conductor@2 is the canary now; retire or promote it first"):
        await registry.canary(three, 1, by="a")


async def test_a_share_is_one_of_four(registry: Any, tmp_path: Path) -> None:
    two = await published(registry, tmp_path, 2)
    await registry.move(two, "shadow", by="a")
    with pytest.raises(BadRequest, match="1, 5, 25, 100"):
        await registry.canary(two, 50, by="a")


async def test_an_unknown_version_is_not_found(registry: Any) -> None:
    for name in ("conductor@9", "other@1"):
        with pytest.raises(NotFound):
            await registry.get(name)
    for name in ("conductor", "conductor@", "conductor@01", "../x@1", "conductor@1@2"):
        with pytest.raises(BadRequest, match="write NAME@NUMBER"):
            await registry.get(name)


@pytest.mark.parametrize(("gate", "told"), [(REFUSED, "the gate refused it (parse_rate)"), (None, "no gate report")])
async def test_a_refused_gate_needs_force_and_force_is_audited(
    registry: Any, tmp_path: Path, gate: Any, told: str
) -> None:
    source = write_policy(tmp_path / "bad", "3")
    with pytest.raises(Conflict) as refused:
        await registry.publish(source, by="key:abc", gate=gate)
    assert told in refused.value.message
    assert refused.value.code == "gate_refused"
    with pytest.raises(BadRequest, match="say why"):
        await registry.publish(source, by="key:abc", gate=gate, forced=True)
    assert list(await registry.list()) == []
    version = await registry.publish(source, by="key:abc", gate=gate, forced=True, why="a demonstration")
    (event,) = await registry.events(version.id)
    assert (event["what"], event["who"], event["why"], event["forced"]) == (
        *("published", "key:abc", "a demonstration"),
        True,
    )
    assert event["detail"]["refusals"] == (gate or {}).get("refusals", [])


async def test_a_gate_report_of_other_weights_is_none(registry: Any, tmp_path: Path) -> None:
    source = write_policy(tmp_path / "source", "3")
    weights = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    with pytest.raises(Conflict, match="the gate report is of other weights") as refused:
        await registry.publish(source, by="a", gate=PASSED | {"candidate_sha256": "0" * 64})
    assert refused.value.code == "gate_refused"
    assert list(await registry.list()) == []
    version = await registry.publish(source, by="a", gate=PASSED | {"candidate_sha256": weights})
    assert version.gate["candidate_sha256"] == weights


async def test_the_same_directory_again_is_the_same_version(registry: Any, tmp_path: Path) -> None:
    two = await published(registry, tmp_path, 2)
    assert await published(registry, tmp_path, 2) == two
    assert len(await registry.events(two)) == 1
    other = write_policy(tmp_path / "other", "2", (7.0,))
    assert (await registry.publish(other, by="a", gate=PASSED)).id == "conductor@3"
    unnumbered = write_policy(tmp_path / "unnumbered", "next", (8.0,))
    assert (await registry.publish(unnumbered, by="a", gate=PASSED)).id == "conductor@4"


async def test_a_retired_directory_is_published_anew(registry: Any, tmp_path: Path) -> None:
    two = await published(registry, tmp_path, 2)
    await registry.move(two, "retired", by="a")
    assert await published(registry, tmp_path, 2) == "conductor@3"


async def test_a_note_changes_nothing_but_the_audit(registry: Any, tmp_path: Path) -> None:
    two = await published(registry, tmp_path, 2)
    await registry.note(await registry.get(two), "refused", by="gateway", why="torn")
    assert (await registry.get(two)).state == "candidate"
    assert [one["what"] for one in await registry.events(two)] == ["refused", "published"]


async def test_a_database_that_is_away_is_unavailable(registry: Any, tmp_path: Path) -> None:
    if isinstance(registry, FakeRegistry):
        registry.away = True
        broken: Any = registry
    else:
        broken = Registry(async_engine("postgresql://127.0.0.1:1/none"), tmp_path / "policies")
    for call in (broken.standing("conductor"), broken.list(), broken.events("conductor"), broken.get("conductor@1")):
        with pytest.raises(Unavailable):
            await call
    with pytest.raises(Unavailable):
        await published(broken, tmp_path, 2)
    assert [path for path in (tmp_path / "policies").glob("*") if path.is_dir()] == []
