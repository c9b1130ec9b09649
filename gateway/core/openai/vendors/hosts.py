"""What is known of vendors by host, and of open models by family: the turns that they refuse, and limits. Pure.

A chat template of which nothing is known is taken to be strict: what it refuses in one place is understood in another
one. The pool file's `cannot` adds to what is refused here, and its `takes` removes from it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gateway.core.openai.vendors.roles import ANY, Template

_UNKNOWN = ("developer", "late_system")
_ALTERNATING = (*_UNKNOWN, "repeated_roles")
_CLAUDE = ("developer", "empty_content")
_OPENAI = ("api.openai.com", "openai.azure.com", "services.ai.azure.com", "openai", "azure")
_LENIENT = (
    *("openrouter.ai", "api.deepseek.com", "api.x.ai", "api.cerebras.ai", "api.together.xyz", "api.z.ai"),
    *("generativelanguage.googleapis.com", "api.anthropic.com", "openrouter", "deepseek", "xai", "cerebras"),
    "together_ai",
)
_CLAUDES = ("anthropic", "bedrock", "vertex_ai", "gemini")  # LiteLLM places system messages for them
_OWN = (*_OPENAI, *_CLAUDES, "api.mistral.ai", "mistral")  # each model there has its vendor's own template
# The last part of a host's name, or LiteLLM's name of a provider -> what it refuses of turns.
_TURNS_OF: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_OPENAI, ()),
    **dict.fromkeys(_LENIENT, ("developer",)),
    **dict.fromkeys(("api.groq.com", "api.mistral.ai", "groq", "mistral"), ("developer", "name")),
    **dict.fromkeys(("api.perplexity.ai", "perplexity"), _ALTERNATING),
    **dict.fromkeys(_CLAUDES, _CLAUDE),
}
# Families of models, by what their chat templates refuse, on whoever's servers but their vendor's own.
_FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"gpt-oss|qwen|qwq|minimax", _UNKNOWN),
    (r"gemma-?2|gemma-[27]b", (*_ALTERNATING, "system")),
    (r"gemma|mistral|mixtral|ministral|magistral|devstral|codestral|pixtral|llama-?2|vicuna", _ALTERNATING),
    (r"gpt|chatgpt|o[1-9](-|$)", ()),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a vendor takes: characters of a tool's name, tools, stop sequences. None: no limit is known."""

    name_chars: int = 64
    tools: int | None = None
    stop: int | None = None

    def over(self, params: Mapping[str, Any]) -> dict[str, int]:
        """The parameters that hold more than the vendor takes, and how many it does."""
        held = {"tools": self.tools, "functions": self.tools, "stop": self.stop}
        return {
            name: most
            for name, most in held.items()
            if most is not None and isinstance(params.get(name), list) and len(params[name]) > most
        }


_LIMITS_OF: Mapping[str, Limits] = {
    **dict.fromkeys((*_OPENAI, "api.groq.com", "groq"), Limits(tools=128, stop=4)),
    **dict.fromkeys(("api.deepseek.com", "deepseek"), Limits(tools=128, stop=16)),
    **dict.fromkeys(("gemini", "vertex_ai", "generativelanguage.googleapis.com"), Limits(tools=512, stop=5)),
    "anthropic": Limits(name_chars=128),
}


@dataclass(frozen=True, slots=True)
class KnownVendor:
    """Whom a worker asks, as far as the tables above know. `name`: LiteLLM's name of a provider, or the end of the
    host's; None: it is not known. `model`: without its path, in lower case."""

    name: str | None
    model: str

    @property
    def limits(self) -> Limits:
        """Its limits."""
        return _LIMITS_OF.get(self.name or "", Limits())

    def template(self, cannot: Collection[str], takes: Collection[str]) -> Template:
        """What it takes of a conversation's turns. `cannot` and `takes`: of the worker's entry in the pool file."""
        return _template(_refused(self.name, self.model).union(cannot).difference(takes))


@lru_cache(maxsize=1024)
def vendor_of(kind: str, host: str, model: str) -> KnownVendor:
    """The vendor of a worker of that kind, behind that host, with that model."""
    provider, _, _ = model.partition("/")
    if kind == "litellm":
        name = provider if provider in _TURNS_OF else None
    else:
        name = next((end for end in _TURNS_OF if "." in end and host.endswith(end)), None)
    return KnownVendor(name, model.rpartition("/")[2].lower())


@lru_cache(maxsize=1024)
def _template(refused: frozenset[str]) -> Template:
    return Template(**{name: name not in refused for name in Template.__slots__}) if refused else ANY


@lru_cache(maxsize=1024)
def _refused(vendor: str | None, model: str) -> frozenset[str]:
    of_host = None if vendor is None else _TURNS_OF[vendor]
    family = next((refused for pattern, refused in _FAMILIES if re.match(pattern, model)), None)
    if of_host is not None and (family is None or vendor in _OWN):
        return frozenset(of_host)
    refused = frozenset((*(of_host or ()), *(_UNKNOWN if family is None else family)))
    return refused if family or family is None else refused - {"developer"}
