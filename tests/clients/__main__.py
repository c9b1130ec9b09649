"""Start the scripted model and a gateway over it, then run each environment's tests against them.

    python -m tests.clients ENVIRONMENT=TEST[,TEST…] … [-- PYTEST ARGUMENTS]

Runs in the gateway's own environment; `scripts/test-clients` calls it. Arguments that begin with TESTS run alone, each
in every environment that has it. Exit status: the worst of pytest's; 2 for a test that no environment has.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from policy.recipes.stack import Gateway, clean_environment, gateway, program, temporary_directory
from tests.clients.upstream import FAILING

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/clients/"
CONDUCTOR = "worker:planner"
HANDLES = {"scribe": "atlas", "drafter": "quill", "planner": "baton1", "embedder": "vector"}
HANDLES |= {name: name for name in FAILING}
SETTINGS = {
    "BATON_EXPLORE_SHARE": "0",
    "BATON_JOBS_WORKER": "false",
    "BATON_RETRY_BACKOFF_S": "0.01",
}
PYTEST = (
    *("-m", "pytest", "--confcutdir=tests/clients", "-p", "no:cacheprovider", "-W", "ignore"),
    *("-o", "asyncio_default_test_loop_scope=session"),  # LangChain keeps its connections between calls
)


def main(arguments: list[str]) -> int:
    """The worst exit status of all environments."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    named = [one for one in arguments[at + 1 :] if one.startswith(TESTS)]
    suites = chosen(arguments[:at], named)
    options = [one for one in arguments[at + 1 :] if one not in named]
    if unknown := [one for one in named if all(one not in paths for paths in suites.values())]:
        sys.stderr.write(f"test-clients: no client's environment has {unknown[0]}\n")
        return 2
    with temporary_directory() as directory, program("upstream", directory, "tests.clients.upstream") as model:
        pool = directory / "pool.yaml"
        pool.write_text(json.dumps(pool_file(model.url)))
        with gateway(directory, conductor=CONDUCTOR, pool=pool, settings=SETTINGS) as served:
            facts = directory / "facts.json"
            facts.write_text(json.dumps(facts_of(served)))
            return max(run(python, facts, [*paths, *options]) for python, paths in suites.items() if paths)


def chosen(suites: list[str], named: list[str]) -> dict[str, list[str]]:
    """Interpreter → its tests; of `named` those that it has, where any are named."""
    found = {}
    for suite in suites:
        environment, _, tests = suite.partition("=")
        paths = [f"{TESTS}{name}" for name in tests.split(",")]
        mine = [one for one in named if any(one.startswith(path) for path in paths)]
        found[f"{environment}/bin/python"] = mine if named else paths
    return found


def pool_file(url: str) -> dict[str, Any]:
    """Every worker of the scripted model; the planner is in no pool."""
    workers = [
        {
            "name": name,
            "handle": handle,
            "kind": "openai",
            "task": "embeddings" if name == "embedder" else "chat",
            "model": name,
            "url": f"{url}/w/{name}/v1",
            "price": {"input_usd_per_mtok": 0.1, "output_usd_per_mtok": 0.4},
            "context_tokens": 32768,
            "output_tokens_max": 512,
            "timeout_s": 20,
        }
        for name, handle in HANDLES.items()
    ]
    return {"workers": workers, "pools": {"default": [name for name in HANDLES if name != "planner"]}}


def facts_of(served: Gateway) -> dict[str, Any]:
    """What a test needs: addresses, and one key each for what keys differ in."""
    return {
        "base_url": served.base_url,
        "key": served.data_key,
        "broke_key": new_key(served, budget_usd="0.0000001"),
        "slow_key": new_key(served, rpm=1),
    }


def new_key(served: Gateway, **limits: Any) -> str:
    """A data key's secret."""
    reply = httpx.post(
        f"{served.admin_url}/admin/keys",
        json={"name": "clients", **limits},
        headers={"authorization": f"Bearer {served.admin_key}"},
        timeout=10,
    )
    reply.raise_for_status()
    return str(reply.json()["key"])


def run(python: str, facts: Path, arguments: list[str]) -> int:
    """pytest in one environment; its exit status."""
    command = [python, *PYTEST, f"--facts={facts}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=clean_environment() | {"PYTHONPATH": "."}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
