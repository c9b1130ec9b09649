"""Traces as a backend gets them: over OTLP/HTTP to a receiver on loopback, read with OpenTelemetry's own messages."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.adapters.journal import otel
from gateway.adapters.journal.otel import Traces
from gateway.adapters.upstream.http import HttpWorkers
from gateway.core.log.rollout import AttemptRecord, RolloutRecord
from gateway.core.log.spans import call_traceparent, span_id, spans_of, trace_of, traceparent_of
from gateway.core.pool.workers import MODEL_KINDS, WorkerSpec
from gateway.errors import ConfigError
from gateway.service.ports.request import WorkerCall
from tests.kit import Kit, plan
from tests.records import T0_US, a_rollout, a_step, new_id
from tests.upstreams.server import Reply, Request, Server, json_reply
from tests.waiting import BOUND_S

CLIENTS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
# what the backends read, from their published rules
LANGFUSE_TYPES = {"span", "generation", "agent", "tool", "chain"}
OPENINFERENCE_KINDS = {"LLM", "CHAIN", "AGENT", "TOOL"}
OPERATIONS = {"invoke_workflow", "plan", "invoke_agent", "chat", "execute_tool"}


class Receiver:
    """An OTLP/HTTP backend. `spans` by name, `service`, and the headers of the last request."""

    def __init__(self) -> None:
        self.server = Server(self._receive)
        self.spans: dict[str, Any] = {}
        self.attributes: dict[str, dict[str, Any]] = {}
        self.headers: Mapping[str, str] = {}
        self.service = ""

    def _receive(self, request: Request) -> Reply:
        assert (request.method, request.path) == ("POST", "/v1/traces")
        content = gzip.decompress(request.content) if request.headers.get("content-encoding") else request.content
        self.headers = request.headers
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            (self.service,) = [
                one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
            ]
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                self.spans[span.name] = span
                self.attributes[span.name] = {one.key: _value(one.value) for one in span.attributes}
        return Reply(headers={"content-type": "application/x-protobuf"})


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def a_tree() -> tuple[RolloutRecord, RolloutRecord]:
    """A request of two steps and a loop inside it, under a client's trace."""
    child = a_rollout(steps=[a_step(0, "gamma")], depth=1, caps={"traceparent": CLIENTS})
    failed = AttemptRecord(T0_US + 30_000, T0_US + 60_000, error="upstream_error", upstream_status=503)
    worked = AttemptRecord(T0_US + 70_000, T0_US + 130_000)
    steps = [
        a_step(0, attempts=[failed, worked]),
        a_step(1, "calc", kind="builtin"),
        a_step(2, "self", kind="self", child_rollout_id=child.id),
    ]
    return a_rollout(steps=steps, caps={"traceparent": CLIENTS, "session": "run-1"}), child


async def exported(record: RolloutRecord, *children: RolloutRecord, content: bool = False) -> Receiver:
    receiver = Receiver()
    async with receiver.server:
        url = f"{receiver.server.url}/v1/traces"
        traces = Traces(
            url, "authorization=Basic abc, x-langfuse-ingestion-version=4", "baton", "1", MODEL_KINDS, content=content
        )
        metrics = PrometheusMetrics()
        metrics.tell(traces.finished)
        metrics.finished(record, 1.0, children)
        await traces.close()
    return receiver


async def test_a_request_is_a_tree_of_genai_spans_in_the_clients_trace() -> None:
    record, child = a_tree()
    got = await exported(record, child)
    assert (got.service, got.headers["authorization"], got.headers["x-langfuse-ingestion-version"]) == (
        *("baton", "Basic abc"),
        "4",
    )
    spans = got.spans
    assert {span.trace_id.hex() for span in spans.values()} == {CLIENTS[3:35]}
    parents = {name: span.parent_span_id.hex() for name, span in spans.items()}
    own = {name: span.span_id.hex() for name, span in spans.items()}
    assert set(spans) == {
        *("invoke_workflow baton", "plan conductor", "chat conductor@7", "invoke_agent alpha", "chat alpha"),
        *("execute_tool calc", "invoke_agent self", "invoke_agent gamma", "chat gamma"),
    }
    assert parents["chat alpha"] == own["invoke_agent alpha"] == span_id(record.id, "1.0")
    assert parents["execute_tool calc"] == span_id(record.id)
    assert own["chat alpha"] == call_traceparent(record, "1.0", 1)[36:52]  # as the worker was told
    assert spans["chat alpha"].start_time_unix_nano == (T0_US + 70_000) * 1_000
    (root,) = [span for span in spans_of(record, [child], MODEL_KINDS) if span.span_id == span_id(record.id)]
    assert root.parent_id == CLIENTS[36:52]


