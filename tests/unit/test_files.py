"""A file is replaced in one step."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from gateway.files import NotPlain, open_plain, replacing, write_atomic


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "ä", durable=False)
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_the_mode_is_that_of_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    write_atomic(path, "new", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_block_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, "before")
    with suppress(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replacing(path) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"half"


def test_a_temporary_file_of_a_killed_writer_is_deleted(tmp_path: Path) -> None:
    (tmp_path / ".a.tmp").symlink_to(tmp_path / "elsewhere")
    write_atomic(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"
    assert not (tmp_path / "elsewhere").exists()


def test_an_error_of_the_disk_is_raised_and_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_atomic(path, "before")

    def fail(handle: int) -> NoReturn:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_atomic(path, "new")
    assert (path.read_text(), [each.name for each in tmp_path.iterdir()]) == ("before", ["a"])


def test_only_a_plain_file_is_opened_and_nothing_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"ok")
    with open_plain(tmp_path / "plain") as file:
        assert file.read() == b"ok"
    (tmp_path / "link").symlink_to(tmp_path / "plain")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises(NotPlain):
            open_plain(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "nothing")
