"""The manifest of a policy version: what its files are, and what they were made from and for. Pure.

`manifest.json` is written by `policy.serve.manifest` and read by `adapters/engines/sealed.py`.
"""

from __future__ import annotations

import hashlib
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
NEEDED: Mapping[str, tuple[str, ...]] = {
    "sealed": (CONFIG_FILE, WEIGHTS_FILE),  # weights of their own, beside the manifest
    "base": (CONFIG_FILE,),  # a Hugging Face directory, sharded or not, at `source`
    "adapter": ADAPTER_FILES,  # LoRA over one of the two
}
EARLIER_KINDS = {"full": "sealed"}
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
    pools: tuple[str, ...] = ()  # pools that it was trained for; empty: none in particular
    kind: str = "sealed"  # sealed | base | adapter
    source: str = ""  # of a base: the absolute directory with its files; empty: they lie beside the manifest
    base: str = ""  # of an adapter: the version whose weights it changes
    base_sha256: str = ""  # `weights_sha256` of that version
    base_source: str = ""  # where that version lay when the adapter was trained; tried where it is not found by name
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
        """Digest of the weights, an adapter's own; empty where it lists none."""
        if self.kind == "adapter":
            return self.sha256.get(ADAPTER_WEIGHTS_FILE, "")
        return weights_digest(self.sha256)

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
    kind = str(values.get("kind", "sealed"))
    values["kind"] = EARLIER_KINDS.get(kind, kind)
    return Manifest(**{**empty, **values, "pools": tuple(values.get("pools", ()))})


def weights_digest(sha256: Mapping[str, str]) -> str:
    """What names a checkpoint's weights: the digest of its one safetensors file, else that of all shards' names and
    digests in order; empty without any. `sha256`: digests by file name."""
    shards = sorted((name, digest) for name, digest in sha256.items() if name.endswith(".safetensors"))
    if len(shards) < 2:
        return shards[0][1] if shards else ""
    lines = "".join(f"{digest}  {name}\n" for name, digest in shards)
    return hashlib.sha256(lines.encode()).hexdigest()


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
    """The prompt profile that the weights were trained on; None where this code renders that prompt otherwise. A base
    was trained on none of ours and reads any."""
    profile = profile_of(manifest.prompt_version)
    if manifest.kind == "base":
        return profile
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
