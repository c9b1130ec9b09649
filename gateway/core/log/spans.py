"""A rollout as OpenTelemetry spans, after the GenAI semantic conventions. Pure; made once the request has ended.

    invoke_workflow POLICY                 the request
      plan PLANNER                         a round; below it `chat VERSION` where a model planned
      invoke_agent WORKER                  a step; below it `chat WORKER` for each attempt
      execute_tool WORKER                  a step of a tool
      invoke_agent self → invoke_workflow  a loop inside the request

The trace is that of the client's `traceparent`, else the rollout's own id. Ids of spans are digests of what they are
of, so that the header of a worker's call names the very span that is exported later. Tokens and dollars stand on `chat`
and `execute_tool` spans alone: backends add them up. Sources: github.com/open-telemetry/semantic-conventions-genai
(v0.1: a workflow is named by `gen_ai.agent.name`), Langfuse's mapping of attributes, OpenInference (Phoenix).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.core.log.rollout import AttemptRecord, RolloutRecord, RoundRecord, StepRecord

Kind = Literal["internal", "client"]
PROVIDER = "baton"
HEADER = "traceparent"
NANO_PER_USD = 1_000_000_000
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One span. Ids are hex, 32 and 16 digits; times are microseconds since 1970. `error`: its code, or None."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    kind: Kind
    started_us: int
    finished_us: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def traceparent_of(rollout_id: str, incoming: str | None) -> str:
    """The client's `traceparent` where it is a valid one (https://www.w3.org/TR/trace-context), else the rollout's
    own."""
    if incoming and _TRACEPARENT.fullmatch(incoming):
        return incoming
    return f"00-{rollout_id.replace('-', '')}-{span_id(rollout_id)}-01"


def trace_of(record: RolloutRecord) -> tuple[str, str | None]:
    """The trace id of a rollout, and the span of the client that it is part of; None where it is its own."""
    match = _TRACEPARENT.fullmatch(str(record.caps.get(HEADER) or ""))
    if match is None:
        return record.id.replace("-", ""), None
    return match[1], None if match[2] == span_id(record.id) else match[2]


def call_traceparent(record: RolloutRecord, step: str, attempt: int) -> str:
    """The header of one attempt at a worker; empty where the rollout is not traced."""
    if HEADER not in record.caps:
        return ""
    return f"00-{trace_of(record)[0]}-{span_id(record.id, step, attempt)}-01"


def span_id(*of: object) -> str:
    """16 hex digits that name a span: of a rollout, of its round `plan`, of its step, of an attempt."""
    return hashlib.sha256("\x1f".join(map(str, of)).encode()).hexdigest()[:16]


def spans_of(
    record: RolloutRecord, children: Sequence[RolloutRecord], models: Collection[str], *, content: bool = False
) -> Iterator[TraceSpan]:
    """The spans of a request and of the loops inside it, parents first. `models`: the kinds of workers that are models;
    others are tools. `content`: with prompts and replies, of requests that are logged in full."""
    trace_id, parent_id = trace_of(record)
    loops = {child.id: child for child in children}
    yield from _Loop(record, trace_id, loops, frozenset(models), content and record.log_mode == "full").spans(parent_id)


@dataclass(frozen=True, slots=True)
class _Loop:
    record: RolloutRecord
    trace_id: str
    loops: Mapping[str, RolloutRecord]
    models: frozenset[str]
    content: bool

    def spans(self, parent_id: str | None) -> Iterator[TraceSpan]:
        record = self.record
        root = span_id(record.id)
        attributes = {
            **_operation("invoke_workflow", record.policy_requested, "CHAIN"),
            "baton.rollout.id": record.id,
            "baton.key.id": record.key_id,
            "baton.pool": record.pool_name,
            "baton.policy.version": record.policy_assigned,
            "baton.fallback": record.fallback,
            "baton.status": record.status,
            "baton.cost_usd": record.cost_nano / NANO_PER_USD,
            "baton.request.id": record.request_id,
            "user.id": record.end_user,
            "session.id": record.caps.get("session"),
            "gen_ai.conversation.id": record.caps.get("session"),
        }
        error = None if record.status == "done" else str((record.error or {}).get("code") or record.status)
        times = (record.created_us, record.finished_us or record.created_us)
        yield self._span(record.policy_requested, root, parent_id, "internal", times, attributes, error)
        for planned in record.rounds:
            yield from self._round(planned, root)
        for step in record.steps:
            if step.started_us:
                yield from self._step(step, root)

    def _round(self, planned: RoundRecord, root: str) -> Iterator[TraceSpan]:
        own, times = span_id(self.record.id, "plan", planned.round), (planned.started_us, planned.finished_us)
        about = {**_operation("plan", planned.planner, "AGENT"), "baton.round": planned.round}
        about |= {"baton.policy.version": planned.policy_version}
        yield self._span(planned.planner, own, root, "internal", times, about, planned.refusal)
        if planned.prompt_tokens:
            model = planned.policy_version or planned.planner
            spent = _spent(planned.prompt_tokens, planned.completion_tokens, planned.cost_nano)
            texts = self._content(planned.messages, planned.plan_text)
            about = {**_chat(model), **spent, **texts}
            yield self._span(model, span_id(own, "chat"), own, "client", times, about, planned.refusal)

    def _step(self, step: StepRecord, root: str) -> Iterator[TraceSpan]:
        place = f"{step.round}.{step.step}"
        own, times = span_id(self.record.id, place), (step.started_us, step.finished_us or step.started_us)
        is_tool = step.kind not in self.models and step.child_rollout_id is None
        about = {"baton.step": place, "baton.worker.version": step.worker_version, "baton.step.kind": step.kind}
        error = None if step.status == "done" else step.error or step.status
        if is_tool:
            about |= {**_operation("execute_tool", step.worker, "TOOL"), "gen_ai.tool.name": step.worker}
            about |= {"gen_ai.tool.type": "function", **_spent(0, 0, step.cost_nano)}
        else:
            about |= _operation("invoke_agent", step.worker, "AGENT")
        yield self._span(step.worker, own, root, "internal", times, about, error)
        child = self.loops.get(step.child_rollout_id or "")
        if child is not None:
            yield from _Loop(child, self.trace_id, self.loops, self.models, self.content).spans(own)
        elif not is_tool:
            for number, attempt in enumerate(step.attempts):
                yield self._attempt(step, attempt, number, own)

    def _attempt(self, step: StepRecord, attempt: AttemptRecord, number: int, parent: str) -> TraceSpan:
        worker, is_last = attempt.worker or step.worker, number == len(step.attempts) - 1
        about: dict[str, Any] = {**_chat(worker), "baton.attempt": number + 1}
        if is_last:
            about |= _spent(step.prompt_tokens, step.completion_tokens, step.cost_nano)
            about |= self._content(step.messages, step.reply)
            if step.finish_reason:
                about["gen_ai.response.finish_reasons"] = [step.finish_reason]
        if attempt.summary is not None:
            about["baton.purpose"] = "summary"
        if attempt.upstream_status:
            about["http.response.status_code"] = attempt.upstream_status
        own = span_id(self.record.id, f"{step.round}.{step.step}", number)
        times = (attempt.started_us, attempt.finished_us)
        return self._span(worker, own, parent, "client", times, about, attempt.error)

    def _content(self, messages: Sequence[Mapping[str, Any]], reply: str | None) -> dict[str, Any]:
        if not self.content:
            return {}
        question = json.dumps(list(messages), ensure_ascii=False)
        answer = json.dumps([{"role": "assistant", "content": reply}], ensure_ascii=False)
        both = {"gen_ai.input.messages": question, "gen_ai.output.messages": answer}
        return {**both, "input.value": question, "output.value": reply or ""}

    def _span(
        self,
        name: str,
        own: str,
        parent_id: str | None,
        kind: Kind,
        times: tuple[int, int],
        attributes: Mapping[str, Any],
        error: str | None,
    ) -> TraceSpan:
        attributes_set = {key: value for key, value in attributes.items() if value is not None}
        if error is not None:
            attributes_set["error.type"] = error
        name = f"{attributes_set['gen_ai.operation.name']} {name}"
        return TraceSpan(name, self.trace_id, own, parent_id, kind, times[0], max(times), attributes_set, error)


def _operation(operation: str, agent: str, openinference: str) -> dict[str, Any]:
    names = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER}
    return {**names, "gen_ai.agent.name": agent, "openinference.span.kind": openinference}


def _chat(model: str) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "openinference.span.kind": "LLM",
        "llm.model_name": model,
        "langfuse.observation.type": "generation",
    }


def _spent(prompt_tokens: int, completion_tokens: int, cost_nano: int) -> dict[str, Any]:
    usd = cost_nano / NANO_PER_USD
    return {
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": completion_tokens,
        "llm.token_count.prompt": prompt_tokens,
        "llm.token_count.completion": completion_tokens,
        "llm.token_count.total": prompt_tokens + completion_tokens,
        "llm.cost.total": usd,
        "langfuse.observation.cost_details": json.dumps({"total": usd}),
    }
