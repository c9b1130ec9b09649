"""An adapter as whole weights: the runtime that judges holds one set of weights, so its base gets it merged in first.

Written into the folder of the gate's other work, and gone with it; what the report names are the adapter's own files.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from safetensors.numpy import save_file

from gateway.errors import ConfigError
from policy.serve.lora import merged
from policy.serve.manifest import ADAPTER_FILES, REQUIRED_FILES, Manifest, read_manifest, write_manifest
from policy.serve.shape import ModelError, load_shape, load_weights

WEIGHTS = "model.safetensors"
PREFIX = "whole-"


def weights_sha256(manifest: Manifest) -> str:
    """Of the file that holds the weights, an adapter's own."""
    return manifest.sha256[WEIGHTS if manifest.kind == "full" else ADAPTER_FILES[1]]


def whole(path: Path, bases: Sequence[Path], folder: Path) -> Path:
    """`path` itself, or for an adapter a directory in `folder` with its base's weights and the adapter in them. The
    base is one of `bases`, or lies beside the adapter under its version's name. Raises ConfigError."""
    try:
        manifest = read_manifest(path)
        if manifest.kind == "full":
            return path
        return _merged(path, manifest, _base(path, manifest, bases), folder)
    except ModelError as error:
        raise ConfigError(f"{path}/{error}") from None
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); make room and run again") from None


def drop(folder: Path) -> None:
    """Remove what `whole` wrote there."""
    for path in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _base(path: Path, manifest: Manifest, bases: Sequence[Path]) -> Path:
    beside = path.parent / Path(manifest.base or ".").name
    for base in (*bases, beside):
        if (base / "manifest.json").is_file() and read_manifest(base).sha256.get(WEIGHTS) == manifest.base_sha256:
            return base
    raise ConfigError(
        f"{path}: an adapter of {manifest.base or 'a base without a name'}, which is neither the other directory nor "
        f"beside it; put its base at {beside}"
    )


def _merged(path: Path, manifest: Manifest, base: Path, folder: Path) -> Path:
    out = folder / f"{PREFIX}{weights_sha256(manifest)[:32]}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for name in read_manifest(base).sha256:
        if name != WEIGHTS:
            shutil.copyfile(base / name, out / name)
    save_file(merged(path, load_weights(base, load_shape(base))), out / WEIGHTS)
    write_manifest(out, replace(manifest, kind="full", base="", base_sha256=""), REQUIRED_FILES)
    return out
