"""What is known of models by name: which properties of a request they refuse, and what stands in for them. Pure.

Only preferences are adapted: a reply without them is still a reply. What a client needs of a reply (tools, a format,
stop words, log-probabilities) keeps to the pool file's `cannot` and to the vendor's limits (core/pool/vendors.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gateway.core.pool.workers import JUDGE_URL, PYTHON_URL, WorkerSpec

CHECK_TAG = "check"  # of workers that plans may ask about replies

SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
PENALTIES = ("presence_penalty", "frequency_penalty")
OPEN_SERVERS = ("top_k", "min_p", "repetition_penalty", "chat_template_kwargs", "thinking")  # vLLM, SGLang and the like
OPENROUTER = ("top_k", "min_p", "top_a", "repetition_penalty", "provider", "reasoning")
STRICT_HOSTS = (  # that refuse what OpenAI does not define
    *("api.openai.com", "openai.azure.com", "api.groq.com", "api.mistral.ai", "api.x.ai"),
    *("generativelanguage.googleapis.com", "api.anthropic.com"),
)
PROVIDERS = {  # of LiteLLM
    "anthropic": ("top_k", "thinking", "output_config", "cache_control", "context_management"),
    "bedrock": ("top_k", "thinking"),
    "vertex_ai": ("top_k", "thinking"),
    "gemini": ("top_k", "thinking"),
    "deepseek": ("thinking",),
    "openrouter": OPENROUTER,
    "hosted_vllm": OPEN_SERVERS,
}
_REFERENCES_EVERYWHERE, _REFERENCES_OF_CLAUDE = frozenset(("tools", "formats")), frozenset(("old_tools", "formats"))
# Whose schemas LiteLLM sends with copies in place of `$ref`, and which of them (core/openai/vendors/schemas.py).
REFERENCES = {
    **dict.fromkeys(("gemini", "vertex_ai", "vertex_ai_beta", "bedrock", "oci"), _REFERENCES_EVERYWHERE),
    **dict.fromkeys(("azure_ai", "databricks", "snowflake", "fireworks_ai"), _REFERENCES_OF_CLAUDE),
}
_REFERENCES_IN_FORMATS = re.compile(r"gemini-([2-9]|\d\d)")  # models that take them in the schema of a reply
CLIENT_RUN = ("bash", "text_editor", "computer", "memory", "tool_search_tool_regex", "tool_search_tool_bm25")
_DATED = re.compile(r"_20\d{6}$")
MEDIA_IN_RESULTS = ("anthropic", "bedrock", "vertex_ai", "gemini")  # providers of LiteLLM that take them
PREFERENCES = (*SAMPLING, "reasoning_effort", "verbosity", "parallel_tool_calls")


@dataclass(frozen=True, slots=True)
class Model:
    """A family of models. `refuses`: preferences that it never takes. `refuses_thinking`: those that it refuses while
    it reasons, which it does at each effort but `none`; `thinks`: whether it reasons where the request does not say.
    `efforts`: for each effort that it does not know, the nearest one that it does."""

    pattern: str
    completion_tokens: bool = False  # knows `max_completion_tokens` and refuses `max_tokens`
    refuses: tuple[str, ...] = ()
    refuses_thinking: tuple[str, ...] = ()
    thinks: bool = False
    custom_tools: bool = False  # knows tools of type custom; others get a function of one text
    efforts: Mapping[str, str] = field(default_factory=dict)

    def matches(self, name: str) -> bool:
        """Whether a model of that name, without its path and in lower case, is of the family."""
        return re.match(self.pattern, name) is not None


_LOW = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
MODELS = (  # the first that matches counts
    Model(r"o[1-9](-|$)", True, (*SAMPLING, "verbosity", "parallel_tool_calls"), efforts=_LOW),
    Model(r"gpt-5[\d.]*-chat|gpt-4|gpt-3\.5|chatgpt-4o", refuses=("reasoning_effort", "verbosity")),
    Model(r"gpt-5\.\d-(codex|pro)", True, SAMPLING, efforts={"none": "low", "minimal": "low"}, custom_tools=True),
    Model(
        r"gpt-5(-|$)", True, SAMPLING, efforts={"none": "minimal", "xhigh": "high", "max": "high"}, custom_tools=True
    ),
    Model(
        r"gpt-5\.1(-|$)",
        True,
        refuses_thinking=SAMPLING,
        efforts={"minimal": "low", "xhigh": "high", "max": "high"},
        custom_tools=True,
    ),
    Model(
        r"gpt-5\.[2-4](-|$)",
        True,
        refuses_thinking=SAMPLING,
        efforts={"minimal": "low", "max": "xhigh"},
        custom_tools=True,
    ),
    Model(
        r"gpt-5\.",
        True,
        refuses_thinking=SAMPLING,
        thinks=True,
        efforts={"minimal": "low", "max": "xhigh"},
        custom_tools=True,
    ),
    Model(r"gpt-[6-9]", True, refuses_thinking=SAMPLING, thinks=True, efforts={"minimal": "low"}, custom_tools=True),
    Model(r"grok-4", refuses=(*PENALTIES, "reasoning_effort")),
    Model(r"grok-(3-mini|code)", refuses=PENALTIES),
    Model(r"kimi-k(2\.[5-9]|[3-9])", refuses=SAMPLING),
    Model(
        r".*claude.*(opus[-_.]4[-_.][78]|(opus|sonnet|haiku)[-_.][5-9]|fable|mythos)",
        refuses=(*SAMPLING, "verbosity"),
    ),
    Model(r"gemini-3\.([6-9]|5-flash-lite)", refuses=("temperature", "top_p")),
    Model(r".*claude", refuses=(*PENALTIES, "verbosity"), refuses_thinking=("temperature", "top_p")),
)
_UNKNOWN = Model("")
_REGION = re.compile(r"^([a-z-]+\.)+")  # before the name with some vendors: `us.openai.gpt-5.5`


def model_of(spec: WorkerSpec) -> Model:
    """What is known of a worker's model."""
    return _model_of_name(spec.model or "")


