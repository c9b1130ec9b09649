"""A directory that is published holds plain files: no link is followed, and no pipe is waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.adapters.postgres.policies.policy_files import take_in
from gateway.errors import VersionRefused
from tests.policies import write_policy


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_link_or_a_pipe_is_refused_and_nothing_is_copied(tmp_path: Path, kind: str, name: str) -> None:
    source = write_policy(tmp_path / "offered", "1", (1.0,))
    (source / name).rename(tmp_path / "elsewhere")
    if kind == "link":
        (source / name).symlink_to(tmp_path / ("elsewhere" if name != "manifest.json" else "nowhere"))
    else:
        os.mkfifo(source / name)
    with pytest.raises(VersionRefused) as refused:
        take_in(source, tmp_path / "policies")
    assert refused.value.reason in ("manifest", "missing")
    assert name in refused.value.message
    assert not list((tmp_path / "policies").glob("*"))