async def test_spans_keep_the_rules_of_langfuse_and_phoenix() -> None:
    record, child = a_tree()
    got = await exported(record, child)
    for name, told in got.attributes.items():
        assert told["gen_ai.operation.name"] in OPERATIONS
        assert name.startswith(told["gen_ai.operation.name"])
        assert told["openinference.span.kind"] in OPENINFERENCE_KINDS
        assert told.get("langfuse.observation.type", "span") in LANGFUSE_TYPES
        assert not {"gen_ai.input.messages", "gen_ai.output.messages", "input.value", "output.value"} & set(told)
    chat = got.attributes["chat alpha"]
    assert (chat["gen_ai.request.model"], chat["llm.model_name"]) == ("alpha", "alpha")
    assert (chat["gen_ai.usage.input_tokens"], chat["gen_ai.usage.output_tokens"]) == (9, 1)
    assert (chat["llm.token_count.prompt"], chat["llm.token_count.total"]) == (9, 10)
    assert json.loads(chat["langfuse.observation.cost_details"]) == {"total": pytest.approx(400e-9)}
    assert chat["gen_ai.response.finish_reasons"] == ["stop"]
    root = got.attributes["invoke_workflow baton"]
    assert root["baton.rollout.id"] in (record.id, child.id)
    spent = [told["llm.cost.total"] for told in got.attributes.values() if "llm.cost.total" in told]
    assert all("gen_ai.usage.input_tokens" not in told for name, told in got.attributes.items() if "invoke" in name)
    assert len(spent) == 4  # plan, alpha, calc and gamma, once each


async def test_texts_are_exported_by_setting_and_only_of_requests_logged_in_full() -> None:
    step = [a_step(0)]
    told = (await exported(a_rollout(steps=step), content=True)).attributes["chat alpha"]
    assert json.loads(told["gen_ai.input.messages"]) == [{"role": "user", "content": "2+2?"}]
    assert told["output.value"] == "4"
    hidden = await exported(a_rollout(steps=step, log_mode="metadata"), content=True)
    assert "input.value" not in hidden.attributes["chat alpha"]


async def test_a_backend_that_is_away_costs_no_request() -> None:
    traces = Traces("http://127.0.0.1:1/v1/traces", "", "baton", "1", MODEL_KINDS, content=False)
    traces._processor._batch_processor._exporter._timeout = 0.1
    traces.finished(a_rollout(), ())
    await traces.close()
    with pytest.raises(ConfigError, match="write name=value"):
        Traces("http://127.0.0.1:1", "secret", "baton", "1", MODEL_KINDS, content=False)


@pytest.mark.parametrize("bad", [None, "", "00-xyz", CLIENTS[:-3], "ff" + CLIENTS[2:], f"00-{'0' * 32}-{'1' * 16}-01"])
def test_without_a_valid_header_the_trace_is_the_rollouts_own(bad: str | None) -> None:
    rollout_id = new_id()
    made = traceparent_of(rollout_id, bad)
    record = a_rollout(id=rollout_id, caps={"traceparent": made})
    assert trace_of(record) == (rollout_id.replace("-", ""), None)
    assert call_traceparent(a_rollout(caps={}), "1.0", 0) == ""


async def test_a_traced_request_tells_its_workers_and_another_does_not() -> None:
    kit = Kit([plan(("atlas", None, []))], traced=True)
    record = (await kit.serve(traceparent=CLIENTS)).record
    assert record.caps["traceparent"] == CLIENTS
    assert [call.traceparent for call in kit.workers.calls] == [call_traceparent(record, "1.0", 0)]
    assert kit.workers.calls[0].traceparent.startswith(CLIENTS[:36])
    quiet = Kit([plan(("atlas", None, []))])
    assert "traceparent" not in (await quiet.serve(traceparent=CLIENTS)).record.caps
    assert [call.traceparent for call in quiet.workers.calls] == [""]


async def test_the_header_reaches_a_worker_over_http() -> None:
    got: list[str | None] = []

    def answer(request: Request) -> Reply:
        got.append(request.headers.get("traceparent"))
        return json_reply({"choices": [{"message": {"role": "assistant", "content": "4"}}]})

    async with Server(answer) as server:
        price = {"input_usd_per_mtok": "0", "output_usd_per_mtok": "0"}
        about = {"name": "w", "handle": "atlas", "kind": "openai", "model": "m", "url": f"{server.url}/v1"}
        spec = WorkerSpec.model_validate({**about, "price": price})
        call = WorkerCall(spec, {"messages": []}, BOUND_S, "rollout", "1.0")
        workers = HttpWorkers({}, b"depth secret")
        await workers.complete(replace(call, traceparent=CLIENTS))
        await workers.complete(call)
        await workers.close()
    assert got == [CLIENTS, None]


async def test_the_end_waits_for_a_silent_backend_for_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces("http://127.0.0.1:9/v1/traces", "", "baton", "0.1.0", MODEL_KINDS, content=False)
    exporting, answer = threading.Event(), threading.Event()

    def silent(spans: Any) -> None:
        exporting.set()
        answer.wait()

    monkeypatch.setattr(traces._processor.span_exporter, "export", silent)
    monkeypatch.setattr(otel, "EXPORT_S", 0.01)
    root, child = a_tree()
    traces.finished(root, [child])
    try:
        await asyncio.wait_for(traces.close(), BOUND_S / 6)
        assert await asyncio.to_thread(exporting.wait, BOUND_S)
    finally:
        answer.set()
