"""Who may import whom, as allow-lists by folder. `[tool.importlinter]` forbids; this names all that is allowed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from scripts.house import imports, modules

EVERYWHERE = ("gateway.errors", "gateway.core")
FILES = "gateway.files"  # adapters and policy write files; core does not
THREADS = "gateway.threads"  # core is computed wherever it is called
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "gateway.core": EVERYWHERE,
    "gateway.service": (*EVERYWHERE, THREADS, "gateway.service"),
    "gateway.adapters": (*EVERYWHERE, FILES, THREADS, "gateway.adapters", "gateway.service.ports"),
    "gateway.api": (*EVERYWHERE, THREADS, "gateway.api", "gateway.service"),
    "gateway.config": (*EVERYWHERE, "gateway.config"),
    "gateway.cli": ("gateway",),
    "gateway.wiring": ("gateway",),
    "policy": (*EVERYWHERE, FILES, "policy"),
}
POLICY_ADAPTERS: dict[str, tuple[str, ...]] = {
    "policy": (
        "gateway.adapters.engines.sealed",
        "gateway.adapters.engines.files",
        "gateway.adapters.host.urls",  # inputs and results may be URLs
        *(f"gateway.service.loop.{name}" for name in ("conducting", "routers", "state")),  # what planners are made of
        "gateway.service.ports.request",
    ),
    "policy.dataset": tuple(f"gateway.adapters.postgres.{name}" for name in ("database", "tables", "admin_tables")),
    "policy.environments": ("gateway.service.loop",),  # docs/adr/0011
    "policy.evaluate.endpoint": (  # a planner behind a URL is asked with the client that serves; its key is a reference
        "gateway.adapters.upstream.conductor.client",
        "gateway.adapters.host.poolfile",
        "gateway.config.settings",
    ),
    "policy.record.command": (  # workers are asked with the clients that serve; their keys are references
        "gateway.adapters.upstream.pooled",
        "gateway.adapters.host.poolfile",
        "gateway.config.settings",
    ),
    "policy.engines.endpoint": (
        "gateway.adapters.upstream.conductor.client",
        "gateway.adapters.upstream.client",
        "gateway.adapters.engines.http",  # a version is judged on a server as the gateway loads one there
        "gateway.adapters.engines.vllm",
    ),
    "policy.train.run.rollouts": (
        "gateway.adapters.engines.http",  # what was learnt is loaded on a server as the gateway loads a version there
        "gateway.adapters.engines.vllm",
    ),
    "policy.engines.opening": ("gateway.adapters.host.poolfile", "gateway.config.settings"),
    "policy.train.sources.live": (  # tools are called with the client that serves
        "gateway.adapters.upstream.tools",
        "gateway.adapters.host.poolfile",
    ),
    "policy.graders": ("gateway.adapters.upstream.sandbox",),
    "policy.recipes": (
        "gateway.config.settings",
        *(f"gateway.adapters.postgres.{name}" for name in ("database", "tables")),
    ),
    "policy.jobs": ("gateway.adapters.postgres", "gateway.adapters.host.supervisor"),
}


def within(name: str, places: Iterable[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


@pytest.mark.parametrize("floor", MAY_IMPORT)
def test_a_floor_imports_only_what_it_may(floor: str) -> None:
    members = [name for name in modules() if within(name, [floor])]
    assert members
    allowed = MAY_IMPORT[floor]
    broken = [
        f"{name} → {target}"
        for name in members
        for target in sorted(imports()[name])
        if not within(target, allowed) and not _named_for_policy(floor, name, target)
    ]
    assert broken == []


def _named_for_policy(floor: str, name: str, target: str) -> bool:
    if floor != "policy":
        return False
    return target == "gateway" or any(  # its version
        within(name, [room]) and within(target, places) for room, places in POLICY_ADAPTERS.items()
    )


def test_every_permission_of_policy_is_used() -> None:
    unused = [
        (room, place)
        for room, places in POLICY_ADAPTERS.items()
        for place in places
        if not any(within(t, [place]) for name, ts in imports().items() if within(name, [room]) for t in ts)
    ]
    assert unused == []
