"""What a worker is sent, how many choices a call asks for, how large its prompt is, and the worst case it may cost.

A prompt of up to UNCOUNTED_BYTES_MAX bytes counts as its bytes, because no byte-level tokenizer makes more tokens than
that. A longer one, and one whose bytes leave too little for the reply, is counted by a tokenizer. Where the worker has
none, bytes stay the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.core.anthropic.effort import budget_of, fit_budget
from gateway.core.anthropic.native import PARAM
from gateway.core.anthropic.worker import Words, natives_of, worded
from gateway.core.loop.caps import Draw
from gateway.core.money.amounts import (
    AUDIO_BYTES_PER_TOKEN,
    NANO_MAX,
    TOKENS_PER_MESSAGE,
    input_tokens_bound,
    output_tokens_that_fit,
    worst_case_nano,
)
from gateway.core.money.templates import Templates, shape_of_prompt
from gateway.core.money.units import units_nano
from gateway.core.openai.chat import FIELDS, HINTS, Endpoint, HostedTools, choices_in
from gateway.core.openai.marks import HOSTED, NATIVE
from gateway.core.openai.options import custom_as_functions
from gateway.core.openai.parts import caches_an_hour, media_kinds, with_results_as_text
from gateway.core.openai.tasks.fields import FIELDS as TASK_FIELDS
from gateway.core.openai.tasks.fields import Sound
from gateway.core.openai.tasks.replies import most_units
from gateway.core.openai.texts import TOKENS_DEFAULT
from gateway.core.openai.vendor import for_worker
from gateway.core.openai.vendors.hosts import KnownVendor, vendor_of
from gateway.core.openai.vendors.names import told_names, with_told_names
from gateway.core.openai.vendors.overflow import context_exceeded
from gateway.core.openai.vendors.roles import for_template
from gateway.core.openai.vendors.schemas import refers, without_references
from gateway.core.openai.vendors.usage import BYTES_PER_TOKEN, TOKENS_PER_TURN, declared_text, request_text
from gateway.core.pool.models import (
    adapt,
    follows_references,
    hosted_types,
    model_of,
    takes_media_in_results,
    vendor_params,
)
from gateway.core.pool.workers import Price, WorkerSpec
from gateway.errors import CapReached, Unpriced, UpstreamRefused
from gateway.service.loop.state import Loop, StepRun
from gateway.service.ports.request import TokenCounter
from gateway.threads import LARGE_BYTES, beside

DECLARATIONS = ("tools", "functions", "response_format")
CUTS_OF_CONTEXT = 8  # prompts are cut in such parts, so that the next turns are cut at the same places
OUTPUT_TOKENS_MIN = 16  # a call that could say less than this is not worth making
UNCOUNTED_BYTES_MAX = 4096  # counting a longer prompt costs less than the money that its bytes would hold
TOKENS_PER_DECLARATION = 512  # what a vendor tells its model about tools, once: more than any vendor publishes


def price_of(spec: WorkerSpec) -> Price:
    """A worker's price. Raises Unpriced: what cannot be priced is refused, never free."""
    if spec.price is None:
        raise Unpriced(f"worker {spec.name} has no price; give it `price` in the pool file")
    return spec.price


def wanted_tokens(loop: Loop, run: StepRun, answers: bool) -> int:
    """The output that is wanted of a step: the client's own bound where its reply may be the answer, as a voter's may,
    else the worker's."""
    if loop.endpoint == "completions":
        return int(loop.params.get("max_tokens", TOKENS_DEFAULT))
    may_answer = answers or (run.step.task is None and run.step.verify is None)
    bounds = [loop.params.get(name) for name in ("max_completion_tokens", "max_tokens")] if may_answer else []
    return next((bound for bound in bounds if bound is not None), run.spec.output_tokens_max)


