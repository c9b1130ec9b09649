"""Routing and experience on simulated workers."""
