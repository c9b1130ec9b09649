"""How far the log-probs that an engine samples with are off those that it scores: the bound of the self-test.

    python -m bench.engines.propensity --url http://127.0.0.1:8126 --model conductor
        [--texts 32] [--tokens 64] [--out FILE]
    python -m bench.engines.propensity --base DIR [--texts 32] [--tokens 24] [--out FILE]

Samples texts at temperature 1 without a grammar, has the same engine score them, and prints the distribution of
|Δ log-prob| over tokens and of its mean over SELF_TEST_TEXTS texts of SELF_TEST_TOKENS tokens, which is what a load is
refused by.

With `--base`, a base or a sealed version, it measures the self-test itself: these weights are served in this process
by an engine that is sound, and by one for each fault (`bench.engines.faulty_engine`), and the share of self-tests that
refuse is printed beside the distribution.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.engines.faulty_engine import Fault, FaultyEngine
from bench.engines.policies import seal, write_adapter
from gateway.adapters.engines.http import (
    SELF_TEST_SAMPLING,
    SELF_TEST_TEXTS,
    SELF_TEST_TOKENS,
    EngineApi,
    sampled_tokens,
    token_scores,
)
from gateway.adapters.engines.vllm import VllmLora
from gateway.errors import VersionRefused
from policy.engines.directory import read_conductors
from policy.engines.embedded import load_runtime
from policy.serve.engine import Engine

Array = npt.NDArray[np.float64]
ADAPTER_SCALE = 0.02  # of random adapters: two of them differ by about a nat a token
PROBE_TOKENS = 16
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
    parser.add_argument("--url", help="the engine, without /v1")
    parser.add_argument("--model", default="conductor")
    parser.add_argument("--base", type=Path, metavar="DIR", help="faults of engines on these weights, instead of --url")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    if bool(options.url) == bool(options.base):
        parser.error("give --url or --base")
    if options.base:
        figures = faults(options.base.resolve(), options.texts)
    else:
        figures = asyncio.run(measure(options.url, options.model, options.texts, options.tokens))
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


async def measure(url: str, model: str, texts: int, tokens: int) -> dict[str, Any]:
    """Quantiles in nats: over all tokens, and over the means of self-tests."""
    api = EngineApi(url, timeout_s=600.0)
    try:
        rows = [await differences(api, model, number, tokens) for number in range(texts)]
    finally:
        await api.close()
    begun = [one[:SELF_TEST_TOKENS] for one in rows]
    means = [np.concatenate(begun[at : at + SELF_TEST_TEXTS]).mean() for at in range(0, texts, SELF_TEST_TEXTS)]
    return {
        "texts": texts,
        "tokens": int(sum(map(len, rows))),
        "mean": float(np.concatenate(rows).mean()),
        "per_token": _quantiles(np.concatenate(rows)),
        "mean_of_self_test": _quantiles(np.array(means)),
    }


def faults_of(base: Path, place: Path) -> dict[str, Fault]:
    """Faults by name, the sound engine first. Adapters are written into `place`; `base` must lie beside it."""
    other = write_adapter(base, place / "other", 2, scale=ADAPTER_SCALE)
    return {
        "none": Fault(),
        "top_k 50": Fault(top_k=50),
        "top_k 5": Fault(top_k=5),
        "temperature 0.7": Fault(temperature=0.7),
        "temperature 0.95": Fault(temperature=0.95),
        "min_p 0.1": Fault(min_p=0.1),
        "repetition_penalty 1.1": Fault(repetition_penalty=1.1),
        "another adapter": Fault(adapter=other),
        "another chat template": Fault(chat_prefix="You are a helpful assistant. "),
        "another tokenizer": Fault(first_token=1),
    }


def faults(base: Path, texts: int) -> dict[str, Any]:
    """By fault: what a load of an adapter says, `texts` times with another probe text; and quantiles of the mean
    |Δ log-prob| of each, in nats."""
    figures: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (place / base.name).symlink_to(base)
        adapter = write_adapter(base, place / "adapter", 1, scale=ADAPTER_SCALE)
        for name, fault in faults_of(base, place).items():
            engine = FaultyEngine(base, fault)
            tests = [asyncio.run(self_test(engine, base, adapter, number)) for number in range(texts)]
            reasons = Counter(reason for reason, _ in tests)
            means = [drift for _, drift in tests if math.isfinite(drift)]
            figures[name] = {
                "refused": texts - reasons[""],
                "of": texts,
                "reasons": {reason: count for reason, count in sorted(reasons.items()) if reason},
                "mean_of_self_test": _quantiles(np.array(means)) if means else {},
            }
            sys.stderr.write(f"{name}: {figures[name]}\n")
    return figures


async def self_test(engine: FaultyEngine, base: Path, adapter: Path, number: int) -> tuple[str, float]:
    """(why the load of the adapter is refused, empty where it is not; the mean |Δ log-prob| of the probe or of what was
    sampled, whichever is more)."""
    write_probe(base, adapter, number)
    api = _WatchedApi("http://vllm", client=engine.client())
    try:
        await VllmLora(api).load("conductor@1", adapter)
    except VersionRefused as refused:
        return refused.reason, max(api.drifts, default=math.inf)
    finally:
        engine.loras.clear()
        await api.close()
    return "", max(api.drifts)


def write_probe(base: Path, adapter: Path, number: int) -> None:
    """Give the adapter's manifest a probe of a text of its own, as training would."""
    conductors = read_conductors([base, adapter])
    engine = Engine(*load_runtime(conductors[adapter]), threads=1)
    try:
        messages = [{"role": "user", "content": _question(number)}]
        prompt = engine.tokens.encode_chat(messages)
        ids = np.random.default_rng(number).integers(3, engine.runtime.shape.vocab, PROBE_TOKENS).tolist()
        logprobs = list(engine.scored(prompt + ids, first=len(prompt)).logprobs)
    finally:
        engine.close()
    probe = {"messages": messages, "prompt_ids": prompt, "token_ids": ids, "logprobs": logprobs}
    seal(adapter, replace(conductors[adapter].manifest, probe=probe))


class _WatchedApi(EngineApi):
    """It remembers every difference that it finds."""

    def __init__(self, url: str, **more: Any) -> None:
        super().__init__(url, **more)
        self.drifts: list[float] = []

    async def drift(self, model: str, probe: Mapping[str, Any]) -> float:
        self.drifts.append(await super().drift(model, probe))
        return self.drifts[-1]

    async def sampled_drift(self, model: str, probe: Mapping[str, Any]) -> float:
        self.drifts.append(await super().sampled_drift(model, probe))
        return self.drifts[-1]


def _question(number: int) -> str:
    return f"Write about {TOPICS[number % len(TOPICS)]}, in {2 + number // len(TOPICS)} sentences."


async def differences(api: EngineApi, model: str, number: int, tokens: int) -> Array:
    """|Δ log-prob| of each token of one sampled text."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": _question(number)}],
        "max_tokens": tokens,
        "seed": number,
    }
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
