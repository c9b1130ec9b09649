"""Seal a Hugging Face directory as a base: a policy that is named by the hashes of its files and never copied.

    baton policy seal DIR [--out POLICY_DIR] [--prompt PROFILE]

A base is any causal language model with a chat template, in one safetensors file or in shards. Its manifest is written
into DIR, or into POLICY_DIR where DIR cannot be written to. Training and the engines read the files where they lie.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from gateway.adapters.engines.files import check_finite, read_header
from gateway.adapters.engines.sealed import SealedPolicy, file_sha256, read_object, read_policy
from gateway.core.loop.prompt import PROMPT_VERSION, Profile, prompt_hash
from gateway.core.policies.manifest import ADAPTER_CONFIG_FILE, CONFIG_FILE, MANIFEST_FILE, Manifest
from gateway.errors import BadRequest, ConfigError
from policy.serve.manifest import write_document
from policy.serve.tokens import chat_template

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
OTHER_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
NAME_PARTS = re.compile(r"[^a-z0-9]+")


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="config.json, tokenizer, *.safetensors")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the manifest goes (default DIR itself)")
    parser.add_argument("--name", default="", help="of the policy (default: made of DIR's name)")
    shapes = get_args(Profile)
    parser.add_argument("--prompt", choices=shapes, default="full", help="that it is asked with (default full)")


def run(options: argparse.Namespace) -> int:
    """Print the sealed policy's name, size and place. Raises BatonError, one line with the fix."""
    sealed = seal(options.directory, options.out, options.name, profile=options.prompt)
    manifest = sealed.manifest
    sys.stdout.write(
        f"{manifest.id}: a base of {manifest.params:,} weights ({manifest.weights_sha256[:12]}…), sealed in "
        f"{sealed.directory}\n"
    )
    return 0


def seal(
    source: Path, out: Path | None = None, name: str = "", profile: Profile = "full", **facts: Any
) -> SealedPolicy:
    """Write the manifest of the base in `source` and read it back. `profile`: of the prompt that it is asked with;
    `facts`: further fields of the manifest. Raises BadRequest for a directory that is no base, VersionRefused for
    weights that are torn or not finite."""
    source = source.resolve()
    files = base_files(source)
    params = 0
    for path in files:
        if path.suffix == ".safetensors":
            header = read_header(path)
            check_finite(path, header)
            params += sum(math.prod(tensor.shape) for tensor in header.values())
    manifest = Manifest(
        name=name or _name(source),
        version="0",
        prompt_version=f"{profile}-{PROMPT_VERSION}",
        prompt_hash=prompt_hash(profile),
        seed=0,
        data="pretrained",
        command=f"baton policy seal {source.name}",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        params=params,
        kind="base",
        source="" if out is None else str(source),
        sha256={path.name: file_sha256(path) for path in files},
    )
    place = source if out is None else out.resolve()
    _write(place, replace(manifest, **facts))
    return read_policy(place, complete=True)


def base_files(directory: Path) -> list[Path]:
    """The files that make a base. Raises BadRequest naming what is missing."""
    if not directory.is_dir():
        raise BadRequest(f"{directory}: there is no such directory; give one with a model in Hugging Face's files")
    if (directory / ADAPTER_CONFIG_FILE).is_file():
        raise BadRequest(f"{directory}: a LoRA adapter is no base; seal the model that it was trained on")
    manifest = read_object(directory / MANIFEST_FILE) if (directory / MANIFEST_FILE).is_file() else {"kind": "base"}
    if manifest.get("kind") != "base":
        raise BadRequest(f"{directory}: sealed already, as a trained version; publish it as it is")
    read_object(directory / CONFIG_FILE)
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        raise BadRequest(f"{directory}: no *.safetensors; convert the weights with transformers' save_pretrained()")
    missing = _unlisted_shards(directory, weights)
    if missing:
        raise BadRequest(f"{directory}: {', '.join(missing)} of its index is not there; fetch every shard")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise BadRequest(f"{directory}: no {' or '.join(TOKENIZER_FILES)}; save the tokenizer beside the model")
    chat_template(directory)
    names = {*OTHER_FILES, *TOKENIZER_FILES}
    return sorted({*weights, *(directory / name for name in names if (directory / name).is_file())})


def _unlisted_shards(directory: Path, weights: list[Path]) -> list[str]:
    index = directory / "model.safetensors.index.json"
    names = set(read_object(index).get("weight_map", {}).values()) if index.is_file() else set()
    return sorted(names - {path.name for path in weights})


def _write(place: Path, manifest: Manifest) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_document(place, manifest)
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror or error}; name another directory with --out") from None


def _name(source: Path) -> str:
    """A policy name made of a directory's: `SmolLM2-135M-Instruct` becomes `smollm2-135m-instruct`."""
    name = NAME_PARTS.sub("-", source.name.lower()).strip("-")
    return name if name[:1].isalpha() else f"base-{name}".rstrip("-")
