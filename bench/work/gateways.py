"""One arm of the bench: a gateway of one checkout with its own PostgreSQL and Redis, over the scripted workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.work.workers import CRITIC, HANDLES, PRICES_USD, SKILLS
from policy.recipes.stack import Gateway, gateway

JAIL = "gateway/adapters/upstream/sandbox"  # of a checkout that has builtin:python and builtin:judge
SETTINGS = {
    "BATON_JOBS_WORKER": "false",
    "BATON_EXPLORE_SHARE": "0",
    "BATON_RIGHT_SECONDS": "1000000000",  # scripted workers answer at once, and what is left is the machine's
    "BATON_DEFAULT_POLICY": "rule",
}
RUN_S = 10.0  # that a check of code may take


@dataclass(frozen=True, slots=True)
class Arm:
    """A checkout under its name in the tables."""

    name: str
    checkout: Path

    @property
    def has_checkers(self) -> bool:
        return (self.checkout / JAIL).is_dir()

    def policies(self, kind: str) -> list[str]:
        """The policies that this arm can serve on one kind of work."""
        policies = [*(f"baton/fixed:{worker}" for worker in SKILLS), "baton/rule", "baton/vote", "baton/cascade"]
        checker = "python" if kind == "code" else "judge"
        chains = ("cheap>best", "cheap>middle>best")
        return [*policies, *(f"baton/checked:{chain}@{checker}" for chain in chains if self.has_checkers)]

    @contextmanager
    def served(self, directory: Path, workers_url: str) -> Iterator[Gateway]:
        """Run the gateway while the block lasts."""
        place = directory / self.name
        place.mkdir()
        pool = place / "pool.yaml"
        pool.write_text(pool_yaml(workers_url, checkers=self.has_checkers))
        settings = SETTINGS | {"PYTHONPATH": str(self.checkout.resolve()), "PYTHONSAFEPATH": "1"}
        with gateway(place, conductor="none", pool=pool, settings=settings) as running:
            yield running


def pool_yaml(url: str, *, checkers: bool) -> str:
    """The pool file: three models and a vote; with `checkers` also the jail, and the critic as a judge."""
    workers = [_model(name, url) for name in (*SKILLS, *((CRITIC,) if checkers else ()))]
    vote: dict[str, object] = {"name": "vote", "handle": "tally", "kind": "tool", "url": "builtin:vote"}
    if not checkers:
        return _file([*workers, vote])
    vote["params"] = {"run_code": True}
    python = {"name": "python", "handle": "probe", "kind": "tool", "url": "builtin:python", "timeout_s": RUN_S}
    judge: dict[str, object] = {"name": "judge", "handle": "arbiter", "kind": "tool", "url": "builtin:judge"}
    judge["params"] = {"model": CRITIC, "run_code": True}
    return _file([*workers, vote, python, judge])


def _model(name: str, url: str) -> dict[str, object]:
    read, write = PRICES_USD[name]
    return {
        "name": name,
        "handle": HANDLES[name],
        "kind": "openai",
        "model": name,
        "url": f"{url}/w/{name}/v1",
        "output_tokens_max": 2048,
        "price": {"input_usd_per_mtok": read, "output_usd_per_mtok": write},
    }


def _file(workers: list[dict[str, object]]) -> str:
    names = [worker["name"] for worker in workers if worker["name"] != CRITIC]
    return yaml.safe_dump({"workers": workers, "pools": {"main": names}, "default": "main"}, sort_keys=False)
