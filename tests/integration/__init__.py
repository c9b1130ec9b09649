"""Adapters against the real programs on loopback."""
