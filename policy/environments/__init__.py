"""Environments: where a policy's plans are carried out by the gateway's own executor, and judged (DESIGN §7).

The only room of `policy/` that imports the executor (docs/adr/0011): re-sampling must run what serving runs.
"""