def step_body(loop: Loop, run: StepRun, messages: Sequence[Mapping[str, Any]], answers: bool) -> dict[str, Any]:
    """The body for a step's worker. Only the step that `answers` gets the client's own parameters, as far as the
    worker's model takes them; the record notes the others."""
    spec = run.spec
    if loop.endpoint not in ("chat", "completions"):
        return dict(loop.params)
    if loop.endpoint == "completions":
        return {**loop.params, "max_tokens": min(loop.params.get("max_tokens", TOKENS_DEFAULT), spec.output_tokens_max)}
    given = loop.params if answers else {}
    given = {name: value for name, value in given.items() if name not in HINTS or name not in spec.cannot}
    words = Words(spec.claude, spec.kind == "litellm", vendor_params(spec))
    given, own = natives_of(words, given)
    others = given.keys() - (FIELDS.keys() - {"service_tier"}) - words.takes
    params, changes = adapt(spec, {name: value for name, value in given.items() if name not in others})
    hosted, lacking = hosted_for(spec, loop.hosted) if answers else ({}, [])
    messages = for_worker(messages, spec.origin, items_taken(spec))
    messages = messages if takes_media_in_results(spec) else with_results_as_text(messages)
    bounds = [params.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
    wants_newer = bounds[0] or "max_completion_tokens" in spec.params or model_of(spec).completion_tokens
    newer = wants_newer and "max_completion_tokens" not in spec.cannot
    name = "max_completion_tokens" if newer or "max_tokens" in spec.cannot else "max_tokens"
    bound = min(wanted_tokens(loop, run, answers), spec.output_tokens_max)
    params, worded_messages, reworded = worded(words, params, own, messages, bound, named=loop.fallback is None)
    run.left_out = [*changes, *sorted(others), *lacking, *reworded]
    if not spec.speaks_messages:  # that wire has no templates
        worded_messages = for_template(worded_messages, vendor_for(spec).template(spec.cannot, spec.takes))
    body = {**params, "messages": worded_messages, name: bound}
    body = body if model_of(spec).custom_tools else custom_as_functions(body)
    run.names = told_names(body, vendor_for(spec).limits.name_chars)
    body = with_told_names(body, run.names) if run.names else body
    if "tools" in hosted:
        hosted["tools"] = [*body.get("tools", ()), *hosted["tools"]]
    return {**body, **hosted} if hosted else body


def items_taken(spec: WorkerSpec) -> tuple[str, ...] | None:
    """The types of items of the Responses API, beside messages and calls, that a worker takes; None where it is not
    asked by that API."""
    if spec.api != "responses":
        return None
    return (*NATIVE, *HOSTED) if spec.hosted else NATIVE


def hosted_for(spec: WorkerSpec, hosted: HostedTools) -> tuple[dict[str, Any], list[str]]:
    """`HostedTools.for_worker`, of this worker."""
    return hosted.for_worker(hosted_types(spec, [tool["type"] for tool in hosted.tools]), items_taken(spec))


def vendor_for(spec: WorkerSpec) -> KnownVendor:
    """What is known of a worker's vendor."""
    return vendor_of(spec.kind, spec.host, spec.model or "")


def fan_out(body: dict[str, Any], spec: WorkerSpec) -> list[dict[str, Any]]:
    """The bodies that make up `n` choices: one body, or n bodies of one choice where the worker takes no `n`. Each of
    the n adds its number to the seed, because the same seed would make the choices equal."""
    choices = body.get("n", 1)
    if choices == 1 or "n" not in spec.cannot or "messages" not in body:
        return [body]
    return single_bodies(body, range(choices))


def single_bodies(body: Mapping[str, Any], numbers: Iterable[int]) -> list[dict[str, Any]]:
    """The bodies that ask for the choices of these numbers, one each."""
    single = {name: value for name, value in body.items() if name != "n"}
    seed = single.get("seed")
    return [{**single, **({} if seed is None else {"seed": seed + number})} for number in numbers]


def missing_choices(body: Mapping[str, Any], reply: Mapping[str, Any]) -> range:
    """The numbers of the choices that a chat reply lacks, as some workers answer `n` with one choice."""
    return range(len(reply.get("choices") or ()), body.get("n", 1) if "messages" in body else 0)


@dataclass(frozen=True, slots=True)
class WorstCase:
    """What one attempt draws, the most tokens its prompt can have, and what lowered the output that it asks for:
    `cost` or `tokens` (the caps), `context` (the worker's), or None."""

    draw: Draw
    prompt_tokens_max: int
    lowered_by: str | None = None


def worst_case(
    loop: Loop, spec: WorkerSpec, body: dict[str, Any], share: int, size: PromptSize, *, held: bool = False
) -> WorstCase:
    """The worst case of one attempt. Lowers the output that `body` asks for to one part in `share` of the money and
    tokens left, and to what the context has room for. `held`: the money is what is held, and not what the hold may grow
    to. Raises CapReached where too little is left, UpstreamRefused (`context_length_exceeded`) where the prompt alone
    fills the context."""
    if loop.endpoint in TASK_FIELDS:
        draw = task_worst(spec, loop.endpoint, body, size)
        return WorstCase(draw, size.tokens_max)
    price, choices = price_of(spec), choices_in(body)
    media, hour = carries_media(body), hours_count(spec, body)
    size = without_spare(loop.tree.templates, spec, body, size)
    if loop.endpoint == "embeddings":  # no output
        tokens = size.tokens if size.context_tokens is not None else size.tokens_max // BYTES_PER_TOKEN
        return WorstCase(Draw(worst_case_nano(price, size.tokens_max, 0, media=media), tokens), size.tokens_max)
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    meter = loop.tree.meter
    left_nano = (meter.left_nano if held else meter.reach_nano) // share
    rooms = {
        "cost": output_tokens_that_fit(price, size.tokens_max, left_nano, media=media, hour=hour) // choices,
        "tokens": (meter.left_tokens // share - size.tokens) // choices,
        "context": context_room(spec, size) if loop.endpoint == "chat" else body[name],
    }
    by = min(rooms, key=rooms.__getitem__)
    if rooms[by] < min(OUTPUT_TOKENS_MIN, body[name]):
        if by == "context":
            raise UpstreamRefused(dispatched=False, **context_exceeded(spec.context_tokens, size.tokens, spec.name))
        raise CapReached(by, f"what is left of the request's {by} cap is too little for worker {spec.name}")
    lowered = rooms[by] < body[name]
    body[name] = min(body[name], rooms[by])
    fit_budget(body, body[name])
    bound = output_bound(body)
    draw = Draw(worst_case_nano(price, size.tokens_max, bound, media=media, hour=hour), size.tokens + bound)
    return WorstCase(draw, size.tokens_max, by if lowered else None)


def task_worst(spec: WorkerSpec, endpoint: Endpoint, body: Mapping[str, Any], size: PromptSize) -> Draw:
    """The worst case of a call that is no conversation: its units, and tokens where the worker has prices for them."""
    price, units, sound = price_of(spec), most_units(endpoint, body), body.get("file")
    tokens = size.tokens_max + (len(sound.data) // AUDIO_BYTES_PER_TOKEN if isinstance(sound, Sound) else 0)
    reply = spec.output_tokens_max * units.get("images", 1)
    nano = worst_case_nano(price, tokens, reply, media=True) + units_nano(price, units)
    return Draw(nano, size.tokens)


def hours_count(spec: WorkerSpec, body: Mapping[str, Any]) -> bool:
    """Whether the price of a cache for an hour may be asked: a part of the body is to be cached so, or the worker does
    it by itself, since it has that price and is sent no marks."""
    price = price_of(spec)
    unasked = spec.kind != "litellm" and price.cache_write_1h_usd_per_mtok is not None
    return unasked or (price.has_hours and caches_an_hour({**spec.params, **body}))


def lowered_output(loop: Loop, run: StepRun, body: Mapping[str, Any], by: str | None) -> dict[str, Any] | None:
    """How much less a call may say, or think, than was asked; None for no less."""
    bound = body.get("max_completion_tokens") or body.get("max_tokens")
    asked = budget_of(loop.params.get(PARAM) or loop.params)
    budget = budget_of(body)
    thinks_less = asked is not None and budget is not None and budget < asked
    if not bound or (bound >= run.wanted_tokens and not thinks_less):
        return None
    less = {"budget_tokens": budget} if thinks_less else {}
    return {"asked": run.wanted_tokens, "max_tokens": bound, "by": by or "worker", **less}


def carries_media(body: Mapping[str, Any]) -> bool:
    """Whether sound or images are in a body, or wanted of it."""
    return "modalities" in body or "audio" in body or bool(media_kinds(body.get("messages") or ()))


def without_spare(templates: Templates, spec: WorkerSpec, body: Mapping[str, Any], size: PromptSize) -> PromptSize:
    """The size of a prompt that was not counted, without what its worker's template is known not to add."""
    if size.context_tokens is not None:
        return size
    spare = templates.spare(spec.name, shape_of_prompt(body.get("messages") or (), body))
    return replace(size, tokens_max=size.tokens_max - spare, tokens=size.tokens - spare) if spare else size


def context_room(spec: WorkerSpec, size: PromptSize) -> int:
    """The tokens that a worker's context has left for the reply. Without limit where the prompt was not counted, and
    where the pool file does not say how long the context is."""
    if size.context_tokens is None or "context_tokens" not in spec.model_fields_set:
        return NANO_MAX
    return spec.context_tokens - size.context_tokens


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Tokens of one prompt. `tokens_max`: an upper bound, for money. `tokens`: the count, for caps. `context_tokens`:
    the least that it takes of a worker's context; None where nothing was counted."""

    tokens_max: int
    tokens: int
    context_tokens: int | None = None
    worst: WorstCase | None = field(default=None, compare=False)  # of a call for which it was computed with the size


def size_in_bytes(spec: WorkerSpec, body: Mapping[str, Any]) -> PromptSize:
    """The size of a body's prompt where a token counts as a byte."""
    bound = input_tokens_bound(body.get("messages", ()), texts_beside(body) + texts_beside(spec.params))
    bound += declaration_tokens(body) or declaration_tokens(spec.params)
    return PromptSize(bound, bound)


def texts_beside(params: Mapping[str, Any]) -> str:
    """What a prompt may have of a request beside its messages: no template writes numbers."""
    told = {name: value for name, value in params.items() if name != "messages" and not isinstance(value, int | float)}
    return str(told) if told else ""


def declaration_tokens(body: Mapping[str, Any]) -> int:
    """The most tokens of what a vendor tells its model, and LiteLLM the vendor, about tools and the reply's form."""
    return TOKENS_PER_DECLARATION if any(body.get(name) for name in DECLARATIONS) else 0


async def sendable(spec: WorkerSpec, body: dict[str, Any]) -> dict[str, Any]:
    """The body as it will leave, so that what is measured is what is sent. Raises BadRequest where LiteLLM's form of a
    schema is too large."""
    follows = follows_references(spec)
    if not follows or not refers(follows, body):
        return body
    return await beside(LARGE_BYTES, without_references, follows, body, spec.name)


async def counted_size(tokens: TokenCounter, spec: WorkerSpec, body: Mapping[str, Any]) -> PromptSize:
    """The size of a body's prompt by the worker's tokenizer, never above its size in bytes."""
    in_bytes = size_in_bytes(spec, body)
    sent = {**spec.params, **body}
    text, declared = request_text(sent), declared_text(sent)
    count = await tokens.measure(spec, text.texts)
    again = await tokens.measure(spec, declared.texts)
    if count is None or again is None:
        return in_bytes
    template = len(sent.get("messages") or ()) * (TOKENS_PER_MESSAGE - TOKENS_PER_TURN)
    template += declaration_tokens(sent)
    most = min(in_bytes.tokens_max, count.tokens_max + again.tokens_max + text.tokens + template)
    return PromptSize(most, min(most, count.tokens + text.tokens), count.tokens + text.tokens - text.media_tokens)


async def tokens_over(tokens: TokenCounter, spec: WorkerSpec, messages: Sequence[Mapping[str, Any]]) -> int:
    """The tokens by which a prompt that leaves no reply must be shorter to leave a quarter of the context, in eighths
    of the context; 0 where it leaves a reply, and where nobody knows."""
    body, most = {"messages": messages}, spec.context_tokens
    if (
        "context_tokens" not in spec.model_fields_set
        or size_in_bytes(spec, body).tokens_max + OUTPUT_TOKENS_MIN <= most
    ):
        return 0
    size = await counted_size(tokens, spec, body)
    if context_room(spec, size) >= OUTPUT_TOKENS_MIN:
        return 0
    eighth = max(1, most // CUTS_OF_CONTEXT)
    return -((2 * eighth - context_room(spec, size)) // -eighth) * eighth


async def prompt_size(
    tokens: TokenCounter, loop: Loop, spec: WorkerSpec, body: Mapping[str, Any], share: int, *, held: bool = False
) -> PromptSize:
    """The size of a call's prompt. Counted where it is long, or where its bytes would lower the reply."""
    size = size_in_bytes(spec, body)
    worst = None if size.tokens_max > UNCOUNTED_BYTES_MAX else _fitting(loop, spec, dict(body), share, size, held)
    if worst is not None:
        return PromptSize(size.tokens_max, size.tokens, worst=worst)
    return await counted_size(tokens, spec, body)


def _fitting(
    loop: Loop, spec: WorkerSpec, body: dict[str, Any], share: int, size: PromptSize, held: bool
) -> WorstCase | None:
    """The worst case beside a prompt of this size; None where the whole output does not fit."""
    if size.tokens_max + output_bound(body) > spec.context_tokens:
        return None
    try:
        worst = worst_case(loop, spec, body, share, size, held=held)
    except CapReached:
        return None
    return worst if worst.lowered_by is None else None


def output_bound(body: Mapping[str, Any]) -> int:
    """The most tokens that all choices can have; 0 for embeddings."""
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or 0) * choices_in(body)
