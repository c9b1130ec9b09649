"""What a worker is sent, how many choices a call asks for, and the worst case it may cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.core.loop.caps import Draw
from gateway.core.money.amounts import input_tokens_bound, output_tokens_that_fit, worst_case_nano
from gateway.core.openai.chat import FIELDS, HINTS, choices_in
from gateway.core.openai.options import custom_as_functions
from gateway.core.openai.parts import with_results_as_text, without_cache_control
from gateway.core.openai.texts import TOKENS_DEFAULT
from gateway.core.openai.usage import BYTES_PER_TOKEN
from gateway.core.openai.vendor import for_worker
from gateway.core.pool.models import adapt, model_of, takes_media_in_results, vendor_params
from gateway.core.pool.workers import Price, WorkerSpec
from gateway.errors import CapReached, Unpriced
from gateway.service.loop.state import Loop, StepRun

OUTPUT_TOKENS_MIN = 16  # a call that could say less than this is not worth making


def price_of(spec: WorkerSpec) -> Price:
    """A worker's price. Raises Unpriced: what cannot be priced is refused, never free."""
    if spec.price is None:
        raise Unpriced(f"worker {spec.name} has no price; give it `price` in the pool file")
    return spec.price


def step_body(loop: Loop, run: StepRun, messages: Sequence[Mapping[str, Any]], answers: bool) -> dict[str, Any]:
    """The body for a step's worker. Only the step that `answers` gets the client's own parameters, as far as the
    worker's model takes them; the record notes the others."""
    spec = run.spec
    if loop.endpoint == "embeddings":
        return dict(loop.params)
    if loop.endpoint == "completions":
        return {**loop.params, "max_tokens": min(loop.params.get("max_tokens", TOKENS_DEFAULT), spec.output_tokens_max)}
    params = {name: value for name, value in loop.params.items() if name not in HINTS or name not in spec.cannot}
    params = _with_cache(spec, params) if answers else {}
    others = params.keys() - FIELDS.keys() - vendor_params(spec)
    params, changes = adapt(spec, {name: value for name, value in params.items() if name not in others})
    run.left_out = [*changes, *sorted(others)]
    bounds = [params.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
    wanted = next((bound for bound in bounds if bound is not None), spec.output_tokens_max)
    wants_newer = bounds[0] or "max_completion_tokens" in spec.params or model_of(spec).completion_tokens
    newer = wants_newer and "max_completion_tokens" not in spec.cannot
    name = "max_completion_tokens" if newer or "max_tokens" in spec.cannot else "max_tokens"
    messages = for_worker(messages, spec.origin)
    messages = messages if takes_media_in_results(spec) else with_results_as_text(messages)
    sent = _with_cache(spec, {"messages": messages})
    body = {**params, **sent, name: min(wanted, spec.output_tokens_max)}
    return body if model_of(spec).custom_tools else custom_as_functions(body)


def _with_cache(spec: WorkerSpec, body: dict[str, Any]) -> dict[str, Any]:
    """The body with its `cache_control` for LiteLLM's vendors, and without it for others, which may refuse it."""
    return body if spec.kind == "litellm" else without_cache_control(body)


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


def worst_case(loop: Loop, spec: WorkerSpec, body: dict[str, Any], share: int) -> tuple[Draw, int]:
    """The worst case of one attempt and the most tokens its prompt can have. Lowers the output that `body` asks for to
    one part in `share` of the money and tokens left. Raises CapReached where too little is left."""
    price, choices = price_of(spec), choices_in(body)
    rest = {key: value for key, value in body.items() if key != "messages"}
    input_bound = input_tokens_bound(body.get("messages", ()), str(rest) + str(spec.params))
    if loop.endpoint == "embeddings":  # no output, and a long input: the cap on tokens counts the usual estimate
        return Draw(worst_case_nano(price, input_bound, 0), input_bound // BYTES_PER_TOKEN), input_bound
    left_nano, left_tokens = loop.tree.meter.left_nano // share, loop.tree.meter.left_tokens // share
    fits = min(output_tokens_that_fit(price, input_bound, left_nano) // choices, (left_tokens - input_bound) // choices)
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    if fits < min(OUTPUT_TOKENS_MIN, body[name]):
        cap = "tokens" if left_tokens - input_bound < OUTPUT_TOKENS_MIN * choices else "cost"
        raise CapReached(cap, f"what is left of the request's {cap} cap is too little for worker {spec.name}")
    body[name] = min(body[name], fits)
    bound = output_bound(body)
    return Draw(worst_case_nano(price, input_bound, bound), input_bound + bound), input_bound


def output_bound(body: Mapping[str, Any]) -> int:
    """The most tokens that all choices can have; 0 for embeddings."""
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or 0) * choices_in(body)
