"""Which workers can serve a request: what it holds is theirs to take, and its prompt fits their context.

Before anything is held. A worker that cannot is left out; where no model is left, the client is told why.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.core.access.keys import Principal
from gateway.core.loop.caps import Caps
from gateway.core.loop.shown import CONVERSATION_CHARS_MAX
from gateway.core.money.amounts import NANO_MAX, nano_to_usd, worst_case_nano
from gateway.core.money.templates import Templates
from gateway.core.openai.chat import ChatRequest
from gateway.core.openai.parts import MediaPart, media_parts, remote_parts
from gateway.core.openai.tasks.fields import FIELDS as TASK_FIELDS
from gateway.core.openai.texts import TOKENS_DEFAULT
from gateway.core.openai.vendors.overflow import context_exceeded
from gateway.core.openai.vendors.usage import BYTES_PER_TOKEN
from gateway.core.pool.models import PREFERENCES
from gateway.core.pool.workers import MODEL_KINDS, Price, WorkerSpec
from gateway.errors import BadRequest, CapReached
from gateway.service.loop.bodies import (
    DECLARATIONS,
    OUTPUT_TOKENS_MIN,
    UNCOUNTED_BYTES_MAX,
    PromptSize,
    context_room,
    counted_size,
    declaration_tokens,
    hours_count,
    price_of,
    sendable,
    task_worst,
    texts_beside,
    vendor_for,
    without_spare,
)
from gateway.service.loop.conducting import PLAN_TOKENS_MIN
from gateway.service.loop.routers import VOTERS, CascadeRouter, CheckedRouter, VoteRouter
from gateway.service.loop.state import Loop
from gateway.service.loop.summaries import NOBODY, SummaryRules
from gateway.service.money.funds import Wish
from gateway.service.ports.request import TokenCounter
from gateway.service.request.catalog import Choice

BYTES_PER_TOKEN_MOST = 8  # of any text that people write: English has between four and five
RAISE_CAP = ", or raise x-baton-max-tokens as far as the key allows"
AMPLE_TOKENS = 4_096  # of a reply whose length the request leaves open
PROMPT_TOKENS_BOUND = 8_000  # instructions, examples and schema of the longest planning prompt
QUOTED_TOKENS_BOUND = 4 * CONVERSATION_CHARS_MAX  # of the conversation in it
WORKER_LINE_TOKENS_BOUND = 800  # one worker in it
SPREAD_MAX = 3  # a planned request holds for workers that cost up to so many times the cheapest, and grows for others
SIDE_BY_SIDE = {VoteRouter: VOTERS, CascadeRouter: 2}  # calls of routers that begin at once; 1 of others
BOUNDS = ("max_completion_tokens", "max_tokens")  # of a reply, the one that counts first
LONGER_CONTEXT = ", or name a model whose context is longer"
Sizes = Mapping[str, PromptSize]  # of the request's prompt, by worker name
Bodies = Mapping[str, Mapping[str, Any]]  # as they will leave, by worker name
Bounds = Callable[[Choice, Caps, Sizes, ChatRequest], object]
Held = Callable[[Sequence[WorkerSpec]], Sequence[WorkerSpec]]
Shortlisting = Callable[[Choice, ChatRequest, int, Principal], Awaitable[Choice]]


def asked_workers(asked: Choice | Loop) -> list[WorkerSpec]:
    """The workers that may answer: the models of a planned request, else the one that it names."""
    if asked.fallback is not None:
        return [spec for spec in asked.workers if spec.kind in MODEL_KINDS]
    return [spec for spec in asked.workers if spec.name == asked.planner.name.removeprefix("fixed:")]


def parts_to_fetch(messages: Sequence[Mapping[str, Any]], asked: Choice | Loop) -> tuple[MediaPart, ...]:
    """The parts by URL that Baton fetches: all of them, but for images, and files of models of Anthropic or behind the
    Responses API, that every worker that may answer fetches itself."""
    remote = remote_parts(messages)
    if not remote:
        return ()
    workers = asked_workers(asked)
    kinds = {"image", "file"} if workers else set()
    for spec in workers:
        both = spec.speaks_messages or (spec.fetches and spec.api == "responses")
        kinds &= {"image", "file"} if both else {"image"} if spec.fetches else set()
    return tuple(part for part in remote if part.kind not in kinds)


async def with_sendable_schemas(choice: Choice, chat: ChatRequest) -> tuple[Choice, Bodies]:
    """The choice without the models that LiteLLM would send too large a form of the request's schemas, and the bodies
    of those that get another form. Raises BadRequest with the schema's path where no model is left."""
    if chat.endpoint != "chat" or not any(chat.params.get(name) for name in DECLARATIONS):
        return choice, {}
    body, workers = {"messages": chat.messages, **chat.params}, asked_workers(choice)
    bodies: dict[str, dict[str, Any]] = {}
    refusals: dict[str, BadRequest] = {}
    for spec in workers:
        try:
            if (sent := await sendable(spec, body)) is not body:
                bodies[spec.name] = sent
        except BadRequest as refusal:
            refusals[spec.name] = refusal
    if refusals and len(refusals) == len(workers):
        raise next(iter(refusals.values()))
    left = tuple(spec for spec in choice.workers if spec.name not in refusals)
    return (replace(choice, workers=left) if refusals else choice), bodies


