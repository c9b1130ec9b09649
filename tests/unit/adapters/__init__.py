"""Tests of the pure parts of adapters."""