@lru_cache(maxsize=1024)
def _model_of_name(model: str) -> Model:
    name = _REGION.sub("", model.rpartition("/")[2].lower())
    return next((known for known in MODELS if known.matches(name)), _UNKNOWN)


def hosted_types(spec: WorkerSpec, types: Iterable[str]) -> list[str]:
    """Those of these types of tools that a worker has beside functions: what its entry says that its server runs, with
    or without the date that Anthropic puts behind it, and of Anthropic's models those that clients run."""
    taken = [kind for kind in types if kind in spec.hosted or _DATED.sub("", kind) in spec.hosted]
    clients = [kind for kind in types if _DATED.sub("", kind) in CLIENT_RUN] if spec.speaks_messages else []
    return [*taken, *clients]


def takes_media_in_results(spec: WorkerSpec) -> bool:
    """Whether a worker takes images and files in the result of a tool; OpenAI's chat completions do not, and its
    Responses API does."""
    if spec.api == "responses":
        return True
    return spec.kind == "litellm" and (spec.model or "").partition("/")[0] in MEDIA_IN_RESULTS


def follows_references(spec: WorkerSpec) -> frozenset[str]:
    """In which schemas of a request LiteLLM follows `$ref` for a worker; none of a worker of another kind."""
    provider, _, model = (spec.model or "").partition("/")
    follows = REFERENCES.get(provider, frozenset()) if spec.kind == "litellm" else frozenset()
    return follows - {"formats"} if _REFERENCES_IN_FORMATS.search(model) else follows


def vendor_params(spec: WorkerSpec) -> frozenset[str]:
    """The parameters beside OpenAI's that a worker takes from clients: those of its kind, and `takes` of its entry."""
    names: tuple[str, ...] = ()
    if spec.kind == "litellm":
        names = PROVIDERS.get((spec.model or "").partition("/")[0], ())
    elif spec.kind == "openai" and spec.host.endswith("openrouter.ai"):
        names = OPENROUTER
    elif spec.kind == "openai" and not spec.host.endswith(STRICT_HOSTS):
        names = OPEN_SERVERS
    return frozenset((*names, *spec.takes))


def adapt(spec: WorkerSpec, params: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the parameters as the worker's model takes them, the changes: `name` for one that was left out, `name=value` for
    one that was replaced)."""
    model = model_of(spec)
    adapted = dict(params)
    changes: list[str] = []
    effort = params.get("reasoning_effort")
    if isinstance(effort, str) and effort in model.efforts:
        adapted["reasoning_effort"] = model.efforts[effort]
        changes.append(f"reasoning_effort={model.efforts[effort]}")
    thinking = params.get("thinking")
    thinks = (model.thinks if effort is None else effort != "none") or (
        isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "adaptive")
    )
    refusals = {*model.refuses, *(model.refuses_thinking if thinks else ())}
    for name in PREFERENCES:
        if name in adapted and (name in spec.cannot or (name in refusals and not _is_default(name, adapted[name]))):
            del adapted[name]
            changes.append(name)
    return adapted, changes


def _is_default(name: str, value: Any) -> bool:
    """Whether a model that refuses a sampling setting takes it all the same, because it changes nothing."""
    return (name in PENALTIES and value == 0) or (name == "temperature" and value == 1)


def is_checker(worker: WorkerSpec) -> bool:
    """Whether plans may have replies checked by this worker: `builtin:python`, `builtin:judge`, and what the pool file
    tags `check`."""
    return worker.url in (PYTHON_URL, JUDGE_URL) or CHECK_TAG in worker.tags
