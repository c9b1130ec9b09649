"""The data directory: private, one gateway at a time, and facts only while it serves."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gateway.cli.process.datadir import FACTS, DataDir
from gateway.errors import ConfigError, Conflict


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_in_it_is_private(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "new" / "deep")
    data.write(FACTS, {"a": 1})
    data.pepper()
    assert (_mode(data.path), _mode(data.path / "run")) == (0o700, 0o700)
    assert (_mode(data.path / FACTS), _mode(data.path / "pepper")) == (0o600, 0o600)


def test_a_file_left_open_to_others_is_replaced_by_a_private_one(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    for name in (FACTS, f".{FACTS}.tmp"):
        (tmp_path / name).write_text("{}")
        (tmp_path / name).chmod(0o666)
    data.write(FACTS, {"a": 1})
    assert _mode(tmp_path / FACTS) == 0o600


def test_the_second_gateway_is_told_who_is_there(tmp_path: Path) -> None:
    first = DataDir(tmp_path)
    with first.locked():
        with pytest.raises(Conflict, match=f"process {os.getpid()} is still starting"), DataDir(tmp_path).locked():
            pass
        first.write(FACTS, {"base_url": "http://127.0.0.1:8080/v1"})
        with pytest.raises(Conflict, match=r"serves http://127\.0\.0\.1:8080/v1; stop it with"), first.locked():
            pass
    with first.locked():
        pass


def test_facts_of_a_killed_gateway_are_forgotten(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    data.write(FACTS, {"pid": 1})
    with data.locked():
        assert data.read(FACTS) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_broken_file_is_no_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FACTS).write_bytes(content)
    assert DataDir(tmp_path).read(FACTS) is None


def test_the_pepper_is_made_once(tmp_path: Path) -> None:
    first = DataDir(tmp_path).pepper()
    assert len(first) == 32
    assert DataDir(tmp_path).pepper() == first


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"BATON_DATA_DIR=.*file/data: Not a directory"):
        DataDir(tmp_path / "file" / "data")
