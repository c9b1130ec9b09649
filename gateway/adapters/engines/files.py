"""What a policy directory must be before any engine is shown it. A bad one can kill an engine or, worse, be served.

The manifest is what `policy.serve.manifest` writes. In order: the directory and its manifest, every checksum, the
prompt it was trained on, weights whole and finite; then whether they fit the weights that the engine runs (`Base`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gateway.adapters.engines.tensors import FIX, Tensor, check_finite, read_header
from gateway.core.loop.prompt import PROMPT_VERSION, profile_of, prompt_hash
from gateway.errors import VersionRefused

MANIFEST_FILE = "manifest.json"
JSON_BYTES_MAX = 16 << 20
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NEEDED = {"full": ("config.json", "model.safetensors"), "adapter": (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
PASSING = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures"}
LORA_NAME = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")
# what PEFT can put into an adapter and a served low-rank update is not
LORA_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}


@dataclass(frozen=True)
class PolicyFiles:
    """A checked policy directory: what its manifest says, and its tensors by name."""

    directory: Path
    manifest: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def kind(self) -> str:
        """full | adapter."""
        return str(self.manifest.get("kind", "full"))

    @property
    def probe(self) -> Mapping[str, Any]:
        """The fixed sequence and its log-probs; empty where the trainer stored none."""
        probe = self.manifest.get("probe")
        return probe if isinstance(probe, dict) else {}


def check(directory: Path) -> PolicyFiles:
    """Everything that can be said of a directory by itself. Raises VersionRefused. Blocks: it reads every byte."""
    manifest = _manifest(directory)
    kind = manifest.get("kind", "full")
    if kind not in NEEDED:
        raise VersionRefused("manifest", f"{directory}: a manifest of kind {kind!r}, not full or adapter; {FIX}")
    _checksums(directory, manifest, NEEDED[kind])
    _prompt(directory, manifest)
    weights = directory / NEEDED[kind][1]
    tensors = read_header(weights)
    check_finite(weights, tensors)
    return PolicyFiles(directory.resolve(), manifest, tensors)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises VersionRefused(missing | manifest)."""
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise ValueError(f"longer than {JSON_BYTES_MAX} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise VersionRefused("missing", f"{path}: there is no such file; give a policy directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise VersionRefused("manifest", f"{path}: not readable as JSON ({error}); {FIX}") from None
    if not isinstance(value, dict):
        raise VersionRefused("manifest", f"{path}: not a JSON object; {FIX}")
    return value


def _manifest(directory: Path) -> dict[str, Any]:
    if not directory.is_absolute():
        raise VersionRefused("missing", f"{directory}: give an absolute path; the engine has a directory of its own")
    if not directory.is_dir():
        raise VersionRefused("missing", f"{directory}: there is no such directory; publish the version again")
    return read_object(directory / MANIFEST_FILE)


def _checksums(directory: Path, manifest: Mapping[str, Any], needed: tuple[str, ...]) -> None:
    listed = manifest.get("sha256")
    if not isinstance(listed, dict) or not set(needed) <= set(listed):
        raise VersionRefused("manifest", f"{directory}: its manifest lists no sha256 of {' and '.join(needed)}; {FIX}")
    unlisted = {path.name for path in directory.glob("*.safetensors")} - set(listed)
    if unlisted:  # an engine loads every such file it finds
        raise VersionRefused("manifest", f"{directory}: {sorted(unlisted)} not in its manifest; remove them")
    for name, expected in sorted(listed.items()):
        path = directory / name
        if Path(name).name != name or not path.is_file():
            raise VersionRefused("missing", f"{path}: named in the manifest and not there; publish the version again")
        if file_sha256(path) != expected:
            raise VersionRefused("checksum", f"{path}: does not match its sha256; publish the version again")


def _prompt(directory: Path, manifest: Mapping[str, Any]) -> None:
    trained = str(manifest.get("prompt_version"))
    profile = profile_of(trained)
    if trained != f"{profile}-{PROMPT_VERSION}" or manifest.get("prompt_hash") != prompt_hash(profile):
        raise VersionRefused(
            "prompt",
            f"{directory}: trained on prompt {trained}, this gateway renders {profile}-{PROMPT_VERSION} with another "
            "hash; train it on this prompt, or run the gateway it was made for",
        )


def file_sha256(path: Path) -> str:
    """Hex digest of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Base:
    """The weights an engine was started with, as a local directory: what every version must fit."""

    directory: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config.json. Raises VersionRefused."""
        return read_object(self.directory / "config.json")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each of its tensors, over all shards. Raises VersionRefused."""
        shards = sorted(self.directory.glob("*.safetensors"))
        return {name: tensor.shape for path in shards for name, tensor in read_header(path).items()}

    @cached_property
    def sha256(self) -> str:
        """Of its model.safetensors; empty where it lies in shards."""
        path = self.directory / "model.safetensors"
        return file_sha256(path) if path.is_file() else ""


def check_adapter(files: PolicyFiles, base: Base | None, rank_max: int) -> None:
    """That it is a plain low-rank update of `base`. Raises VersionRefused(kind | base | rank | shape)."""
    place = files.directory
    if files.kind != "adapter":
        raise VersionRefused("kind", f"{place}: full weights, and this engine takes LoRA adapters; use another engine")
    config = read_object(place / ADAPTER_CONFIG)
    if odd := [name for name, plain in LORA_PLAIN.items() if config.get(name) not in plain]:
        raise VersionRefused("kind", f"{place}: {ADAPTER_CONFIG} uses {', '.join(odd)}; only plain LoRA is served")
    rank = config.get("r")
    if not isinstance(rank, int) or not 0 < rank <= rank_max:
        raise VersionRefused("rank", f"{place}: rank {rank}, the engine takes 1 to {rank_max}; train a lower rank")
    wanted = str(files.manifest.get("base_sha256") or "")
    if base and wanted and base.sha256 and wanted != base.sha256:
        name = files.manifest.get("base")
        raise VersionRefused("base", f"{place}: made for {name} ({wanted[:12]}…), not for the weights served here")
    _check_pairs(files, rank, base.shapes if base else None)


def _check_pairs(files: PolicyFiles, rank: int, shapes: Mapping[str, tuple[int, ...]] | None) -> None:
    """Each module has A [rank, in] and B [out, rank] for a weight [out, in] of the base."""
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in files.tensors.items():
        found = LORA_NAME.match(name)
        if not found:
            raise VersionRefused("shape", f"{files.directory}: {name} is no LoRA tensor; {FIX}")
        pairs.setdefault(found["module"], {})[found["side"]] = tensor.shape
    if not pairs:
        raise VersionRefused("shape", f"{files.directory}: it holds no tensor; {FIX}")
    for module, sides in pairs.items():
        a, b = sides.get("A", ()), sides.get("B", ())
        weight = shapes.get(f"{module}.weight") if shapes is not None else (*b[:1], *a[1:])
        if weight is None or (a, b) != ((rank, weight[-1]), (weight[0], rank)):
            raise VersionRefused("shape", f"{files.directory}: {module} has A {a}, B {b} for a weight {weight}; {FIX}")


def check_full(files: PolicyFiles, base: Base) -> None:
    """That its weights can take the place of `base`'s. Raises VersionRefused(kind | tied | shape)."""
    place = files.directory
    if files.kind != "full":
        raise VersionRefused("kind", f"{place}: a LoRA adapter, and this engine takes full weights; use another engine")
    config = read_object(place / "config.json")
    if config.get("tie_word_embeddings") or base.config.get("tie_word_embeddings"):
        raise VersionRefused("tied", f"{place}: tied embeddings; a reload in place would serve the old output layer")
    differ = {key for key in {*config, *base.config} - PASSING if config.get(key) != base.config.get(key)}
    if differ:
        raise VersionRefused("shape", f"{place}: config.json differs from the engine's in {', '.join(sorted(differ))}")
    shapes = {name: tensor.shape for name, tensor in files.tensors.items()}
    if wrong := sorted(name for name in {*shapes, *base.shapes} if shapes.get(name) != base.shapes.get(name)):
        name = wrong[0]
        found = f"{name} is {shapes.get(name)}, the engine has {base.shapes.get(name)}"
        raise VersionRefused("shape", f"{place}: {found}; {FIX}")
