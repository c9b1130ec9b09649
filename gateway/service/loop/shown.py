"""Workers and replies as the conductor's prompt shows them, and workers as a rollout's record stores them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.core.loop.digest import shown_replies
from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.replies.errors import CheckerErrors
from gateway.core.loop.replies.judging import pair_verdict
from gateway.core.loop.replies.kinds import Reply, ReplyKind, read_message, wanted_kind
from gateway.core.loop.shown import (
    SHOWN_MIN,
    ShownExperience,
    ShownPlan,
    ShownReply,
    ShownRequest,
    ShownWorker,
    price_tier,
)
from gateway.core.money.amounts import input_tokens_bound
from gateway.core.openai.reply import reply_text
from gateway.core.openai.vendors.usage import BYTES_PER_TOKEN
from gateway.core.pool.tools import Tool
from gateway.core.pool.workers import JUDGE_URL, MODEL_KINDS, TURNS, WorkerSpec
from gateway.service.loop.checks import flags_with_verdicts
from gateway.service.loop.spending.charges import price_of
from gateway.service.loop.state import Loop, StepRun
from gateway.service.ports.request import WonPlan

EXAMPLE_CHARS_MAX = 200  # of a question or a task in an example
SHOWN_KEPT = 4096  # workers
SHOWN_TOOLS_MAX, SIGNATURE_CHARS_MAX = 12, 160  # of one worker's tools


def shown_request(loop: Loop, now_s: float) -> ShownRequest:
    """A request as the conductor's prompt shows it at `now_s` of the monotonic clock: what it needs, what is left."""
    return ShownRequest(
        rounds=loop.rounds,
        nano_left=max(0, loop.tree.meter.known_nano),
        seconds_left=max(0.0, loop.tree.deadline_s - now_s),
        tokens=input_tokens_bound(loop.conversation) // BYTES_PER_TOKEN,
        needs=tuple(sorted(loop.needs)),
    )


def shown_worker(
    spec: WorkerSpec, past: WorkerExperience | None, tools: Sequence[Tool] = (), errors: CheckerErrors | None = None
) -> ShownWorker:
    """One worker as the conductor's prompt shows it, with the tools that it has for others, and how often it errs as a
    checker. The same of a worker as last time is made once: a pool's workers are in every prompt."""
    kept = _shown.get(id(spec))
    if kept is not None and kept[0] is spec and kept[1:4] == (past, tools, errors):
        return kept[4]
    shown = _worker(spec, past, tools, errors)
    if len(_shown) >= SHOWN_KEPT:
        _shown.clear()
    _shown[id(spec)] = spec, past, tools, errors, shown
    return shown


_shown: dict[
    int, tuple[WorkerSpec, WorkerExperience | None, Sequence[Tool], CheckerErrors | None, ShownWorker]
] = {}  # by the spec's id, which its entry keeps alive


def _worker(
    spec: WorkerSpec, past: WorkerExperience | None, tools: Sequence[Tool], errors: CheckerErrors | None
) -> ShownWorker:
    if past is not None and past.n < SHOWN_MIN:
        past = None
    seen = ShownExperience(past.n, past.success_mean, past.cost_nano_mean, past.latency_ms_mean) if past else None
    latency_s = seen.latency_ms_mean / 1000 if seen else spec.latency_hint_s
    return ShownWorker(
        *(spec.handle, spec.description, spec.tags, price_tier(price_of(spec)), spec.context_tokens, latency_s, seen),
        output_tokens_max=spec.output_tokens_max if spec.kind in MODEL_KINDS else 0,
        cannot=tuple(name for name in spec.cannot if name not in TURNS),
        tools=tuple(tool.signature[:SIGNATURE_CHARS_MAX] for tool in tools[:SHOWN_TOOLS_MAX]),
        errors=errors,
        is_tool=spec.kind not in MODEL_KINDS,
    )


def replies_of(loop: Loop) -> tuple[ShownReply, ...]:
    """The digest of every step so far, with its reply and the verdicts on it."""
    runs = loop.runs
    wanted = wanted_kind(loop.params, loop.record.tags)
    replies = [_typed(run, wanted) for run in runs]
    judges = [run for run in runs if run.spec.url == JUDGE_URL and run.body is not None]
    said = [pair_verdict(reply_text(run.body or {}), run.step.see) for run in judges]
    reasons = [run.record.finish_reason for run in runs]
    digests = shown_replies([run.step.worker for run in runs], replies, reasons, dict(filter(None, said)))
    texts = [reply_text(run.body) if run.body is not None else "" for run in runs]
    return tuple(
        replace(digest, text=text, flags=flags_with_verdicts(loop, digest))
        for digest, text in zip(digests, texts, strict=True)
    )


def _typed(run: StepRun, wanted: ReplyKind | None) -> Reply | None:
    """The reply of a step by its kind; None where it has none. `wanted`: the kind that the request asks for."""
    if run.body is None:
        return None
    choice = (run.body.get("choices") or [{}])[0]
    return read_message(choice.get("message") or {}, wanted if run.step.task is None else None)


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


def shown_pool(loop: Loop) -> list[dict[str, Any]]:
    """The workers that a plan may name, as the rollout's record stores them. Of a request to one model by its name that
    is this one alone: with the others of a large pool most of the record would be about workers that nobody asked."""
    named = loop.planner.name.removeprefix("fixed:") if loop.fallback is None else None
    only = [spec for spec in loop.workers if spec.name == named and spec.kind in MODEL_KINDS]
    return [
        pool_entry(spec, loop.experience.get(spec.name), loop.drawn.get(spec.name)) for spec in only or loop.workers
    ]


def pool_entry(spec: WorkerSpec, past: WorkerExperience | None, drawn: float | None = None) -> dict[str, Any]:
    """One worker as the rollout's record stores it. `drawn`: the probability with which a candidate of a large pool was
    drawn at random."""
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
    } | ({} if drawn is None else {"drawn": drawn})
