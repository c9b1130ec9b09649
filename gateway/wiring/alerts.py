"""Wire alerts: their outbox, what fills it, and what sends it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from gateway.adapters.journal.webhook import Webhook
from gateway.adapters.postgres.admin import PostgresAdmin
from gateway.adapters.postgres.operators.alerts import PostgresAlerts
from gateway.adapters.redis.budgets import RedisBudgets
from gateway.config.serving import listed
from gateway.core.log.alerts import secret_bytes
from gateway.service.admin.alerts import AlertSender, AlertSources
from gateway.service.policies.drift import WorkerWatch
from gateway.wiring.base import Base


def alert_watches(
    base: Base, budgets: RedisBudgets, watch: WorkerWatch
) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
    """What runs for alerts beside the traffic, by name; nothing without a webhook. Raises ConfigError for a secret of
    another form."""
    settings = base.settings
    if not settings.alerts_url:
        return {}
    key = secret_bytes(base.referred(settings.alerts_secret) or "")
    engine, outbox = base.connections.background, PostgresAlerts(base.connections.background)
    sources = AlertSources(
        outbox,
        listed(settings.alerts_kinds),
        PostgresAdmin(engine),
        budgets,
        base.clock,
        flags=watch.flags,
        exhausted=budgets.exhausted,
        alone=base.alone,
    )
    if not base.alone:  # the process that watches this one sends
        return {"alerts": sources.run}
    webhook = base.closing(Webhook(settings.alerts_url, key, client=base.client()))
    sender = AlertSender(outbox, webhook, base.clock, base.metrics)
    return {"alerts": sources.run, "sending alerts": sender.run}
