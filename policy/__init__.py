"""Offline work around the gateway: simulated workers, data sets, training. Never runs in the request path."""

from __future__ import annotations
