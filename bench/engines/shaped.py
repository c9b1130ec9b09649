"""A model with the shape of a large one and random weights, to time what no machine without a model hub can load.

    python -m bench.engines.shaped --like 7b --tokenizer DIR --out DIR [--device cuda]

Time and memory of a plan, or of a training step, depend on a model's shape and not on what its weights know. A random
model would write tasks without an end where the grammar lets it, so the tokens of a short plan are made likely: the
first component of the residual stream is the same for every token, and the head reads it for these tokens. The
tokenizer and its chat template are those of `--tokenizer`, a base; ids behind its own are never sampled.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from policy.engines.directory import read_conductors

SHAPES: dict[str, dict[str, Any]] = {
    "7b": {  # Qwen2.5-7B-Instruct's config.json
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 49280,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
}
PLAN, NO_TASK = '{"steps":[{"worker":"maple","task":null,"see":[]}]}', "null"
CONSTANT = 1000.0  # the first component of every state; behind the last norm it is the root of the hidden size
LIKELY, LIKELIEST = 12.0, 20.0  # nats, of the tokens of a plan, and of those that leave a task out
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def write(shape: str, tokenizer: Path, out: Path, device: str) -> int:
    """Write the directory in bfloat16; how many weights it has."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    directory = read_conductors([tokenizer])[tokenizer]
    tokens = directory.tokens()
    ends = {"eos_token_id": sorted(tokens.eos_ids), "bos_token_id": None}
    torch.manual_seed(0)
    with torch.device(device):
        config = Qwen2Config(**SHAPES[shape], **ends, dtype="bfloat16")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = CONSTANT
        first = model.get_output_embeddings().weight[:, 0]
        first.zero_()
        for token in (*plan_tokens(directory.home), *tokens.eos_ids):
            nats = LIKELIEST if NO_TASK in tokens.token_text(token) else LIKELY
            first[token] = nats / config.hidden_size**0.5
    out.mkdir(parents=True)
    model.save_pretrained(out, max_shard_size="4GB")
    for name in TOKENIZER_FILES:
        if (directory.home / name).is_file():
            shutil.copy(directory.home / name, out / name)
    return sum(parameter.numel() for parameter in model.parameters())


def plan_tokens(home: Path) -> list[int]:
    """The tokens of a plan of one step."""
    ids = Tokenizer.from_file(str(home / "tokenizer.json")).encode(PLAN, add_special_tokens=False).ids
    return sorted(set(ids))


def main(words: Sequence[str]) -> int:
    """Write it."""
    parser = argparse.ArgumentParser(prog="bench.engines.shaped", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--like", choices=tuple(SHAPES), default="7b")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="a sealed base")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(words)
    count = write(options.like, options.tokenizer, options.out, options.device)
    sys.stdout.write(json.dumps({"weights": count, "directory": str(options.out)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
