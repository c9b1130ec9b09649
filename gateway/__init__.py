"""Baton: an OpenAI-compatible gateway planned by a trained conductor."""

__version__ = "0.1.0"
