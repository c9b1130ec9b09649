"""`baton alerts test`: send one alert by hand to the webhook of the settings, and say what came back."""

from __future__ import annotations

import argparse
import asyncio
import time
from datetime import UTC, datetime

from gateway.adapters.host import poolfile
from gateway.adapters.journal.webhook import Webhook
from gateway.adapters.upstream.client import http_client
from gateway.adapters.upstream.http1.ways import Ways
from gateway.config import settings as config
from gateway.core.log.alerts import DueAlert, Receipt, secret_bytes
from gateway.core.log.events import uuid7
from gateway.errors import ConfigError


def run(_: argparse.Namespace) -> int:
    """Send it; 1 where it did not get through. Raises ConfigError without a webhook."""
    settings = config.load()
    if not settings.alerts_url or settings.alerts_secret is None:
        raise ConfigError("no webhook is set; set BATON_ALERTS_URL and BATON_ALERTS_SECRET")
    key = secret_bytes(poolfile.resolve_secret(settings.alerts_secret, config.environment()))
    alert = DueAlert(uuid7(time.time_ns() // 1_000_000), "test", datetime.now(UTC), {"message": "a test of alerts"}, 1)
    webhook = Webhook(settings.alerts_url, key, client=http_client(1, Ways(config.environment())))
    host, receipt, seconds = asyncio.run(_send(webhook, alert))
    print(f"{host} answered {receipt.line} in {seconds:.2f} s to {alert.id}")
    if receipt.status is not None and receipt.text:
        print(receipt.text)
    return 0 if receipt.fate == "sent" else 1


async def _send(webhook: Webhook, alert: DueAlert) -> tuple[str, Receipt, float]:
    began = time.monotonic()
    try:
        receipt = await webhook.send(alert, datetime.now(UTC))
    finally:
        await webhook.close()
    return webhook.host, receipt, time.monotonic() - began
