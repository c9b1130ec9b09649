"""A policy directory is refused by name before any engine sees it: manifest, checksums, prompt, every byte of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from bench.engines.policies import SPOILS, manifest_of, reseal, spoil, write_adapter, write_full
from gateway.adapters.engines.files import BaseWeights, check, check_adapter, check_finite, check_full, read_header
from gateway.adapters.engines.sealed import file_sha256, read_object
from gateway.core.policies.manifest import weights_digest
from gateway.errors import VersionRefused
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("files") / "tiny", layers=1)


@pytest.fixture
def full(base: Path, tmp_path: Path) -> Path:
    return write_full(base, tmp_path / "full", 1)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return write_adapter(base, tmp_path / "adapter", 1, rank=2)


def refusal(work: Callable[[], object]) -> VersionRefused:
    with pytest.raises(VersionRefused) as refused:
        work()
    assert "\n" not in refused.value.message
    return refused.value


def test_good_directories_pass(base: Path, full: Path, adapter: Path) -> None:
    found = check(full)
    check_full(found, BaseWeights(base))
    assert (found.manifest.kind, found.directory, set(found.manifest.probe)) == (
        "sealed",
        full.resolve(),
        set(manifest_of(full)["probe"]),
    )
    found = check(adapter)
    check_adapter(found, BaseWeights(base), rank_max=2)
    check_adapter(found, None, rank_max=2)
    assert found.manifest.kind == "adapter"
    assert check(base).manifest.probe == {}


@pytest.mark.parametrize("how", [how for how, (_, reason) in SPOILS.items() if reason not in ("probe", "shape")])
@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_every_way_to_spoil_one_is_named(how: str, kind: str, full: Path, adapter: Path) -> None:
    directory = full if kind == "full" else adapter
    reason = spoil(directory, how)
    found = refusal(lambda: check(directory))
    assert (found.reason, found.code) == (reason, "version_refused")
    assert str(directory) in found.message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "quantised"}, "manifest"),
        ({"prompt_version": None}, "prompt"),
        ({"prompt_version": "full-1"}, "prompt"),
    ],
)
def test_a_manifest_that_says_something_else(changes: dict[str, Any], reason: str, full: Path) -> None:
    reseal(full, **changes)
    assert refusal(lambda: check(full)).reason == reason


def test_a_manifest_without_good_checksums_is_refused(full: Path) -> None:
    manifest = manifest_of(full)
    for sha256, reason in (
        ([], "manifest"),
        ({}, "manifest"),
        (manifest["sha256"] | {"../outside": "0"}, "missing"),
        (manifest["sha256"] | {"gone.json": "0"}, "missing"),
    ):
        (full / "manifest.json").write_text(json.dumps(manifest | {"sha256": sha256}))
        assert refusal(lambda: check(full)).reason == reason


def test_a_relative_path_would_be_another_one_for_the_engine() -> None:
    assert "absolute" in refusal(lambda: check(Path("policies/a@1"))).message


def test_json_that_is_none_or_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    for text in ("{", "[1]", "\x00"):
        path.write_text(text)
        assert refusal(lambda: read_object(path)).reason == "manifest"
    path.write_text("{}")
    monkeypatch.setattr("gateway.adapters.engines.sealed.JSON_BYTES_MAX", 1)
    assert "longer" in refusal(lambda: read_object(path)).message


# ---------------------------------------------------------------- fitting the base


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"r": 0}, "rank"),
        ({"r": "two"}, "rank"),
        ({"r": 9}, "rank"),
        ({"r": 1}, "shape"),
        ({"use_dora": True}, "kind"),
        ({"bias": "all"}, "kind"),
        ({"modules_to_save": ["lm_head"]}, "kind"),
        ({"rank_pattern": {"q_proj": 4}}, "kind"),
    ],
)
def test_an_adapter_that_is_no_plain_lora_of_that_rank(
    config: dict[str, Any], reason: str, adapter: Path, base: Path
) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    reseal(adapter)
    assert refusal(lambda: check_adapter(check(adapter), BaseWeights(base), rank_max=8)).reason == reason


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"model.norm.weight": (4,)},
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (2, 128)},
        {
            "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": (2, 128),
            "base_model.model.model.layers.9.mlp.up_proj.lora_B.weight": (256, 2),
        },
        {
            "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (2, 127),
            "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": (256, 2),
        },
    ],
)
def test_an_adapter_whose_tensors_do_not_fit(tensors: dict[str, tuple[int, ...]], adapter: Path, base: Path) -> None:
    save_file(
        {name: np.zeros(dims, np.float32) for name, dims in tensors.items()}, adapter / "adapter_model.safetensors"
    )
    reseal(adapter)
    assert refusal(lambda: check_adapter(check(adapter), BaseWeights(base), rank_max=8)).reason == "shape"


def test_an_adapter_of_other_weights_or_kind(adapter: Path, full: Path, base: Path) -> None:
    reseal(adapter, base_sha256="f" * 64)
    assert refusal(lambda: check_adapter(check(adapter), BaseWeights(base), rank_max=8)).reason == "base"
    assert refusal(lambda: check_adapter(check(full), BaseWeights(base), rank_max=8)).reason == "kind"
    assert refusal(lambda: check_full(check(adapter), BaseWeights(base))).reason == "kind"


def test_a_base_in_shards_has_shapes_and_one_checksum(base: Path, tmp_path: Path, adapter: Path) -> None:
    for number in (1, 2):
        save_file({f"tensor.{number}": np.zeros((2, 3), np.float32)}, tmp_path / f"model-0000{number}.safetensors")
    sharded = BaseWeights(tmp_path)
    assert sharded.shapes == {"tensor.1": (2, 3), "tensor.2": (2, 3)}
    assert sharded.sha256 == weights_digest({path.name: file_sha256(path) for path in tmp_path.glob("*.safetensors")})


def test_full_weights_of_another_model(base: Path, full: Path) -> None:
    config = full / "config.json"
    text = config.read_text()
    for changes, reason in (
        ({"tie_word_embeddings": True}, "tied"),
        ({"num_attention_heads": 8}, "shape"),
        ({"unheard_of": 1}, "shape"),
    ):
        config.write_text(json.dumps(json.loads(text) | changes))
        reseal(full)
        assert refusal(lambda: check_full(check(full), BaseWeights(base))).reason == reason
    config.write_text(json.dumps(json.loads(text) | {"transformers_version": "5.0", "torch_dtype": "bfloat16"}))
    reseal(full)
    check_full(check(full), BaseWeights(base))  # how it was saved is no difference


# ---------------------------------------------------------------- safetensors


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1.5])
def test_every_float_type_shows_what_is_no_number(dtype: str, value: float, tmp_path: Path) -> None:
    types = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.float32}
    array = np.linspace(-60_000, 60_000, 301).astype(types[dtype])
    array[200] = value
    data = array.tobytes() if dtype != "BF16" else (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    path = tmp_path / "x.safetensors"
    path.write_bytes(written({"w": {"dtype": dtype, "shape": [301], "data_offsets": [0, len(data)]}}, data))
    tensors = read_header(path)
    if np.isfinite(value):
        check_finite(path, tensors)
        return
    found = refusal(lambda: check_finite(path, tensors))
    assert found.reason == "not_finite"
    assert "w holds" in found.message


def test_the_first_and_last_number_of_every_block_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.adapters.engines.files.BLOCK_BYTES", 64)
    path = tmp_path / "x.safetensors"
    for at in (0, 15, 16, 31, 39):
        array = np.ones(40, np.float32)
        array[at] = np.nan
        save_file({"fine": np.ones(3, np.float32), "w": array}, path)
        assert refusal(lambda: check_finite(path, read_header(path))).reason == "not_finite"


def written(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 8,
        written([1]),
        written({"w": 3}),
        written({"w": GOOD | {"dtype": "I7"}}, b"12345678"),
        written({"w": GOOD | {"shape": [-2]}}, b"12345678"),
        written({"w": GOOD | {"shape": [3]}}, b"12345678"),
        written({"w": GOOD | {"shape": "2"}}, b"12345678"),
        written({"w": GOOD | {"data_offsets": [0]}}, b"12345678"),
        written({"w": GOOD}, b"1234567"),
        written({"w": GOOD}, b"123456789"),
        written({"v": GOOD, "w": GOOD}, b"12345678"),
        written({"w": GOOD | {"data_offsets": [4, 12]}}, b"123456789012"),
    ],
)
def test_a_file_that_is_no_safetensors_is_torn(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    assert refusal(lambda: read_header(path)).reason == "torn"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_file_cut_or_changed_anywhere_in_its_header_never_passes_as_another(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "x.safetensors"
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float32)}, path)
    whole, draw = path.read_bytes(), random.Random(seed)
    path.write_bytes(whole[: draw.randrange(len(whole))])
    assert refusal(lambda: read_header(path)).reason == "torn"
