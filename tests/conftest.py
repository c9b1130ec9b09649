"""Fixtures for every tier."""

from __future__ import annotations

pytest_plugins = ["tests.servers", "tests.servers_pg"]
