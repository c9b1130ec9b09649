"""Workers as the conductor's prompt shows them, and as a rollout's record stores them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.loop.shown import ShownExperience, ShownPlan, ShownWorker, price_tier
from gateway.core.pool.workers import MODEL_KINDS, WorkerSpec
from gateway.service.loop.bodies import price_of
from gateway.service.ports.request import WonPlan, WorkerExperience

EXAMPLE_CHARS_MAX = 200  # of a question or a task in an example
SHOWN_MIN = 2  # outcomes before a conductor is shown them: it believes what it is shown


def shown_worker(spec: WorkerSpec, past: WorkerExperience | None) -> ShownWorker:
    """One worker as the conductor's prompt shows it."""
    if past is not None and past.n < SHOWN_MIN:
        past = None
    seen = ShownExperience(past.n, past.success_mean, past.cost_nano_mean, past.latency_ms_mean) if past else None
    latency_s = seen.latency_ms_mean / 1000 if seen else spec.latency_hint_s
    return ShownWorker(
        *(spec.handle, spec.description, spec.tags, price_tier(price_of(spec)), spec.context_tokens, latency_s, seen),
        output_tokens_max=spec.output_tokens_max if spec.kind in MODEL_KINDS else 0,
        cannot=spec.cannot,
    )


def shown_plans(won: Sequence[WonPlan], workers: Sequence[WorkerSpec]) -> list[ShownPlan]:
    """Plans as examples in the prompt: questions and tasks cut, today's handles, each plan once. Left out is what names
    a worker that this request has not."""
    handles = {spec.name: spec.handle for spec in workers}
    shown: dict[str, ShownPlan] = {}
    for one in won:
        steps = [_shown_step(step, one.pool, handles) for step in one.plan.get("steps") or ()]
        if one.question.strip() and steps and None not in steps:
            text = json.dumps({"steps": steps}, ensure_ascii=False)
            question = " ".join(one.question.split())[:EXAMPLE_CHARS_MAX]
            shown.setdefault(text, ShownPlan(question, text, one.cost_nano))
    return list(shown.values())


def _shown_step(step: Any, pool: Mapping[str, str], handles: Mapping[str, str]) -> dict[str, Any] | None:
    handle = handles.get(pool.get(str(step.get("worker")), "")) if isinstance(step, Mapping) else None
    if handle is None:
        return None
    task = step.get("task")
    return {"worker": handle, "task": task and str(task)[:EXAMPLE_CHARS_MAX], "see": step.get("see") or []}


def pool_entry(spec: WorkerSpec, past: WorkerExperience | None) -> dict[str, Any]:
    """One worker as the rollout's record stores it."""
    price = price_of(spec)
    seen = None
    if past is not None:
        seen = {"n": past.n, "success": past.success_mean, "cost_nano": past.cost_nano_mean, "ms": past.latency_ms_mean}
    return {
        "name": spec.name,
        "handle": spec.handle,
        "kind": spec.kind,
        "version": spec.version,
        "tags": list(spec.tags),
        "tier": price_tier(price),
        "input_nano_per_mtok": price.input_nano_per_mtok,
        "output_nano_per_mtok": price.output_nano_per_mtok,
        "call_nano": price.call_nano,
        "experience": seen,
    }
