"""The embedding that a gateway starts with: by setting; a missing or damaged table names the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import settings as config
from gateway.core.loop.experience.likeness import HASHED
from gateway.errors import ConfigError
from gateway.wiring import shipping as wiring


def test_the_setting_chooses() -> None:
    default = wiring.embedding_of(config.load())
    assert default is not None
    assert default.name == "minilm-1"
    assert wiring.embedding_of(config.load(embedder="hashing")) is HASHED
    assert wiring.embedding_of(config.load(embedder="http://h:1/v1#m")) is None


@pytest.mark.parametrize("damage", ["missing", "cut", "empty"])
def test_a_table_that_cannot_be_read_stops_the_start_and_hashing_does_not_need_it(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shipped(name: str) -> bytes:
        return (tmp_path / name).read_bytes()

    if damage != "missing":
        (tmp_path / "minilm-l6.safetensors").write_bytes(b"" if damage == "empty" else b"\0" * 1000)
    monkeypatch.setattr(wiring, "shipped", shipped)
    with pytest.raises(ConfigError, match=r"minilm-l6\.safetensors.*set BATON_EMBEDDER=hashing"):
        wiring.embedding_of(config.load())
    assert wiring.embedding_of(config.load(embedder="hashing")) is HASHED
