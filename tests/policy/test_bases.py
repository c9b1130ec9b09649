"""Bases: any Hugging Face directory, sealed by its hashes, in shards and in half precision, served as it lies."""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from bench.engines.policies import write_adapter
from gateway.adapters.engines.files import BaseWeights, check, check_base
from gateway.adapters.engines.sealed import file_sha256, read_policy
from gateway.adapters.postgres.policies.policy_files import take_in
from gateway.core.policies.manifest import known_profile, weights_digest
from gateway.errors import BadRequest, BatonError, VersionRefused
from policy.engines.directory import read_conductors
from policy.engines.embedded import load_runtime
from policy.serve.engine import DecodeRequest, Engine
from policy.serve.lora import merge_adapter
from policy.serve.manifest import read_complete
from policy.serve.shape import load_shape, load_weights
from policy.start.pretrained.packaged import Packaged, import_packaged
from policy.start.pretrained.seal import add, run, seal
from tests.tiny_model import write_tiny_llama, write_tiny_model

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "Tiny-Llama")


def split(directory: Path) -> None:
    """The weights in two shards with an index, as large models are published."""
    weights = load_file(directory / "model.safetensors")
    names = sorted(weights)
    index: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def decoded(directory: Path) -> list[int]:
    """What an engine says that serves this directory, at temperature 0."""
    runtime, tokens = load_runtime(read_conductors([directory])[directory])
    engine = Engine(runtime, tokens, 1)
    try:
        ids = tokens.encode_chat([{"role": "user", "content": "Count."}])
        return [one.token for one in engine.decode(DecodeRequest(ids, SCHEMA, 0.0, 1.0, 0, 32))]
    finally:
        engine.close()


def test_a_base_is_sealed_where_it_lies_and_served(base: Path) -> None:
    sealed = seal(base)
    manifest = sealed.manifest
    assert (manifest.id, manifest.kind, manifest.source) == ("tiny-llama@0", "base", "")
    assert manifest.params == sum(array.size for array in load_file(base / "model.safetensors").values())
    assert read_complete(base).manifest == manifest
    assert decoded(base)
    assert check(base).manifest == manifest


def test_a_base_that_cannot_be_written_to_has_its_manifest_elsewhere(base: Path, tmp_path: Path) -> None:
    sealed = seal(base, tmp_path / "sealed", name="other")
    assert sorted(path.name for path in sealed.directory.iterdir()) == ["manifest.json"]
    assert (sealed.manifest.id, sealed.files) == ("other@0", base)
    assert decoded(sealed.directory) == decoded_beside(base)


def decoded_beside(base: Path) -> list[int]:
    seal(base)
    return decoded(base)


def test_a_base_is_asked_with_the_prompt_that_it_is_sealed_with(base: Path, tmp_path: Path) -> None:
    parser = ArgumentParser()
    add(parser)
    assert run(parser.parse_args([str(base), "--out", str(tmp_path / "sealed"), "--prompt", "brief"])) == 0
    assert known_profile(read_policy(tmp_path / "sealed", complete=True).manifest) == "brief"


def test_shards_are_one_model_with_one_digest(base: Path, tmp_path: Path) -> None:
    whole = decoded_beside(base)
    sharded = write_tiny_llama(tmp_path / "sharded")
    split(sharded)
    manifest = seal(sharded).manifest
    assert decoded(sharded) == whole
    assert manifest.weights_sha256 == weights_digest(manifest.sha256) == BaseWeights(sharded).sha256
    assert len([name for name in manifest.sha256 if name.endswith(".safetensors")]) == 2
    assert manifest.weights_sha256 not in manifest.sha256.values()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_in_half_precision_are_read(base: Path, dtype: str) -> None:
    exact = load_weights(base, load_shape(base))
    path = base / "model.safetensors"
    if dtype == "float16":
        save_file({name: array.astype(np.float16) for name, array in exact.items()}, path)
    else:
        write_bfloat16(path, exact)
    halved = load_weights(base, load_shape(base))
    assert {array.dtype for array in halved.values()} == {np.dtype(np.float32)}
    assert all(np.allclose(halved[name], array, rtol=2**-7, atol=1e-6) for name, array in exact.items())


