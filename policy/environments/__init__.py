"""Environments: where a policy's plans are carried out by the gateway's own executor, and judged (DESIGN §7).

The only rooms of `policy/` that import `gateway.service` (docs/adr/0011): re-sampling must run what serving runs.
"""
