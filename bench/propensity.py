"""How far the log-probs that an engine samples with are off those that it scores: the bound of the self-test.

    python -m bench.propensity --url http://127.0.0.1:8126 --model conductor [--texts 32] [--tokens 64] [--out FILE]

Samples texts at temperature 1 without a grammar, has the same engine score them, and prints the distribution of
|Δ log-prob| over tokens and of the largest one in each text of SELF_TEST_TOKENS tokens, which is what a load is
refused by.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.adapters.engines.http import SELF_TEST_SAMPLING, SELF_TEST_TOKENS, EngineApi, sampled_tokens, token_scores

Array = npt.NDArray[np.float64]
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
TOPICS = (
    "rivers",
    "prime numbers",
    "a plan for a picnic",
    "JSON with two keys",
    "the moon",
    "taxes",
    "bread",
    "a proof",
)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", required=True, help="the engine, without /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.url, options.model, options.texts, options.tokens))
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


async def measure(url: str, model: str, texts: int, tokens: int) -> dict[str, Any]:
    """Quantiles in nats: over all tokens, and over the largest difference of each self-test."""
    api = EngineApi(url, timeout_s=600.0)
    try:
        found = [await differences(api, model, number, tokens) for number in range(texts)]
    finally:
        await api.close()
    largest = [float(one[:SELF_TEST_TOKENS].max()) for one in found]
    return {
        "texts": texts,
        "tokens": int(sum(map(len, found))),
        "mean": float(np.concatenate(found).mean()),
        "per_token": _quantiles(np.concatenate(found)),
        "largest_of_self_test": _quantiles(np.array(largest)),
    }


async def differences(api: EngineApi, model: str, number: int, tokens: int) -> Array:
    """|Δ log-prob| of each token of one sampled text."""
    question = f"Write about {TOPICS[number % len(TOPICS)]}, in {2 + number // len(TOPICS)} sentences."
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": tokens, "seed": number}
    reply = await api.send("POST", "/v1/chat/completions", body | dict(SELF_TEST_SAMPLING))
    prompt_ids, token_ids, logprobs = sampled_tokens(reply, api.url)
    ids = {"model": model, "prompt": prompt_ids + token_ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    scored = await api.send("POST", "/v1/completions", ids)
    recomputed: Array = np.array(token_scores(scored.body, token_ids))
    return np.asarray(np.abs(recomputed - np.array(logprobs)))


def _quantiles(values: Array) -> dict[str, float]:
    return {f"{quantile:g}": round(float(np.quantile(values, quantile)), 6) for quantile in QUANTILES}


if __name__ == "__main__":
    sys.exit(main())
