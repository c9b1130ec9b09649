"""The graph computes Qwen2, with and without a cache; bad model directories are named in one line."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from safetensors.numpy import load_file, save_file

from gateway.errors import VersionRefused
from policy.serve.__main__ import main
from policy.serve.graph import build_graph, write_graph
from policy.serve.manifest import read_complete
from policy.serve.runtime import Runtime, causal_mask
from policy.serve.shape import EMBEDDING, LM_HEAD, Shape, load_shape, load_weights
from policy.serve.tokens import Tokens
from tests.policy.qwen2_reference import reference_logits
from tests.tiny_model import write_tiny_model

IDS = np.random.default_rng(1).integers(3, 300, 40).tolist()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 2), (2, 2), (4, 1)])
def test_the_graph_is_qwen2(tmp_path: Path, heads: int, heads_kv: int) -> None:
    directory = write_tiny_model(tmp_path / "tiny", heads=heads, heads_kv=heads_kv, layers=3)
    runtime = Runtime(directory)
    expected = reference_logits(runtime.shape, load_weights(directory, runtime.shape), IDS)
    logits, cache = runtime.forward(IDS, runtime.empty())
    assert cache.length == len(IDS)
    np.testing.assert_allclose(logits, expected[-1], atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_the_graph_of_a_base_gives_the_state_of_every_token(model: Path, tied: bool) -> None:
    _edit(model / "config.json", tie_word_embeddings=tied)
    (model / "graph.onnx").unlink()
    runtime = Runtime(model)
    assert runtime.several_rows
    expected = reference_logits(runtime.shape, load_weights(model, runtime.shape), IDS)
    _, cache = runtime.forward(IDS[:10], runtime.empty())
    states, cache = runtime.states(IDS[10:], cache, rows=30)
    assert cache.length == len(IDS)
    for state, logits in zip(states, expected[10:], strict=True):
        np.testing.assert_allclose(runtime.logits(state), logits, atol=1e-4)
        some = np.array([3, 77, 200])
        np.testing.assert_allclose(runtime.logits(state, some), logits[some], atol=1e-4)


@pytest.mark.parametrize("kind", ["sealed", "base"])
def test_the_runtime_reads_no_weight_again(model: Path, kind: str) -> None:
    """So an adapter's merged weights are let go once its sessions are made."""
    if kind == "base":
        (model / "graph.onnx").unlink()
    weights = {name: np.array(array) for name, array in load_weights(model, load_shape(model)).items()}
    runtime = Runtime(model, weights=weights)
    before, _ = runtime.forward(IDS, runtime.empty())
    runtime.forget_weights()
    for name, array in weights.items():
        if name not in (EMBEDDING, LM_HEAD):
            array[...] = np.nan
    after, _ = runtime.forward(IDS, runtime.empty())
    np.testing.assert_array_equal(before, after)


