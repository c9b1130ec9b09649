"""Versions side by side in one server: merging adapters, proving, bounds, and the routes that change them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bench.engines.policies import manifest_of, reseal, write_adapter, write_full
from gateway.errors import VersionRefused
from policy.serve.__main__ import main
from policy.serve.engine import Busy, Slots
from policy.serve.lora import merge_adapter
from policy.serve.runtime import Runtime
from policy.serve.server import create_app
from policy.serve.shape import load_shape, load_weights
from policy.serve.versions import Versions
from tests.policy.qwen2_reference import reference_logits
from tests.tiny_model import write_tiny_model

KEY = "k" * 24
IDS = [3, 50, 7, 120, 33, 9]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("versions") / "tiny", layers=2)


@pytest.fixture
def versions(base: Path) -> Versions:
    made = Versions(Slots(threads=1, queue_max=1), versions_max=3)
    made.start_with("base@1", base)
    return made


@pytest.fixture
async def client(versions: Versions) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(versions, KEY))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as one:
        yield one
    versions.close()


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---------------------------------------------------------------- adapters


@pytest.mark.parametrize(("changes", "scale"), [({}, 2.0), ({"lora_alpha": 3}, 0.75), ({"use_rslora": True}, 4.0)])
def test_an_adapter_is_its_product_added_to_the_base(
    changes: dict[str, Any], scale: float, base: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(base, tmp_path / "a", 1, rank=4)
    edit(adapter / "adapter_config.json", **changes)
    weights = load_weights(base, load_shape(base))
    found = merge_adapter(adapter, weights)
    sides = load_file(adapter / "adapter_model.safetensors")
    at = "model.layers.1.mlp.down_proj"
    expected = weights[f"{at}.weight"] + scale * (
        sides[f"base_model.model.{at}.lora_B.weight"] @ sides[f"base_model.model.{at}.lora_A.weight"]
    )
    np.testing.assert_allclose(found[f"{at}.weight"], expected, atol=1e-5)
    assert found["model.norm.weight"] is weights["model.norm.weight"]  # what it leaves alone is shared
    runtime = Runtime(base, weights=found)
    logits, _ = runtime.forward(IDS, runtime.empty())
    np.testing.assert_allclose(logits, reference_logits(runtime.shape, found, IDS)[-1], atol=1e-4)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"r": 0}, "rank 0"),
        ({"r": "x"}, "adapter_config"),
        ({"lora_alpha": None}, "adapter_config"),
        ({"r": 3}, "at rank 3"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused_by_name(
    config: dict[str, Any], said: str, base: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(base, tmp_path / "a", 1)
    edit(adapter / "adapter_config.json", **config)
    with pytest.raises(VersionRefused, match=said):
        merge_adapter(adapter, load_weights(base, load_shape(base)))


@pytest.mark.parametrize(
    ("name", "dims", "said"),
    [
        (None, (), "holds no tensor"),
        ("lm_head.weight", (2, 2), "no LoRA tensor"),
        ("base_model.model.model.norm.lora_A.weight", (1, 128), "no matrix"),
        ("base_model.model.nowhere.lora_A.weight", (1, 128), "no matrix"),
        ("base_model.model.lm_head.lora_A.weight", (1, 128), "lm_head has"),
    ],
)
def test_tensors_that_do_not_belong_are_named(
    name: str | None, dims: tuple[int, ...], said: str, base: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(base, tmp_path / "a", 1)
    save_file({name: np.zeros(dims, np.float32)} if name else {}, adapter / "adapter_model.safetensors")
    with pytest.raises(VersionRefused, match=said):
        merge_adapter(adapter, load_weights(base, load_shape(base)))


def test_numbers_that_are_none_are_named(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path / "a", 1)
    tensors = {name: tensor * np.inf for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(VersionRefused) as refused, np.errstate(invalid="ignore"):
        merge_adapter(adapter, load_weights(base, load_shape(base)))
    assert refused.value.reason == "not_finite"
    weights = load_file(base / "model.safetensors") | {"model.norm.weight": np.full(128, np.nan, np.float32)}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(VersionRefused) as refused:
        load_weights(tmp_path, load_shape(base))
    assert refused.value.reason == "not_finite"


async def test_an_adapter_finds_its_base_served_or_beside_it_or_is_refused(base: Path, tmp_path: Path) -> None:
    home = tmp_path / "policies"
    other = write_full(base, home / "full@2", 5)
    adapter = write_adapter(other, home / "adapter@3", 1)
    served = Versions(Slots())
    served.start_with("base@1", base)
    assert (await served.load("adapter@3", adapter)).drift < 1e-3  # full@2 is not served, but lies beside it
    await served.load("full@2", other)
    beside_nothing = write_adapter(other, tmp_path / "elsewhere" / "adapter@4", 2)
    assert (await served.load("adapter@4", beside_nothing)).drift < 1e-3  # full@2 is served
    served.unload("full@2")
    nowhere = write_adapter(other, tmp_path / "nowhere" / "adapter@5", 3)
    for changes, said in (({}, "put its base"), ({"base_sha256": ""}, "must name"), ({"base": ""}, "without a name")):
        reseal(nowhere, **changes)
        with pytest.raises(VersionRefused, match=said) as refused:
            await served.load("adapter@5", nowhere)
        assert refused.value.reason == "base"
        reseal(nowhere, base=other.name, base_sha256=manifest_of(adapter)["base_sha256"])
    reseal(adapter, base_sha256="0" * 64)
    with pytest.raises(VersionRefused, match="neither loaded nor in"):
        await served.load("adapter@6", adapter)
    served.close()


# ---------------------------------------------------------------- bounds and proof


async def test_an_unloaded_version_counts_until_its_last_request_ends(
    versions: Versions, base: Path, tmp_path: Path
) -> None:
    made = {f"full@{seed}": write_full(base, tmp_path / str(seed), seed) for seed in (1, 2, 3)}
    first = await versions.load("full@1", made["full@1"])
    await versions.load("full@2", made["full@2"])
    first.engine.in_flight = 1
    versions.unload("full@1")
    with pytest.raises(VersionRefused) as refused:
        await versions.load("full@3", made["full@3"])
    assert refused.value.reason == "full"
    first.engine.in_flight = 0
    await versions.load("full@3", made["full@3"])
    versions.close()


async def test_the_last_version_is_held_and_a_name_is_one_directory(
    versions: Versions, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(VersionRefused) as refused:
        versions.unload("base@1")
    assert refused.value.reason == "held"
    versions.unload("nobody")
    assert await versions.load("base@1", base) is versions.get("base@1")
    with pytest.raises(VersionRefused) as refused:
        await versions.load("base@1", write_full(base, tmp_path / "x", 1))
    assert refused.value.reason == "taken"
    versions.close()


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ({"logprobs": [0.0]}, "engine"),
        ({"token_ids": [9_999]}, "engine"),
        ({"prompt_ids": []}, "engine"),
        ({"logprobs": None}, "engine"),
        ({"prompt_ids": [4]}, "probe"),
    ],
)
async def test_a_probe_that_cannot_be_scored_or_is_off_is_refused(
    probe: dict[str, Any], reason: str, versions: Versions, base: Path, tmp_path: Path
) -> None:
    directory = write_full(base, tmp_path / "x", 1)
    reseal(directory, probe=manifest_of(directory)["probe"] | probe)
    with pytest.raises(VersionRefused, match="probe") as refused:
        await versions.load("x@1", directory)
    assert refused.value.reason == reason
    assert [version.name for version in versions.all()] == ["base@1"]
    versions.close()


# ---------------------------------------------------------------- routes


async def test_the_key_is_asked_for_and_without_one_there_are_no_routes(
    client: httpx.AsyncClient, versions: Versions, base: Path
) -> None:
    body = {"name": "x@1", "directory": str(base)}
    for given in (None, b"Bearer wrong", "Bearer ü".encode()):
        headers = {b"authorization": given} if given else None
        for path in ("/v1/load_policy", "/v1/unload_policy"):
            assert (await client.post(path, json=body, headers=headers)).status_code == 401
    transport = httpx.ASGITransport(create_app(versions))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as open_one:
        assert (await open_one.post("/v1/load_policy", json=body)).status_code == 404


async def test_loading_and_unloading_over_http(client: httpx.AsyncClient, base: Path, tmp_path: Path) -> None:
    client.headers["authorization"] = f"Bearer {KEY}"
    directory = write_adapter(base, tmp_path / "a", 1)
    made = await client.post("/v1/load_policy", json={"name": "a@1", "directory": str(directory)})
    assert (made.status_code, made.json()["name"]) == (200, "a@1")
    assert made.json()["drift"] < 1e-3
    models = {entry["id"]: entry for entry in (await client.get("/v1/models")).json()["data"]}
    assert (set(models), models["a@1"]["root"]) == ({"base@1", "a@1"}, str(directory))
    assert models["a@1"]["baton"]["kind"] == "adapter"
    assert "baton_conductor_versions 2.0" in (await client.get("/metrics")).text
    assert (await client.post("/v1/unload_policy", json={"name": "a@1"})).status_code == 200
    held = await client.post("/v1/unload_policy", json={"name": "base@1"})
    assert (held.status_code, held.json()["error"]["code"]) == (409, "held")
    for bad in ({"name": "a@1", "directory": "relative"}, {"name": "", "directory": "/x"}, {"name": "a@1"}):
        assert (await client.post("/v1/load_policy", json=bad)).status_code == 400
    gone = await client.post("/v1/load_policy", json={"name": "a@1", "directory": str(tmp_path / "gone")})
    assert (gone.status_code, gone.json()["error"]["code"]) == (400, "missing")


async def test_a_sequence_is_scored_in_vllms_shape(client: httpx.AsyncClient, versions: Versions) -> None:
    reply = await client.post("/v1/completions", json={"model": "base@1", "prompt": IDS, "prompt_logprobs": 0})
    body = reply.json()
    entries = body["choices"][0]["prompt_logprobs"]
    assert (reply.status_code, body["model"], entries[0], len(entries)) == (200, "base@1", None, len(IDS))
    version = versions.get("base@1")
    assert version is not None
    runtime = version.engine.runtime
    logits = reference_logits(runtime.shape, runtime.weights, IDS).astype(np.float64)
    for at, token in enumerate(IDS[1:]):
        scores = logits[at] - np.log(np.exp(logits[at] - logits[at].max()).sum()) - logits[at].max()
        entry = entries[at + 1][str(token)]
        assert entry["logprob"] == pytest.approx(scores[token], abs=1e-4)
        assert entry["rank"] == 1 + (scores > scores[token]).sum()
        assert entry["decoded_token"]
    assert body["usage"] == {"prompt_tokens": len(IDS), "completion_tokens": 1, "total_tokens": len(IDS) + 1}


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"model": "nobody"}, 404),
        ({"prompt": "text"}, 400),
        ({"prompt": [1]}, 400),
        ({"prompt": [1, 10_000]}, 400),
        ({"prompt": [1, -1]}, 400),
        ({"prompt": [1] * 1025}, 400),
        ({"prompt_logprobs": 5}, 400),
        ({"max_tokens": 7}, 400),
        ({"stream": True}, 400),
    ],
)
async def test_only_scoring_is_answered(changes: dict[str, Any], status: int, client: httpx.AsyncClient) -> None:
    body = {"model": "base@1", "prompt": IDS, "prompt_logprobs": 0} | changes
    assert (await client.post("/v1/completions", json=body)).status_code == status


async def test_scoring_waits_its_turn_with_everything_else(client: httpx.AsyncClient, versions: Versions) -> None:
    versions.slots.in_flight = 2
    reply = await client.post("/v1/completions", json={"model": "base@1", "prompt": IDS, "prompt_logprobs": 0})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")
    version = versions.get("base@1")
    assert version is not None
    with pytest.raises(Busy):
        await version.engine.score(IDS)
    versions.slots.in_flight = 0
    assert all(math.isfinite(value) for value in (await version.engine.score(IDS)).logprobs)
    await asyncio.sleep(0)
    assert (versions.slots.in_flight, version.engine.in_flight) == (0, 0)


@pytest.mark.parametrize("content", [None, b"short", b"\xff\xfe"])
def test_a_server_does_not_start_without_the_key_it_was_told_of(
    content: bytes | None, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    assert main(["--model", str(base), "--admin-key-file", str(path)]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"conductor: {path}: ")
    assert line.count("\n") == 1
