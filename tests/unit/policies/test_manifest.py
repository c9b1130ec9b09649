"""The manifest of a policy version: what a JSON object says, what makes it incomplete, and whose prompt it knows."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from gateway.core.loop.prompt import PROMPT_VERSION, prompt_hash
from gateway.core.policies.manifest import (
    MANIFEST_FILE,
    Manifest,
    check_complete,
    check_prompt,
    known_profile,
    manifest_of,
)
from gateway.errors import VersionRefused

DOCUMENT: dict[str, Any] = {
    "name": "tiny",
    "version": "7",
    "prompt_version": f"dial-{PROMPT_VERSION}",
    "prompt_hash": prompt_hash("dial"),
    "seed": 1,
    "data": "",
    "command": "",
    "created": "",
    "params": 2,
    "pools": ["arena"],
    "sha256": {"config.json": "a", "model.safetensors": "b", "adapter_model.safetensors": "c"},
    "quality": None,
}


def test_a_document_and_its_manifest_say_the_same() -> None:
    manifest = manifest_of(DOCUMENT)
    check_complete(DOCUMENT, MANIFEST_FILE)
    assert (manifest.id, manifest.next_version, manifest.pools, manifest.kind) == ("tiny@7", "8", ("arena",), "sealed")
    assert manifest_of({**asdict(manifest), "pools": ["arena"]}) == manifest
    assert replace(manifest, sha256={"config.json": "a", "model.safetensors": "b"}).weights_sha256 == "b"
    assert replace(manifest, kind="adapter").weights_sha256 == "c"
    assert manifest.public()["quality"] is None


def test_a_field_that_is_absent_or_of_another_type_is_empty() -> None:
    assert manifest_of({}) == Manifest("", "", "", "", 0, "", "", "", 0)
    odd = {"quality": True, "rounds": "two", "probe": [], "sha256": "none", "prompt_version": None, "version": 7}
    assert manifest_of(odd) == replace(manifest_of({}), version="7")
    assert manifest_of({}).weights_sha256 == ""
    assert replace(manifest_of({}), version="7b").next_version == "7b.1"


@pytest.mark.parametrize(
    "changes", [{"colour": "red"}, {"sha256": []}, {"pools": "arena"}, {"seed": True}, {"quality": "high"}]
)
def test_an_incomplete_manifest_names_the_field(changes: dict[str, Any]) -> None:
    with pytest.raises(VersionRefused, match=next(iter(changes))) as refused:
        check_complete(DOCUMENT | changes, MANIFEST_FILE)
    assert refused.value.reason == "manifest"
    with pytest.raises(VersionRefused, match="data"):
        check_complete({name: value for name, value in DOCUMENT.items() if name != "data"}, MANIFEST_FILE)


@pytest.mark.parametrize(
    "changes", [{"prompt_hash": "0" * 64}, {"prompt_version": "dial-0"}, {"prompt_version": None}, {"prompt_hash": 1}]
)
def test_weights_of_another_prompt_are_refused(changes: dict[str, Any]) -> None:
    ours, other = manifest_of(DOCUMENT), manifest_of(DOCUMENT | changes)
    assert known_profile(ours) == check_prompt(ours, "here") == "dial"
    assert known_profile(other) is None
    with pytest.raises(VersionRefused, match="here: its weights were trained on prompt") as refused:
        check_prompt(other, "here")
    assert refused.value.reason == "prompt"
