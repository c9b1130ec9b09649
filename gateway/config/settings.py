"""Every setting and every limit, and the only place that reads the environment.

`load()` gives the frozen `Settings`. A setting `drain_s` is the variable `BATON_DRAIN_S`; a `BATON_*` variable that
is no setting is an error that names the nearest one. `docs/configuration.md` is written from the fields of SECTIONS.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.config.operating import DriftSettings, LoginSettings, ReachSettings
from gateway.config.planning import LearningSettings, PlanningSettings, VersionsSettings
from gateway.config.serving import (
    AlertsSettings,
    BatchesSettings,
    CapsSettings,
    LogSettings,
    MoneySettings,
    OutsideSettings,
    PlacesSettings,
    RequestsSettings,
    TurnsSettings,
    UpstreamSettings,
)
from gateway.errors import ConfigError

PREFIX = "BATON_"
RENAMED = {  # what to set instead
    "BATON_RULE_W_COST": "say what a right answer is worth instead: BATON_RIGHT_USD, dollars (1 / the weight)",
    "BATON_RULE_W_LATENCY": "say what a right answer is worth instead: BATON_RIGHT_SECONDS",
    "BATON_RULE_W_SUCCESS": "success counts as 1; BATON_RIGHT_USD and BATON_RIGHT_SECONDS say what it is worth",
    "BATON_JUDGE_MODEL": "it is BATON_JUDGE now; write BATON_JUDGE=worker:NAME",
    "BATON_JUDGE_BUDGET_USD": "the judge has a budget a day now; set BATON_JUDGE_USD_A_DAY",
}
MAY_HOLD_SECRETS = frozenset(  # never repeated in an error
    {"database_url", "redis_url", "pepper", "conductor_api_key", "embedder_api_key", "alerts_url"}
)
SECTIONS = (
    PlacesSettings,
    PlanningSettings,
    VersionsSettings,
    LearningSettings,
    CapsSettings,
    RequestsSettings,
    TurnsSettings,
    BatchesSettings,
    OutsideSettings,
    UpstreamSettings,
    ReachSettings,
    DriftSettings,
    MoneySettings,
    LogSettings,
    AlertsSettings,
    LoginSettings,
)


class Settings(
    LoginSettings,
    AlertsSettings,
    LogSettings,
    MoneySettings,
    DriftSettings,
    ReachSettings,
    UpstreamSettings,
    OutsideSettings,
    BatchesSettings,
    TurnsSettings,
    RequestsSettings,
    CapsSettings,
    LearningSettings,
    VersionsSettings,
    PlanningSettings,
    PlacesSettings,
    BaseSettings,
):
    """All sections as one frozen, flat object."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", populate_by_name=True, validate_default=True
    )

    @property
    def policies_path(self) -> Path | None:
        """The directory of policy versions; None where no engine holds any."""
        ours = self.conductor_kind in ("embedded", "directory")
        held = self.policy_engine in ("auto",) if ours else self.policy_engine.startswith("vllm")
        return (self.policies_dir or self.data_dir / "policies") if held else None

    @property
    def spool_path(self) -> Path:
        """The directory of the journal."""
        return self.spool_dir or self.data_dir / "spool"

    def spool_of(self, index: int) -> Path:
        """The directory of the journal of one of several processes."""
        return self.spool_path / f"process-{index}"


@dataclass(frozen=True, slots=True)
class ServingProcesses:
    """`count` processes with the indices from 1 on serve the public port, and have their state under `directory`.
    `index` is that of this one, 0 where it only watches them."""

    directory: Path
    count: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Services:
    """The running servers that a gateway is wired to; `cli` starts or finds them, `wiring.build` uses them.

    `conductor_url` (base URL ending in /v1) and `conductor_model` are None where the conductor is a worker of the pool,
    `policies` where this conductor has one version and no registry. `engine_key` opens the routes that load versions.
    `places` maps the `local:` URLs of the pool to the base URLs of the servers that were started for them. `serving`:
    the processes that serve the public port; None where one process does everything.
    """

    database_url: str = field(repr=False)
    redis_url: str = field(repr=False)
    pool_file: Path
    pepper: bytes = field(repr=False)
    conductor_url: str | None = None
    conductor_model: str | None = None
    policies: Path | None = None
    engine_key: str | None = field(default=None, repr=False)
    places: Mapping[str, str] = field(default_factory=dict)
    serving: ServingProcesses | None = None


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def load(**values: Any) -> Settings:
    """Settings from the environment; those in `values` (the command line) win, unless they are None.

    Raises ConfigError with one line a mistake: the variable, what is wrong with it, and the fix.
    """
    _refuse_unknown(os.environ)
    try:
        return Settings(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise ConfigError("\n".join(_line(dict(detail)) for detail in error.errors())) from None


def environment() -> dict[str, str]:
    """A copy of the environment, for what looks up secret references (`env:NAME`) and for child processes."""
    return dict(os.environ)


def adopt(environ: Mapping[str, str]) -> None:
    """Read settings and secrets from another environment from now on, that of the gateway which a command is about."""
    os.environ.clear()
    os.environ.update(environ)


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    names = [variable(name) for name in Settings.model_fields]
    lines = []
    for name in sorted(name for name in environ if name.startswith(PREFIX) and name not in names):
        near = difflib.get_close_matches(name, names, n=1)
        fix = f"did you mean {near[0]}?" if near else "unset it; docs/configuration.md lists every setting"
        lines.append(f"{name}: no such setting; {RENAMED.get(name, fix)}")
    if lines:
        raise ConfigError("\n".join(lines))


def _line(detail: Mapping[str, Any]) -> str:
    message = str(detail["msg"]).removeprefix("Value error, ")
    if not detail["loc"]:
        return message
    name = str(detail["loc"][0]).lower().removeprefix(PREFIX.lower())
    field = Settings.model_fields.get(name)
    if field is None:
        return f"{name}: no such setting; docs/configuration.md lists every setting"
    value_shown = "" if name in MAY_HOLD_SECRETS else f"={detail['input']}"
    return f"{variable(name)}{value_shown}: {message} ({field.description}; default {field.default})"


def data_dir() -> Path:
    """The data directory that the environment names, else the default one; for programs that read no other setting."""
    return Path(environment().get(variable("data_dir"), Settings.model_fields["data_dir"].default))