def write_bfloat16(path: Path, weights: dict[str, np.ndarray]) -> None:
    """numpy has no bfloat16, and so safetensors writes none from numpy: the upper halves, with a header by hand."""
    header, blocks, at = {}, [], 0
    for name, array in weights.items():
        block = (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [at, at + len(block)]}
        blocks.append(block)
        at += len(block)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blocks))


def no_template(base: Path) -> None:
    config = json.loads((base / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(config))


def no_weights(base: Path) -> None:
    (base / "model.safetensors").unlink()


def lost_shard(base: Path) -> None:
    split(base)
    (base / "model-00002-of-00002.safetensors").unlink()


def no_tokenizer(base: Path) -> None:
    (base / "tokenizer.json").unlink()


def adapter(base: Path) -> None:
    (base / "adapter_config.json").write_text("{}")


def torn(base: Path) -> None:
    data = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(data[:-5])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_template, "no usable chat template"),
        (no_weights, "no \\*.safetensors; convert the weights"),
        (lost_shard, "model-00002-of-00002.safetensors of its index is not there; fetch every shard"),
        (no_tokenizer, "no tokenizer.json or tokenizer.model"),
        (adapter, "a LoRA adapter is no base"),
        (torn, "bytes long, its header says"),
    ],
)
def test_a_directory_that_is_no_base_is_refused_in_one_line(
    base: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(base)
    with pytest.raises(BatonError, match=message):
        seal(base)
    assert not (base / "manifest.json").exists()


def test_a_trained_version_is_not_sealed_again(base: Path) -> None:
    seal(base)
    document = json.loads((base / "manifest.json").read_text())
    (base / "manifest.json").write_text(json.dumps(document | {"kind": "sealed"}))
    with pytest.raises(BadRequest, match="sealed already"):
        seal(base)


def test_a_base_that_changed_or_moved_is_refused(base: Path, tmp_path: Path) -> None:
    sealed = seal(base, tmp_path / "sealed")
    document = json.loads((sealed.directory / "manifest.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({"chat_template": "another"}))
    with pytest.raises(VersionRefused, match="does not match its sha256"):
        read_policy(sealed.directory)
    shutil.rmtree(base)
    with pytest.raises(VersionRefused, match="named in the manifest and not there"):
        read_policy(sealed.directory)
    (sealed.directory / "manifest.json").write_text(json.dumps(document | {"source": "relative"}))
    with pytest.raises(VersionRefused, match="`source` is the absolute directory"):
        read_policy(sealed.directory)


def test_a_manifest_of_an_earlier_kind_is_read_as_sealed() -> None:
    shipped = Path(__file__).resolve().parents[2] / "policy" / "shipped" / "arena-3"
    assert read_complete(shipped).manifest.kind == "sealed"


# ---------------------------------------------------------------- published


def test_a_published_base_is_referenced_and_not_copied(base: Path, tmp_path: Path) -> None:
    seal(base)
    incoming = take_in(base, tmp_path / "policies")
    names = {path.name for path in incoming.place.iterdir()}
    assert names == {"manifest.json", "adapter_config.json", "adapter_model.safetensors"}
    published = read_complete(incoming.place)
    assert (published.files, published.manifest.weights_sha256) == (base, read_complete(base).manifest.weights_sha256)
    assert decoded(incoming.place) == decoded(base)


def test_the_adapter_of_a_published_base_changes_nothing(base: Path, tmp_path: Path) -> None:
    seal(base)
    place = take_in(base, tmp_path / "policies").place
    weights = load_weights(base, load_shape(base))
    changed = merge_adapter(place, weights)
    assert all(np.array_equal(changed[name], weights[name]) for name in weights)
    assert len([name for name in weights if changed[name] is not weights[name]]) == 1


def test_a_base_that_the_engine_does_not_run_is_refused(base: Path, tmp_path: Path) -> None:
    seal(base)
    other = write_tiny_llama(tmp_path / "other", seed=1)
    files = check(take_in(base, tmp_path / "policies").place)
    check_base(files, BaseWeights(base))
    with pytest.raises(VersionRefused, match="start an engine on this base"):
        check_base(files, BaseWeights(other))


# ---------------------------------------------------------------- packaged weights


def write_gguf(path: Path, model: Path) -> None:
    """The tiny Llama as llama.cpp's converter writes it: other names, queries and keys interleaved, biases none."""
    gguf = pytest.importorskip("gguf")
    config, shape = json.loads((model / "config.json").read_text()), load_shape(model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    words = [word for word, _ in sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])]
    special = {one["content"] for one in tokenizer["added_tokens"]}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads_kv)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3 if word in special else 1 for word in words])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    for name, token in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 0)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_chat_template(json.loads((model / "tokenizer_config.json").read_text())["chat_template"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.layers)
    for name, array in load_weights(model, shape).items():
        heads = shape.heads if "q_proj" in name else shape.heads_kv if "k_proj" in name else 0
        if heads:
            width = array.shape[1]
            array = np.ascontiguousarray(array.reshape(heads, 2, -1, width).swapaxes(1, 2).reshape(-1, width))
        writer.add_tensor(names.get_name(name, (".weight",)) + ".weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def packaged(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packaged:
    """A package that carries the tiny Llama; importing it fails, as llama.cpp is not there."""
    place = tmp_path / "site" / "tiny_weights"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("raise ImportError('llama_cpp')")
    write_gguf(place / "tiny.gguf", base)
    monkeypatch.syspath_prepend(str(place.parent))
    digest = file_sha256(place / "tiny.gguf")
    return Packaged("tiny_weights", "tiny-weights==1", "tiny.gguf", digest, "tiny", "Apache-2.0")


def test_packaged_weights_become_the_same_base(packaged: Packaged, base: Path, tmp_path: Path) -> None:
    sealed = import_packaged(packaged, tmp_path / "made")
    assert (sealed.manifest.id, sealed.manifest.kind) == ("tiny@0", "base")
    assert sealed.manifest.data == "tiny-weights==1: tiny.gguf"
    with (
        safe_open(base / "model.safetensors", "np") as exact,
        safe_open(sealed.files / "model.safetensors", "np") as ours,
    ):
        assert set(exact.keys()) == set(ours.keys())
        assert all(np.array_equal(exact.get_tensor(name), ours.get_tensor(name)) for name in set(exact.keys()))
    assert decoded(sealed.directory) == decoded_beside(base)


def test_numbers_are_split_into_digits(packaged: Packaged, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    sealed = import_packaged(packaged, tmp_path / "made")
    tokenizer = Tokenizer.from_file(str(sealed.files / "tokenizer.json"))
    assert tokenizer.encode("x2021").tokens == ["x", "2", "0", "2", "1"]


def test_another_file_than_the_known_one_is_refused_and_nothing_is_left(packaged: Packaged, tmp_path: Path) -> None:
    changed = Packaged("tiny_weights", "tiny-weights==1", "tiny.gguf", "0" * 64, "tiny", "Apache-2.0")
    with pytest.raises(VersionRefused, match="install that release again"):
        import_packaged(changed, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_package_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = Packaged("no_such_weights", "no-such-weights==1", "x.gguf", "0" * 64, "x", "MIT")
    with pytest.raises(BatonError, match="no-such-weights==1 is not installed; scripts/install pretrained adds it"):
        import_packaged(missing, tmp_path / "made")


def test_an_import_writes_over_nothing(packaged: Packaged, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    with pytest.raises(BadRequest, match="is there already"):
        import_packaged(packaged, tmp_path / "made")


@pytest.mark.parametrize("place", ["data/policies", "elsewhere"])
def test_the_base_of_an_adapter_is_found_in_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Beside the data directory's versions, and from anywhere by the setting, under whatever name it was unpacked."""
    made = write_tiny_model(tmp_path / "made" / "model")
    adapter = write_adapter(made, tmp_path / place / "conductor@3", 1)
    unpacked = tmp_path / "data" / "bases" / "unpacked"
    unpacked.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(made, unpacked)
    monkeypatch.setenv("BATON_DATA_DIR", str(tmp_path / ("data" if place == "elsewhere" else "none")))
    assert read_conductors([adapter])[adapter].home == unpacked.resolve()


def test_a_base_that_is_nowhere_is_told_with_every_place_that_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_DATA_DIR", str(tmp_path / "data"))
    made = write_tiny_model(tmp_path / "made" / "model")
    adapter = write_adapter(made, tmp_path / "policies" / "conductor@3", 1)
    shutil.rmtree(made)
    with pytest.raises(VersionRefused) as refused:
        read_conductors([adapter])
    message = str(refused.value.message)
    for place in ("policies", "bases", "data/bases", "data/policies"):
        assert f"{tmp_path / place}," in message
    assert f"shipped; put its base at {tmp_path}/policies/" in message
