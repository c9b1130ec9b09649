"""What a worker is sent, how many choices a call asks for, how large its prompt is, and the worst case it may cost.

A prompt of up to UNCOUNTED_BYTES_MAX bytes counts as its bytes, because no byte-level tokenizer makes more tokens than
that. A longer one, and one whose bytes leave too little for the reply, is counted by a tokenizer. Where the worker has
none, bytes stay the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core.anthropic.effort import budget_of, fit_budget
from gateway.core.anthropic.native import PARAM
from gateway.core.anthropic.worker import natives_of, worded
from gateway.core.loop.caps import Draw
from gateway.core.money.amounts import (
    AUDIO_BYTES_PER_TOKEN,
    NANO_MAX,
    TOKENS_PER_MESSAGE,
    input_tokens_bound,
    output_tokens_that_fit,
    worst_case_nano,
)
from gateway.core.money.units import units_nano
from gateway.core.openai.chat import FIELDS, HINTS, Endpoint, choices_in
from gateway.core.openai.options import custom_as_functions
from gateway.core.openai.parts import caches_an_hour, media_kinds, with_results_as_text
from gateway.core.openai.tasks.fields import FIELDS as TASK_FIELDS
from gateway.core.openai.tasks.fields import Sound
from gateway.core.openai.tasks.replies import most_units
from gateway.core.openai.texts import TOKENS_DEFAULT
from gateway.core.openai.vendor import for_worker
from gateway.core.openai.vendors.hosts import limits_of, template_of
from gateway.core.openai.vendors.names import told_names, with_told_names
from gateway.core.openai.vendors.overflow import context_exceeded
from gateway.core.openai.vendors.roles import for_template
from gateway.core.openai.vendors.usage import BYTES_PER_TOKEN, TOKENS_PER_TURN, declared_text, request_text
from gateway.core.pool.models import adapt, hosted_types, model_of, takes_media_in_results, vendor_params
from gateway.core.pool.workers import Price, WorkerSpec
from gateway.errors import CapReached, Unpriced, UpstreamRefused
from gateway.service.loop.state import Loop, StepRun
from gateway.service.ports.request import TokenCounter

CUTS_OF_CONTEXT = 8  # prompts are cut in such parts, so that the next turns are cut at the same places
OUTPUT_TOKENS_MIN = 16  # a call that could say less than this is not worth making
UNCOUNTED_BYTES_MAX = 4096  # counting a longer prompt costs less than the money that its bytes would hold
TOKENS_PER_DECLARATION = 512  # what a vendor tells its model about tools, once: more than any vendor publishes


def price_of(spec: WorkerSpec) -> Price:
    """A worker's price. Raises Unpriced: what cannot be priced is refused, never free."""
    if spec.price is None:
        raise Unpriced(f"worker {spec.name} has no price; give it `price` in the pool file")
    return spec.price


def wanted_tokens(loop: Loop, spec: WorkerSpec, answers: bool) -> int:
    """The output that is wanted of a step: the client's own bound of the step that answers, else the worker's."""
    if loop.endpoint == "completions":
        return int(loop.params.get("max_tokens", TOKENS_DEFAULT))
    bounds = [loop.params.get(name) for name in ("max_completion_tokens", "max_tokens")] if answers else []
    return next((bound for bound in bounds if bound is not None), spec.output_tokens_max)


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
    given, own = natives_of(spec, given)
    others = given.keys() - (FIELDS.keys() - {"service_tier"}) - vendor_params(spec)
    params, changes = adapt(spec, {name: value for name, value in given.items() if name not in others})
    types = [tool["type"] for tool in loop.hosted.tools] if answers else []
    hosted, lacking = loop.hosted.for_worker(hosted_types(spec, types)) if types else ({}, [])
    messages = for_worker(messages, spec.origin)
    messages = messages if takes_media_in_results(spec) else with_results_as_text(messages)
    bounds = [params.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
    wanted = next((bound for bound in bounds if bound is not None), spec.output_tokens_max)
    wants_newer = bounds[0] or "max_completion_tokens" in spec.params or model_of(spec).completion_tokens
    newer = wants_newer and "max_completion_tokens" not in spec.cannot
    name = "max_completion_tokens" if newer or "max_tokens" in spec.cannot else "max_tokens"
    bound = min(wanted, spec.output_tokens_max)
    params, worded_messages, reworded = worded(spec, params, own, messages, bound, named=loop.fallback is None)
    run.left_out = [*changes, *sorted(others), *lacking, *reworded]
    if not spec.speaks_messages:  # that wire has no templates
        worded_messages = for_template(worded_messages, template_of(spec))
    body = {**params, "messages": worded_messages, name: bound}
    body = body if model_of(spec).custom_tools else custom_as_functions(body)
    run.names = told_names(body, limits_of(spec).name_chars)
    body = with_told_names(body, run.names) if run.names else body
    tools = [*body.get("tools", ()), *hosted.get("tools", ())]
    return {**body, **hosted, "tools": tools} if hosted else body


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


def worst_case(loop: Loop, spec: WorkerSpec, body: dict[str, Any], share: int, size: PromptSize) -> WorstCase:
    """The worst case of one attempt. Lowers the output that `body` asks for to one part in `share` of the money and
    tokens left, and to what the context has room for. Raises CapReached where too little is left, UpstreamRefused
    (`context_length_exceeded`) where the prompt alone fills the context."""
    if loop.endpoint in TASK_FIELDS:
        draw = task_worst(spec, loop.endpoint, body, size)
        return WorstCase(draw, size.tokens_max)
    price, choices = price_of(spec), choices_in(body)
    media, hour = carries_media(body), price.has_hours and caches_an_hour({**spec.params, **body})
    if loop.endpoint == "embeddings":  # no output
        tokens = size.tokens if size.context_tokens is not None else size.tokens_max // BYTES_PER_TOKEN
        return WorstCase(Draw(worst_case_nano(price, size.tokens_max, 0, media=media), tokens), size.tokens_max)
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    left_nano = loop.tree.meter.left_nano // share
    rooms = {
        "cost": output_tokens_that_fit(price, size.tokens_max, left_nano, media=media, hour=hour) // choices,
        "tokens": (loop.tree.meter.left_tokens // share - size.tokens) // choices,
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
    rest = {name: value for name, value in body.items() if name != "messages"}
    bound = input_tokens_bound(body.get("messages", ()), str(rest) + str(spec.params))
    return PromptSize(bound, bound)


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
    template += TOKENS_PER_DECLARATION if declared.texts else 0
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
    tokens: TokenCounter, loop: Loop, spec: WorkerSpec, body: Mapping[str, Any], share: int
) -> PromptSize:
    """The size of a call's prompt. Counted where it is long, or where its bytes would lower the reply."""
    size = size_in_bytes(spec, body)
    if size.tokens_max <= UNCOUNTED_BYTES_MAX and (worst := _fitting(loop, spec, dict(body), share, size)) is not None:
        return PromptSize(size.tokens_max, size.tokens, worst=worst)
    return await counted_size(tokens, spec, body)


def _fitting(loop: Loop, spec: WorkerSpec, body: dict[str, Any], share: int, size: PromptSize) -> WorstCase | None:
    """The worst case beside a prompt of this size; None where the whole output does not fit."""
    if size.tokens_max + output_bound(body) > spec.context_tokens:
        return None
    try:
        worst = worst_case(loop, spec, body, share, size)
    except CapReached:
        return None
    return worst if worst.lowered_by is None else None


def output_bound(body: Mapping[str, Any]) -> int:
    """The most tokens that all choices can have; 0 for embeddings."""
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or 0) * choices_in(body)