async def prompt_sizes(
    tokens: TokenCounter, choice: Choice, chat: ChatRequest, bytes_bound: int, caps: Caps, bodies: Bodies
) -> Sizes:
    """The size of the request's prompt for each worker that may answer. `bytes_bound`: its size where a token counts as
    a byte. It is counted where it is long, or long for a worker's context or for the cap on cost; not where it is far
    over the cap on tokens, for counting megabytes takes a second of processor. `bodies`: of workers, by name, that get
    another form of the request."""
    bytes_bound += declaration_tokens(chat.params)
    size, workers = PromptSize(bytes_bound, bytes_bound), asked_workers(choice)
    small = bytes_bound <= UNCOUNTED_BYTES_MAX and not bodies
    if small and all(_fits(spec, bytes_bound, caps, chat) for spec in workers):
        return {spec.name: size for spec in workers}
    if bytes_bound > caps.tokens * BYTES_PER_TOKEN_MOST and not bodies:
        return {spec.name: size for spec in workers}
    body = {"messages": chat.messages, **chat.params} if chat.endpoint == "chat" else chat.params
    return {spec.name: await counted_size(tokens, spec, bodies.get(spec.name, body)) for spec in workers}


def likely_tokens(sizes: Sizes, bytes_bound: int) -> int:
    """About how many tokens the request's prompt has: the most that was counted for a worker, else what its size in
    bytes makes of text."""
    counted = [size.tokens for size in sizes.values() if size.context_tokens is not None]
    return max(counted, default=bytes_bound // BYTES_PER_TOKEN)


def _fits(spec: WorkerSpec, bytes_bound: int, caps: Caps, chat: ChatRequest) -> bool:
    """Whether a prompt of so many tokens leaves room in a worker's context, and an answer in the cap on cost."""
    dear = _worst(spec, bytes_bound, OUTPUT_TOKENS_MIN, chat)
    return dear <= caps.cost_nano and bytes_bound + OUTPUT_TOKENS_MIN <= spec.context_tokens


def call_nano(spec: WorkerSpec, sizes: Sizes, output_bound: int, chat: ChatRequest) -> int:
    """The worst case of one call for the request's choices of `output_bound` tokens each. A worker that takes no `n` is
    called once for each choice."""
    if chat.endpoint in TASK_FIELDS:
        return task_worst(spec, chat.endpoint, chat.params, sizes[spec.name]).nano
    input_bound, choices = sizes[spec.name].tokens_max + len(texts_beside(spec.params)), chat.choices
    if "n" in spec.cannot:
        return choices * _worst(spec, input_bound, output_bound, chat)
    return _worst(spec, input_bound, output_bound * choices, chat)


def is_bounded(chat: ChatRequest) -> bool:
    """Whether the request says how long its reply may be."""
    return chat.endpoint != "chat" or any(chat.params.get(name) is not None for name in BOUNDS)


def asked_tokens(spec: WorkerSpec, chat: ChatRequest) -> int:
    """The tokens of each choice that a worker is asked for, as far as the request and its own bound say."""
    if chat.endpoint == "embeddings":
        return 0
    bounds = [chat.params.get(name) for name in BOUNDS] + [TOKENS_DEFAULT] * (chat.endpoint == "completions")
    return min(next((bound for bound in bounds if bound is not None), spec.output_tokens_max), spec.output_tokens_max)


class Sizing:
    """How much a request holds before it begins. One object serves the whole process: it knows what templates add to
    prompts, and how long planning prompts are."""

    def __init__(self, planning_price: Price, planning_tokens_max: int) -> None:
        self._price, self._plan_max = planning_price, planning_tokens_max
        self.templates = Templates()
        self._plans: dict[str, int] = {}  # tokens of the latest planning prompt, by pool

    def planned(self, pool: str, tokens: int) -> None:
        """Note how long a planning prompt was; 0: nothing was planned."""
        if tokens:
            self._plans[pool] = tokens

    def wish(self, choice: Choice, caps: Caps, sizes: Sizes, chat: ChatRequest) -> Wish:
        """One answer of the length that the request asks for, of the cheapest workers that may give it and of those
        that cost not much more, and the planning before it; at least a short answer, which the rule plans. Raises
        CapReached where the cap on cost does not buy one."""
        workers = asked_workers(choice)
        if not workers:
            raise BadRequest(f"pool `{choice.pool}` has no model worker for this key", param="model", code="empty_pool")
        body = {"messages": chat.messages, **chat.params}
        if chat.endpoint == "chat":
            sizes = {one.name: without_spare(self.templates, one, body, sizes[one.name]) for one in workers}

        def answer(reply_max: int, spread: int = 1) -> int:
            """Of the calls that begin at once, with at most so many tokens each: of the cheapest workers, and of those
            that cost at most `spread` times as much."""
            tokens = {spec.name: min(reply_max, asked_tokens(spec, chat)) for spec in workers}
            nanos = sorted(call_nano(spec, sizes, tokens[spec.name], chat) for spec in workers)
            near, calls = (
                [each for each in nanos if each <= spread * nanos[0]],
                SIDE_BY_SIDE.get(type(choice.planner), 1),
            )
            return max(sum(nanos[:calls]), sum(near[-calls:]))

        least = max(1, answer(OUTPUT_TOKENS_MIN))
        if least > caps.cost_nano:
            left, needed = nano_to_usd(caps.cost_nano), nano_to_usd(least)
            raise CapReached("cost", f"any answer could cost ${needed}; the cap is ${left}")
        most = min(caps.cost_nano, answer(NANO_MAX, SPREAD_MAX) + self._planning_nano(choice, sizes, NANO_MAX))
        enough = answer(NANO_MAX if is_bounded(chat) else AMPLE_TOKENS)
        enough += self._planning_nano(choice, sizes, PLAN_TOKENS_MIN)
        return Wish(max(most, least), min(max(most, least), max(least, enough)), least)

    def _planning_nano(self, choice: Choice, sizes: Sizes, tokens_max: int) -> int:
        """The worst case of one planning call. The prompt counts as long as the pool's latest, if that is shorter than
        it may be; the hold grows for a longer one, and where the conductor plans instead of the rule."""
        if choice.planner.name != "conductor":
            return 0
        shown = min(max(size.tokens_max for size in sizes.values()), QUOTED_TOKENS_BOUND)
        prompt = 3 * shown + PROMPT_TOKENS_BOUND + WORKER_LINE_TOKENS_BOUND * len(choice.workers)
        prompt = min(prompt, self._plans.get(choice.pool, prompt))
        return worst_case_nano(self._price, prompt, min(tokens_max, self._plan_max))


def _worst(spec: WorkerSpec, input_bound: int, output_bound: int, chat: ChatRequest) -> int:
    hour = hours_count(spec, {"messages": chat.messages, **chat.params})
    return worst_case_nano(price_of(spec), input_bound, output_bound, media=chat.has_media, hour=hour)


def with_roomy_workers(choice: Choice, chat: ChatRequest, sizes: Sizes, caps: Caps) -> Choice:
    """The choice without the models whose context cannot hold the prompt. Raises BadRequest (`context_length_exceeded`)
    where none is left, and where a long prompt alone is over the request's cap on tokens."""
    if chat.endpoint != "chat" or not sizes:
        return choice
    least = min(size.tokens for size in sizes.values())
    if least > UNCOUNTED_BYTES_MAX and least + OUTPUT_TOKENS_MIN > caps.tokens:
        raise BadRequest(**context_exceeded(caps.tokens, least, "this request (its cap on tokens)", RAISE_CAP))
    narrow = {spec.name for spec in asked_workers(choice) if context_room(spec, sizes[spec.name]) < OUTPUT_TOKENS_MIN}
    if not narrow:
        return choice
    if len(narrow) == len(sizes):
        longest = max(asked_workers(choice), key=lambda spec: spec.context_tokens)
        planned = choice.fallback is not None and len(sizes) > 1
        who = f"{longest.name}, the longest of the {len(sizes)} workers here," if planned else longest.name
        tokens = sizes[longest.name].tokens
        raise BadRequest(**context_exceeded(longest.context_tokens, tokens, who, LONGER_CONTEXT))
    return replace(choice, workers=tuple(spec for spec in choice.workers if spec.name not in narrow))


def held(quarantined: Held, resting: Held, workers: Sequence[WorkerSpec]) -> Sequence[WorkerSpec]:
    """Those of these workers that a plan should do without: in quarantine, or at rest."""
    out = quarantined(workers)
    return [*out, *resting([spec for spec in workers if spec not in out])] if out else resting(workers)


def without(choice: Choice, held: Held) -> Choice:
    """The choice without the workers that plans do without; the models are its reserve. Unchanged where the request
    names its workers, and where no other model is left."""
    if choice.fallback is None:
        return choice
    named = choice.planner.names if isinstance(choice.planner, CheckedRouter) else ()
    out = [spec for spec in held(choice.workers) if spec.kind in MODEL_KINDS and spec.name not in named]
    if not out:
        return choice
    left = tuple(spec for spec in choice.workers if spec not in out)
    if not any(spec.kind in MODEL_KINDS for spec in left):
        return choice
    return replace(choice, workers=left, reserve=tuple(out))


def with_able_workers(choice: Choice, chat: ChatRequest) -> Choice:
    """The choice without the workers that cannot take what the request holds (images, tools, …) or so many of it, and
    without tool workers where only a model's reply can have what it asks for. Raises BadRequest where no model is
    left."""
    needs, needs_model = chat.needs.difference(PREFERENCES), chat.needs_model
    if not needs and not needs_model:
        return choice
    checker = choice.planner.checker if isinstance(choice.planner, CheckedRouter) else None  # its reply is no answer
    # What the request holds and a worker cannot take, by the worker's name.
    lacks = {
        spec.name: needs_model
        if spec.kind == "tool"
        else needs & {*spec.cannot, *vendor_for(spec).limits.over(chat.params)}
        for spec in choice.workers
        if spec.name != checker
    }
    if not any(lacks.values()):
        return choice
    left = tuple(spec for spec in choice.workers if not lacks.get(spec.name))
    named = choice.planner.name.removeprefix("fixed:") if choice.fallback is None else None
    if any((spec.kind in MODEL_KINDS or named) and named in (None, spec.name) for spec in left):
        return replace(choice, workers=left)
    if named is None and choice.pool_workers:  # only a worker that plans may be able to
        return with_able_workers(replace(choice, workers=choice.pool_workers, pool_workers=()), chat)
    what = min(min(names) for name, names in lacks.items() if names and named in (None, name))
    where = next((part.where for part in media_parts(chat.messages) if part.kind == what), what)
    whom = "no worker that this key may use here takes" if named is None else f"worker {named} does not take"
    over = [
        most for spec in choice.workers if (most := vendor_for(spec).limits.over(chat.params).get(what)) is not None
    ]
    if over and not any(what in spec.cannot for spec in choice.workers if named in (None, spec.name)):
        problem = f"{whom} {len(chat.params[what])} `{what}`: the limit is {max(over)}"
        raise BadRequest(problem, param=where, code="array_above_max_length")
    raise BadRequest(f"{whom} `{what}`", param=where, code="unsupported_parameter")


def summarizers_of(rules: SummaryRules, asked: Choice, able: Choice, chat: ChatRequest) -> tuple[WorkerSpec, ...]:
    """Who may sum up for a request that `able` is left of. For one that names its worker, any other that could take it,
    too."""
    if asked.pool_workers and rules.worker != NOBODY:
        asked = replace(asked, workers=asked.pool_workers)
        able = with_able_workers(asked, chat)
    return rules.workers(asked.workers, able.workers)


class Fitter:
    """Chooses the workers that a request may be planned with."""

    def __init__(self, shortlist: Shortlisting, tokens: TokenCounter, bounds: Bounds, held: Held) -> None:
        """`shortlist` chooses the candidates of a large pool. `bounds` raises CapReached where the cap on cost buys no
        answer. `held`: which workers are in quarantine."""
        self._shortlist = shortlist
        self._tokens = tokens
        self._bounds = bounds
        self._held = held

    async def fit(
        self, choice: Choice, chat: ChatRequest, input_bound: int, caps: Caps, who: Principal
    ) -> tuple[Choice, Sizes]:
        """The choice with those workers, and the size of its prompt for each. Workers in quarantine are among them
        where no other could take the request. Raises BadRequest."""
        sound = without(choice, self._held)
        if sound is not choice:
            try:
                fitted, sizes = await self._fit(sound, chat, input_bound, caps, who)
                self._bounds(fitted, caps, sizes, chat)
                return fitted, sizes
            except (BadRequest, CapReached):
                pass  # of the sound workers, none has room for it, or is cheap enough
        return await self._fit(choice, chat, input_bound, caps, who)

    async def _fit(
        self, choice: Choice, chat: ChatRequest, input_bound: int, caps: Caps, who: Principal
    ) -> tuple[Choice, Sizes]:
        choice = await self._shortlist(choice, chat, input_bound // BYTES_PER_TOKEN, who)
        choice, bodies = await with_sendable_schemas(choice, chat)
        sizes = await prompt_sizes(self._tokens, choice, chat, input_bound, caps, bodies)
        return with_roomy_workers(choice, chat, sizes, caps), sizes
