"""Fixtures for every tier."""

from __future__ import annotations

pytest_plugins = ["tests.servers_pg"]
