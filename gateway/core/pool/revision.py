"""The canonical form of a pool file, by which a rollout names the pool that it ran on. It shows no secret. Pure."""

from __future__ import annotations

import hashlib
import json
from decimal import Decimal
from typing import Any

from gateway.core.pool.prices import Price
from gateway.core.pool.tools import ToolSpec
from gateway.core.pool.ways import Detour
from gateway.core.pool.workers import PoolFile, WorkerSpec, is_reference


def plain_pools(pools: PoolFile) -> dict[str, Any]:
    """The pool file as JSON data without references to secrets: workers by name, amounts in one notation."""
    workers = {worker.name: _plain_worker(worker) for worker in pools.workers}
    return {"workers": workers, "pools": {name: list(names) for name, names in pools.pools.items()}} | {
        "default": pools.default
    }


def canonical_text(pools: PoolFile) -> str:
    """The canonical ASCII text of a pool file. Equal pools have equal texts, however their files are written."""
    return json.dumps(plain_pools(pools), sort_keys=True, separators=(",", ":"))


def revision_of(pools: PoolFile) -> str:
    """SHA-256 of the canonical text, in hex. A rollout names the pool file that it ran on by it."""
    return hashlib.sha256(canonical_text(pools).encode()).hexdigest()


def _plain_amounts(usd: dict[str, Decimal]) -> dict[str, str]:
    return {name: f"{amount.normalize():f}" for name, amount in usd.items()}


def _plain_worker(worker: WorkerSpec) -> dict[str, Any]:
    price = worker.price or Price()
    usd = {name: value for name, value in price.model_dump(exclude={"above"}).items() if value is not None}
    amounts: dict[str, Any] = _plain_amounts(usd)
    if price.above:
        tiers = [{"prompt_tokens": tier.prompt_tokens, **_plain_amounts(tier.amounts)} for tier in price.above]
        amounts["above"] = tiers
    limits = ("first_token_timeout_s", "chunk_gap_s", "exact_model")
    later = ("fetches", "command", "env", "tools", "hosted", *Detour._fields, *limits)
    left_out = {"api_key", "name", "price"} | {name for name in later if not getattr(worker, name)}  # older files' hash
    left_out |= {name for name, default in (("api", "chat"), ("answers", True)) if getattr(worker, name) == default}
    plain = worker.model_dump(mode="json", exclude=left_out) | {"price": amounts}
    if is_reference(worker.proxy or ""):
        plain["proxy"] = "(secret)"
    if worker.env:
        plain["env"] = {name: "(secret)" if is_reference(value) else value for name, value in worker.env.items()}
    return plain | ({"tools": _plain_tools(worker.tools)} if worker.tools else {})


def _plain_tools(tools: dict[str, ToolSpec]) -> dict[str, Any]:
    """Tools as JSON data, without what is left out; amounts in one notation."""
    plain = {name: tool.model_dump(mode="json", exclude_none=True) for name, tool in tools.items()}
    for name, tool in tools.items():
        if tool.call_usd is not None:
            plain[name]["call_usd"] = f"{tool.call_usd.normalize():f}"
    return plain
