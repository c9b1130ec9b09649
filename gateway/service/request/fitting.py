"""Which workers can serve a request: what it holds is theirs to take, and its prompt fits their context.

Before anything is held. A worker that cannot is left out; where no model is left, the client is told why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gateway.core.loop.caps import Caps
from gateway.core.money.amounts import worst_case_nano
from gateway.core.openai.chat import ChatRequest
from gateway.core.openai.parts import media_parts
from gateway.core.pool.models import PREFERENCES
from gateway.core.pool.workers import MODEL_KINDS, WorkerSpec
from gateway.errors import BadRequest, context_exceeded
from gateway.service.loop.bodies import OUTPUT_TOKENS_MIN, context_room, price_of
from gateway.service.loop.prompts import UNCOUNTED_BYTES_MAX, PromptSize, counted_size
from gateway.service.ports.request import TokenCounter
from gateway.service.request.catalog import Choice

BYTES_PER_TOKEN_MOST = 8  # of any text that people write: English has between four and five
Sizes = Mapping[str, PromptSize]  # of the request's prompt, by worker name


def asked_workers(choice: Choice) -> list[WorkerSpec]:
    """The workers that may answer: the models of a planned request, else the one that it names."""
    if choice.fallback is not None:
        return [spec for spec in choice.workers if spec.kind in MODEL_KINDS]
    named = choice.planner.name.removeprefix("fixed:")
    return [spec for spec in choice.workers if spec.name == named]


async def prompt_sizes(tokens: TokenCounter, choice: Choice, chat: ChatRequest, bytes_bound: int, caps: Caps) -> Sizes:
    """The size of the request's prompt for each worker that may answer. `bytes_bound`: its size where a token counts as
    a byte. It is counted where it is long, or long for a worker's context or for the cap on cost; not where it is far
    over the cap on tokens, for counting megabytes takes a second of processor."""
    size, workers = PromptSize(bytes_bound, bytes_bound), asked_workers(choice)
    if bytes_bound <= UNCOUNTED_BYTES_MAX and all(_fits(spec, bytes_bound, caps, chat) for spec in workers):
        return {spec.name: size for spec in workers}
    if bytes_bound > caps.tokens * BYTES_PER_TOKEN_MOST:
        return {spec.name: size for spec in workers}
    body = {"messages": chat.messages, **chat.params} if chat.endpoint == "chat" else chat.params
    return {spec.name: await counted_size(tokens, spec, body) for spec in workers}


def _fits(spec: WorkerSpec, bytes_bound: int, caps: Caps, chat: ChatRequest) -> bool:
    """Whether a prompt of so many tokens leaves room in a worker's context, and an answer in the cap on cost."""
    dear = worst_case_nano(price_of(spec), bytes_bound, OUTPUT_TOKENS_MIN, media=chat.has_media)
    return dear <= caps.cost_nano and bytes_bound + OUTPUT_TOKENS_MIN <= spec.context_tokens


def with_roomy_workers(choice: Choice, chat: ChatRequest, sizes: Sizes, caps: Caps) -> Choice:
    """The choice without the models whose context cannot hold the prompt. Raises BadRequest (`context_length_exceeded`)
    where none is left, and where a long prompt alone is over the request's cap on tokens."""
    if chat.endpoint != "chat" or not sizes:
        return choice
    least = min(size.tokens for size in sizes.values())
    if least > UNCOUNTED_BYTES_MAX and least + OUTPUT_TOKENS_MIN > caps.tokens:
        raise BadRequest(**context_exceeded(caps.tokens, least, "this request (its cap on tokens)"))
    narrow = {spec.name for spec in asked_workers(choice) if context_room(spec, sizes[spec.name]) < OUTPUT_TOKENS_MIN}
    if not narrow:
        return choice
    if len(narrow) == len(sizes):
        longest = max(asked_workers(choice), key=lambda spec: spec.context_tokens)
        raise BadRequest(**context_exceeded(longest.context_tokens, sizes[longest.name].tokens, longest.name))
    return replace(choice, workers=tuple(spec for spec in choice.workers if spec.name not in narrow))


def with_able_workers(choice: Choice, chat: ChatRequest) -> Choice:
    """The choice without the workers that cannot take what the request holds (images, tools, …), and without tool
    workers where only a model's reply can have what it asks for. Raises BadRequest where no model is left."""
    lacks = {spec.name: _lacks(spec, chat) for spec in choice.workers}
    if not any(lacks.values()):
        return choice
    left = tuple(spec for spec in choice.workers if not lacks[spec.name])
    named = choice.planner.name.removeprefix("fixed:") if choice.fallback is None else None
    if any((spec.kind in MODEL_KINDS or named) and named in (None, spec.name) for spec in left):
        return replace(choice, workers=left)
    what = min(min(names) for name, names in lacks.items() if names and named in (None, name))
    where = next((part.where for part in media_parts(chat.messages) if part.kind == what), what)
    whom = "no worker that this key may use here takes" if named is None else f"worker {named} does not take"
    raise BadRequest(f"{whom} `{what}`", param=where, code="unsupported_parameter")


def _lacks(spec: WorkerSpec, chat: ChatRequest) -> frozenset[str]:
    """What the request holds and the worker cannot take."""
    return chat.needs_model if spec.kind == "tool" else chat.needs.difference(PREFERENCES) & frozenset(spec.cannot)
