"""The manifest of a policy version: what its files are, and what they were made from and for. Pure.

`manifest.json` is written by `policy.serve.manifest` and read by `adapters/engines/sealed.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from gateway.core.loop.prompt import PROMPT_VERSION, Profile, profile_of, prompt_hash
from gateway.errors import VersionRefused

MANIFEST_FILE = "manifest.json"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE)
ADAPTER_TENSOR = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")
NEEDED: Mapping[str, tuple[str, ...]] = {"full": (CONFIG_FILE, WEIGHTS_FILE), "adapter": ADAPTER_FILES}
PUBLIC_FIELDS = ("name", "version", "kind", "prompt_version", "prompt_hash", "pools", "params", "quality")
FIX = "train or export this version again"


@dataclass(frozen=True, slots=True)
class Manifest:
    """`sha256` maps each file to its hex digest; `prompt_hash` names the prompt builder the weights were trained on."""

    name: str
    version: str
    prompt_version: str
    prompt_hash: str
    seed: int
    data: str  # what it was trained on
    command: str  # what rebuilds it
    created: str  # ISO 8601, UTC
    params: int  # number of weights
    pools: tuple[str, ...] = ()  # pools whose handles it has seen; empty: reads any
    kind: str = "full"  # full | adapter
    base: str = ""  # of an adapter: the version whose weights it changes
    base_sha256: str = ""  # of that version's model.safetensors
    parent: str = ""  # the version that training began with
    rollouts: int = 0  # trained on
    rounds: int = 1  # plans a request may take, as it was trained
    quality: int | None = None  # the dial it is shown where a request sets none; None: it was trained without
    config: dict[str, Any] = field(default_factory=dict)  # training settings
    revision: str = ""  # of the code that trained it
    probe: dict[str, Any] = field(default_factory=dict)  # prompt_ids, token_ids, logprobs: what a swap is proven by
    sha256: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """NAME@VERSION."""
        return f"{self.name}@{self.version}"

    @property
    def next_version(self) -> str:
        """One more, where it is a number."""
        return str(int(self.version) + 1) if self.version.isdigit() else f"{self.version}.1"

    @property
    def weights_sha256(self) -> str:
        """Digest of the file that holds the weights, an adapter's own; empty where it lists none."""
        return self.sha256.get(WEIGHTS_FILE if self.kind == "full" else ADAPTER_WEIGHTS_FILE, "")

    def public(self) -> dict[str, Any]:
        """What a server shows of it under `baton` in /v1/models."""
        return {name: getattr(self, name) for name in PUBLIC_FIELDS}


_TYPES: Mapping[str, type] = {
    **{one.name: str for one in fields(Manifest)},
    **dict.fromkeys(("seed", "params", "rollouts", "rounds", "quality"), int),
    **dict.fromkeys(("config", "probe", "sha256"), dict),
    "pools": list,
}
_REQUIRED = {one.name for one in fields(Manifest) if one.default is MISSING and one.default_factory is MISSING}


def manifest_of(document: Mapping[str, Any]) -> Manifest:
    """The manifest in a JSON object. A field that is absent, or of another type, has its empty value."""
    values = {name: document[name] for name, kind in _TYPES.items() if _fits(document.get(name), kind)}
    values |= {name: str(document["version"]) for name in ("version",) if isinstance(document.get(name), int)}
    empty = {name: _TYPES[name]() for name in _REQUIRED}
    return Manifest(**{**empty, **values, "pools": tuple(values.get("pools", ()))})


def _fits(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def check_complete(document: Mapping[str, Any], place: object) -> None:
    """Raises VersionRefused(manifest) naming every field that is missing, unknown or of another type."""
    missing = (_REQUIRED | {"pools", "sha256"}) - set(document)
    odd = {name for name, value in document.items() if name not in _TYPES or not _fits(value, _TYPES[name])}
    if document.get("quality", 0) is None:
        odd.discard("quality")
    if wrong := sorted(missing | odd):
        raise VersionRefused("manifest", f"{place}: fields missing, unknown or of another type: {wrong}; {FIX}")


def known_profile(manifest: Manifest) -> Profile | None:
    """The prompt profile that the weights were trained on; None where this code renders that prompt otherwise."""
    profile = profile_of(manifest.prompt_version)
    ours = (f"{profile}-{PROMPT_VERSION}", prompt_hash(profile))
    return profile if (manifest.prompt_version, manifest.prompt_hash) == ours else None


def check_prompt(manifest: Manifest, place: object) -> Profile:
    """As `known_profile`. Raises VersionRefused(prompt): weights that read another prompt plan nonsense, quietly."""
    profile = known_profile(manifest)
    if profile is not None:
        return profile
    rendered = profile_of(manifest.prompt_version)
    raise VersionRefused(
        "prompt",
        f"{place}: its weights were trained on prompt {manifest.prompt_version or 'of no name'} "
        f"({manifest.prompt_hash[:12]}…), this code renders {rendered}-{PROMPT_VERSION} "
        f"({prompt_hash(rendered)[:12]}…); train it on this prompt, or run the code it was made with",
    )
