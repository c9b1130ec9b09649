"""The arena as a pool file: what `make serve` runs on when no real worker is configured."""

from __future__ import annotations

from typing import Any

import yaml

from gateway.core.pool.workers import PoolFile
from policy.simulators.arena.workers import HELD_OUT, SELF_WORKER, STANDARD, VOTE_TOOL, ArenaWorker, Pool

TYPICAL_REPLY_TOKENS = 30
OUTPUT_TOKENS_MAX = 512
UNTOLD = "a language model"


def worker_entry(worker: ArenaWorker, base_url: str, *, told: bool = True) -> dict[str, Any]:
    """One worker as it stands in pool.yaml; `vote` is built into the gateway and `self` is the conductor. `told`: what
    a model is good at is said; else it has no tags and the same description as every other."""
    told = told or worker.kind != "openai"
    entry: dict[str, Any] = {
        "name": worker.name,
        "handle": worker.handle,
        "kind": worker.kind,
        "description": worker.description if told else UNTOLD,
        "tags": list(worker.tags) if told else [],
        "price": {
            "input_usd_per_mtok": f"{worker.price.input_usd_per_mtok}",
            "output_usd_per_mtok": f"{worker.price.output_usd_per_mtok}",
        },
    }
    if worker.kind == "tool":
        return {**entry, "url": "builtin:vote"}
    if worker.kind == "self":
        return entry
    return {
        **entry,
        "model": worker.name,
        "url": f"{base_url.rstrip('/')}/w/{worker.name}/v1",
        "output_tokens_max": OUTPUT_TOKENS_MAX,
        "timeout_s": 20.0,
        "latency_hint_s": round(worker.latency_s(TYPICAL_REPLY_TOKENS), 3),
    }


def pool_yaml(base_url: str, standard: Pool = STANDARD, held_out: Pool = HELD_OUT, *, told: bool = True) -> str:
    """pool.yaml with the pools `arena` (the default) and `heldout`. Raises ValueError if it would not be valid."""
    builtins = (VOTE_TOOL, SELF_WORKER)
    document = {
        "workers": [worker_entry(worker, base_url, told=told) for worker in (*standard, *held_out, *builtins)],
        "pools": {
            "arena": [worker.name for worker in (*standard, *builtins)],
            "heldout": [worker.name for worker in (*held_out, *builtins)],
        },
        "default": "arena",
    }
    PoolFile.model_validate(document)
    return "# The arena's simulated workers (docs/arena.md).\n" + yaml.safe_dump(document, sort_keys=False, width=120)