def test_tied_embeddings_are_the_head(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    write_graph(model)
    runtime = Runtime(model)
    weights = load_weights(model, runtime.shape)
    assert "lm_head.weight" not in weights
    logits, _ = runtime.forward(IDS, runtime.empty())
    np.testing.assert_allclose(logits, reference_logits(runtime.shape, weights, IDS)[-1], atol=1e-4)


@pytest.mark.parametrize("pieces", [[39, 1], [1, 39], [10, 20, 10], [1] * 40])
def test_a_cache_changes_nothing(model: Path, pieces: list[int]) -> None:
    runtime = Runtime(model)
    whole, _ = runtime.forward(IDS, runtime.empty())
    cache, at = runtime.empty(), 0
    for size in pieces:
        logits, cache = runtime.forward(IDS[at : at + size], cache)
        at += size
    np.testing.assert_allclose(logits, whole, atol=1e-4)


def test_the_head_of_a_cache_is_the_cache_of_the_beginning(model: Path) -> None:
    runtime = Runtime(model)
    _, long = runtime.forward(IDS, runtime.empty())
    _, short = runtime.forward(IDS[:25], runtime.empty())
    for cut, direct in zip(long.head(25).arrays, short.arrays, strict=True):
        np.testing.assert_allclose(cut, direct, atol=1e-5)


def test_the_mask_hides_what_comes_after() -> None:
    assert causal_mask(1, 4).tolist() == [[0.0] * 5]
    hidden = -np.inf
    assert causal_mask(2, 1).tolist() == [[0.0, 0.0, hidden], [0.0, 0.0, 0.0]]


def test_the_graph_holds_no_weights_and_is_reproducible(model: Path) -> None:
    shape = load_shape(model)
    assert build_graph(shape) == build_graph(shape) == (model / "graph.onnx").read_bytes()
    assert len(build_graph(shape)) < 20_000


@pytest.mark.train
def test_the_graph_equals_transformers(model: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    reference = transformers.Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([IDS])).logits[0, -1].numpy()
    runtime = Runtime(model)
    logits, _ = runtime.forward(IDS, runtime.empty())
    np.testing.assert_allclose(logits, expected, atol=1e-4)


# ---------------------------------------------------------------- bad directories


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "manifest.json"),
    "manifest is no JSON": (lambda d: (d / "manifest.json").write_text("{"), "manifest.json"),
    "manifest is a list": (lambda d: (d / "manifest.json").write_text("[]"), "not a JSON object"),
    "unknown field": (lambda d: _edit(d / "manifest.json", colour="red"), "colour"),
    "hashes are no object": (lambda d: _edit(d / "manifest.json", sha256=[]), "sha256"),
    "unlisted weights": (lambda d: _edit(d / "manifest.json", sha256={}), "model.safetensors"),
    "one bit of the weights": (lambda d: _flip(d / "model.safetensors"), "model.safetensors: does not match"),
    "torn weights": (lambda d: (d / "model.safetensors").write_bytes(b"\x08"), "model.safetensors"),
    "no graph": (lambda d: (d / "graph.onnx").unlink(), "graph.onnx"),
    "changed tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_directory_ends_with_one_line_and_status_2(
    name: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it, said = BROKEN[name]
    break_it(model)
    assert main(["--model", str(model)]) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.startswith("conductor: ")
    assert line.count("\n") == 1


def test_a_hash_may_not_name_a_file_elsewhere(model: Path) -> None:
    manifest = json.loads((model / "manifest.json").read_text())
    manifest["sha256"]["../secret"] = "0"
    (model / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(VersionRefused, match="secret"):
        read_complete(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gpt2"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"use_sliding_window": True},
        {"rope_scaling": {"type": "yarn"}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
        {"num_hidden_layers": "many"},
        {"eos_token_id": None},
    ],
)
def test_only_a_plain_qwen2_or_llama_is_accepted(changes: dict[str, Any], model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | changes
    with pytest.raises(VersionRefused, match=r"config\.json"):
        Shape.from_config(config)


@pytest.mark.parametrize("text", ["", "[]"])
def test_a_config_that_is_no_object_is_named(text: str, model: Path) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(VersionRefused, match=r"config\.json"):
        load_shape(model)


def test_weights_of_another_shape_are_named(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = np.ones(7, dtype=np.float32)
    save_file(weights, model / "model.safetensors")
    with pytest.raises(VersionRefused, match=r"model\.norm\.weight should be \(128,\), it has \(7,\)"):
        load_weights(model, load_shape(model))


def test_a_graph_that_is_no_graph_is_named(model: Path) -> None:
    (model / "graph.onnx").write_bytes(b"nonsense")
    with pytest.raises(VersionRefused, match=r"graph\.onnx"):
        Runtime(model)


def test_the_port_is_announced_once_the_model_is_warm(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener accepts before the server runs, so whoever reads the port may connect at once."""
    port_file = tmp_path / "port"

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        assert port_file.read_text() == f"{sockets[0].getsockname()[1]}\n"
        socket.create_connection(sockets[0].getsockname(), timeout=1.0).close()
        sockets[0].close()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    assert main(["--model", str(model), "--port-file", str(port_file)]) == 0


def test_weights_that_cannot_be_read_are_named(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(VersionRefused, match=r"model\.safetensors"):
        load_weights(model, load_shape(model))


@pytest.mark.parametrize("name", ["tokenizer.json", "a tokenizer larger than the model"])
def test_a_tokenizer_that_does_not_fit_is_named(name: str, model: Path) -> None:
    shape = load_shape(model)
    if name == "tokenizer.json":
        (model / name).write_text("{")
    else:
        shape = replace(shape, vocab=100)
    with pytest.raises(VersionRefused, match=r"tokenizer\.json"):
        Tokens(model, shape)
