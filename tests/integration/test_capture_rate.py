"""The capture rate: of the requests this process has served, how many have their rollout in PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.adapters.journal.carriers import ThreadCarrier
from gateway.adapters.journal.shipper import Shipper
from gateway.adapters.journal.spool import Spool, SpoolLimits
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.writer import LogWriter
from gateway.core.log.events import Event
from tests.records import a_rollout, new_id, rollout_event


def rate(metrics: PrometheusMetrics) -> float | None:
    return metrics.registry.get_sample_value("baton_capture_rate")


def logged_now(record: Any, **changes: Any) -> Event:
    event, ts_us = rollout_event(record), 4_000_000_000_000_000
    payload: Mapping[str, Any] = {**event.payload, **changes}
    return Event(event.id, event.kind, ts_us, payload)


async def test_it_is_one_when_every_request_has_its_row_and_less_while_or_where_not(
    tmp_path: Path, database_url: str
) -> None:
    metrics = PrometheusMetrics()
    assert rate(metrics) == 1.0
    spool = await Spool.open(tmp_path, SpoolLimits(shipped_timeout_s=60), metrics)
    engine = sync_engine(database_url)
    shipper = Shipper(spool, ThreadCarrier(spool, LogWriter(engine)), None, metrics)
    try:
        first, second = a_rollout(), a_rollout()
        for record in (first, second):
            metrics.finished(record, 1.0)
        await spool.append(rollout_event(a_rollout()))  # served by the process before this one
        await spool.append(logged_now(first))
        await spool.append(logged_now(a_rollout(), parent_id=first.id))  # a loop inside the first
        assert rate(metrics) == 0.0
        shipper.start()
        await spool.shipped()
        assert rate(metrics) == 0.5
        await spool.append(logged_now(second, id="not a uuid"))  # goes to dead_letters
        await spool.shipped()
        assert rate(metrics) == 0.5
        await spool.append(logged_now(a_rollout(), id=new_id()))
        await spool.shipped()
        assert rate(metrics) == 1.0
    finally:
        await shipper.stop()
        await spool.close()
        engine.dispose()
