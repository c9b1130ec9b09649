"""Policy directories as contestants: what each is, how it is prompted, and the planner that an engine makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.adapters.engines.sealed import SealedPolicy, read_object
from gateway.core.loop.prompt import Profile
from gateway.core.policies.manifest import CONFIG_FILE, Manifest, check_prompt
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.ports.request import Conductor
from policy.environments.executor import FREE, UNHURRIED_S
from policy.serve.lora import base_of
from policy.serve.manifest import read_complete
from policy.serve.shape import Shape, tokens_shape
from policy.serve.tokens import Tokens


@dataclass(frozen=True, slots=True)
class ConductorDirectory:
    """A policy as a contestant; an engine loads its weights. `base`: of an adapter, the policy that it changes."""

    policy: SealedPolicy
    profile: Profile
    base: SealedPolicy | None = None

    @property
    def manifest(self) -> Manifest:
        """Return the policy's own manifest, also where it is an adapter."""
        return self.policy.manifest

    @property
    def home(self) -> Path:
        """Where the config, the tokenizer and the full weights lie."""
        return (self.base or self.policy).files

    @property
    def sha256(self) -> Mapping[str, str]:
        """Digest of every file that decides its plans, those of an adapter's base among them."""
        return {**(self.base.manifest.sha256 if self.base else {}), **self.manifest.sha256}

    def shape(self) -> Shape:
        """The sizes that any decoder has: vocabulary, context and ends. Raises VersionRefused."""
        return tokens_shape(read_object(self.home / CONFIG_FILE))

    def tokens(self) -> Tokens:
        """Its tokenizer, chat template and grammars. Raises VersionRefused."""
        return Tokens(self.home, self.shape())

    def planner(self, engine: Conductor, quality: int | None = None) -> ConductorPlanner:
        """A planner at temperature 0 over its loaded weights. `quality`: the dial; None: the manifest's own."""
        quality = self.manifest.quality if quality is None else quality
        trained = self.manifest.kind != "base"
        asking = ConductorSettings(self.profile, FREE, UNHURRIED_S, quality=quality, trained=trained)
        return ConductorPlanner(engine, asking)


def read_conductors(paths: Iterable[Path], places: Sequence[Path] = ()) -> dict[Path, ConductorDirectory]:
    """The policy directories by path, each read once; any of them may be the base of another. `places`: folders with
    other bases. Raises VersionRefused."""
    policies = {path: read_complete(path) for path in dict.fromkeys(paths)}
    policies_known = list(policies.values())
    conductors: dict[Path, ConductorDirectory] = {}
    for path, policy in policies.items():
        profile, base = check_prompt(policy.manifest, path), None
        if policy.manifest.kind == "adapter":
            base = base_of(policy, policies_known, places)
            policies_known.append(base)
        conductors[path] = ConductorDirectory(policy, profile, base)
    return conductors
