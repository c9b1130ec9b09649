"""Tests of the offline work: arena, replay, training."""

from __future__ import annotations
