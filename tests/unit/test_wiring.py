"""Which engine holds the versions, by setting; what is refused before anything starts."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from gateway.adapters.engines.embedded import EmbeddedEngine
from gateway.adapters.engines.reload import ReloadConductor, VllmReload
from gateway.adapters.engines.vllm import Replicas
from gateway.config import settings as config
from gateway.config.settings import Services, Settings
from gateway.core.policies.earning import Bar
from gateway.errors import ConfigError
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.loop.routers import Earnings
from gateway.wiring.base import base_of
from gateway.wiring.conductor import FREE, earnings_of, engine_of, planners_of
from tests.fakes.conductor import ScriptedConductor
from tests.kit import pool_file

NOTHING_EARNED = Earnings(AsyncMock(return_value=()), Bar(30))
URL = {
    "conductor": "http://127.0.0.1:1/v1#base",
    "conductor_input_usd_per_mtok": 0,
    "conductor_output_usd_per_mtok": 0,
}


def services() -> Services:
    return Services("postgresql://x", "redis://x", Path("pool.yaml"), b"pepper", "http://127.0.0.1:1/v1", "base")


async def built(settings: Settings) -> tuple[Any, Any, ScriptedConductor]:
    conductor = ScriptedConductor(())
    async with AsyncExitStack() as opened:
        return (*engine_of(base_of(settings, services(), opened), conductor), conductor)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({}, "data/policies"),
        ({"conductor": "some/directory"}, "data/policies"),
        ({"policies_dir": Path("shared")}, "shared"),
        ({"policy_engine": "none"}, None),
        ({"conductor": "worker:one"}, None),
        (URL, None),
        ({**URL, "policy_engine": "none"}, None),
        ({**URL, "policy_engine": "vllm-lora"}, "data/policies"),
        ({**URL, "policy_engine": "vllm-reload", "policies_dir": Path("shared")}, "shared"),
    ],
)
def test_the_directory_of_versions_follows_the_conductor(given: dict[str, Any], where: str | None) -> None:
    settings = config.load(data_dir=Path("data"), **given)
    assert settings.policies_path == (Path(where) if where else None)


async def test_our_own_server_holds_them_by_default() -> None:
    engine, conductor, given = await built(config.load())
    assert isinstance(engine, EmbeddedEngine)
    assert conductor is given


async def test_every_replica_of_a_vllm_gets_its_adapters() -> None:
    urls = "http://127.0.0.1:1/v1, http://127.0.0.1:2"
    engine, conductor, given = await built(
        config.load(**URL, policy_engine="vllm-lora", policy_engine_urls=urls, policy_rank_max=8)
    )
    assert isinstance(engine, Replicas)
    assert [one._api.url for one in engine._engines] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]  # type: ignore[attr-defined]
    assert {one._rank_max for one in engine._engines} == {8}  # type: ignore[attr-defined]
    assert conductor is given


async def test_weights_in_place_stand_before_the_conductor(tmp_path: Path) -> None:
    settings = config.load(**URL, policy_engine="vllm-reload", policy_engine_base=tmp_path)
    engine, conductor, _ = await built(settings)
    assert isinstance(engine, VllmReload)
    assert isinstance(conductor, ReloadConductor)


@pytest.mark.parametrize("more", [{}, {"policy_engine_urls": "http://a,http://b", "policy_engine_base": Path("x")}])
async def test_weights_in_place_need_their_base_and_one_engine(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="BATON_POLICY_ENGINE_BASE and one engine"):
        await built(config.load(**URL, policy_engine="vllm-reload", **more))


async def test_without_a_conductor_routers_alone_plan() -> None:
    async with AsyncExitStack() as opened:
        base = base_of(config.load(pool=Path("pool.yaml")), services(), opened)
        planners = planners_of(base, None, (), NOTHING_EARNED)
        assert planners["baton"][0] is planners["baton/rule"][0]
        assert "baton/conductor" not in planners


@pytest.mark.parametrize(
    ("given", "planner"),
    [
        ({}, "conductor"),  # the arena
        ({"pool": Path("pool.yaml")}, "auto"),
        ({"pool": Path("pool.yaml"), "conductor_outcomes_min": 0}, "conductor"),
        ({"pool": Path("pool.yaml"), "default_policy": "conductor"}, "conductor"),
        ({"pool": Path("pool.yaml"), "default_policy": "rule"}, "rule"),
    ],
)
async def test_the_planner_of_baton_by_setting(given: dict[str, Any], planner: str) -> None:
    async with AsyncExitStack() as opened:
        base = base_of(config.load(**given), services(), opened)
        learned = ConductorPlanner(ScriptedConductor(()), ConductorSettings("full", FREE, 1.0))
        earnings, standings = earnings_of(base, learned, (), pool_file())
        assert planners_of(base, learned, (), earnings)["baton"][0].name == planner
        assert standings.of("default").now.startswith("the rule plans") == (planner != "conductor")
