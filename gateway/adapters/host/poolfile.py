"""Reads `pool.yaml` (docs/pool.md). Each mistake is one line: `path:line: field: what is wrong; the fix`.

Secrets are references (`env:NAME`, `file:/path`). They are looked up here, at start, so that a missing one stops the
start rather than a request, and they never appear in a message.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.adapters.host.pricemap import offline_price
from gateway.adapters.host.yamlfile import Document, Loc, read
from gateway.adapters.upstream import tokens
from gateway.adapters.upstream.http1.ways import Ways
from gateway.core.pool.changes import with_first_token
from gateway.core.pool.handles import neutral_handles
from gateway.core.pool.workers import JUDGE_URL, MODEL_KINDS, PoolFile, Price, ToolSpec, WorkerSpec, is_reference
from gateway.errors import ConfigError
from gateway.service.ports.pools import LoadedPool

SECRET_BYTES_MAX = 16_384
READ_S_MAX = 30.0
MISTAKES_MAX = 50  # lines of one error
FREE = Price.model_validate({"input_usd_per_mtok": "0", "output_usd_per_mtok": "0"})
_AMOUNTS = set(Price.model_fields) - {"above"}  # as written, never as floats
_TEXT_KEYS = ("name", "handle", "model", "version", *_AMOUNTS)
_SECRET_REF = re.compile(r"^(env:[A-Z_][A-Z0-9_]*|file:.+)$")
_SECRET_KEY = re.compile(r"(?i)(api[-_]?key|authorization|password|secret|access[-_]?token|bearer)")
_SECRET_VARIABLE = re.compile(r"(?i)(key|token|secret|passw|credential)")
_SECRET_URL = re.compile(r"(?i)^[a-z]+://[^/]*@|[?&](api[-_]?key|key|token)=")
_KEEP_OUT = (
    "a secret must not stand in this file; put it in the environment and write `api_key: env:NAME` (or file:/path)"
)


def load(path: Path, env: Mapping[str, str]) -> PoolFile:
    """Read the pool file and check all of it: shape, names, prices, every secret reference in `env` or on disk. Raises
    ConfigError with a line for each mistake, in file order, MISTAKES_MAX at most."""
    document = read(path, _TEXT_KEYS)
    if not isinstance(document.data, dict):
        raise document.error((), "must be a mapping with `workers` and `pools`; see docs/pool.md")
    _add_handles(document.data)
    mistakes = [*_inline_secrets(document.data), *_name_clashes(document.data)]
    try:
        pool = PoolFile.model_validate(document.data)
    except ValidationError as error:
        mistakes += [(_place(e, document), _explain(e)) for e in _telling(error.errors())]
    if mistakes:
        raise _all(document, mistakes)
    return pool.model_copy(update={"workers": _completed(pool, document, env)})


def _completed(pool: PoolFile, document: Document, env: Mapping[str, str]) -> tuple[WorkerSpec, ...]:
    """The workers with their prices, once all that they refer to is there. Raises ConfigError, as `load`."""
    lines: list[str] = []

    def tried(worker: WorkerSpec, work: Callable[[], WorkerSpec]) -> WorkerSpec:
        try:
            return work()
        except ConfigError as error:
            lines.append(error.message)
            return worker

    workers = [tried(worker, partial(_priced, worker, index, document)) for index, worker in enumerate(pool.workers)]
    workers = [tried(worker, partial(_judge, worker, index, workers, document)) for index, worker in enumerate(workers)]
    ways = Ways(env)
    for index, worker in enumerate(workers):
        checks: list[tuple[tuple[str, ...], Callable[[], object]]] = [
            (place, partial(resolve_secret, ref, env)) for place, ref in _references(worker)
        ]
        checks.append((("tokenizer",), partial(tokens.check, worker.tokenizer)))
        if any(worker.detour):
            checks.append((("url",), partial(_check_way, worker, ways, env)))
        for place, check in checks:
            try:
                check()
            except ConfigError as error:
                lines.append(document.error(("workers", index, *place), error.message).message)
    if lines:
        raise ConfigError("\n".join(lines[:MISTAKES_MAX]))
    return tuple(workers)


def _check_way(worker: WorkerSpec, ways: Ways, env: Mapping[str, str]) -> None:
    """Raises ConfigError for a proxy or certificates that cannot be used."""
    named = worker.proxy or ""
    ways.of_worker(worker, {f"{worker.name} proxy": resolve_secret(named, env)} if is_reference(named) else {})


def _add_handles(data: dict[str, Any]) -> None:
    """Give a handle to each worker that has a name and none."""
    workers = [worker for _, worker in _workers(data)]
    bare = [worker for worker in workers if "handle" not in worker and isinstance(worker.get("name"), str)]
    handles = neutral_handles((one["name"] for one in bare), [str(one["handle"]) for one in workers if "handle" in one])
    for worker in bare:
        worker["handle"] = handles[worker["name"]]


ANTHROPIC_KEY = "ANTHROPIC_API_KEY"


def secrets(pool: PoolFile, env: Mapping[str, str]) -> dict[str, str]:
    """Map each worker that has a secret to it, by name, and each secret of its `env` by `NAME VARIABLE`. Raises
    ConfigError as `resolve_secret` does. That of its proxy is `NAME proxy`. A model at Anthropic itself has the key of
    Anthropic's own variable, if its entry names none."""
    every = ((worker, place, ref) for worker in pool.workers for place, ref in _references(worker))
    named = {" ".join((worker.name, *_suffix(place))): resolve_secret(ref, env) for worker, place, ref in every}
    theirs = [worker.name for worker in pool.workers if worker.claude and worker.url is None]
    return (dict.fromkeys(theirs, key) if (key := env.get(ANTHROPIC_KEY, "").strip()) else {}) | named


def _suffix(place: tuple[str, ...]) -> tuple[str, ...]:
    """What a secret's name has behind that of its worker: nothing for the key."""
    return () if place == ("api_key",) else place[-1:]


def _references(worker: WorkerSpec) -> Iterator[tuple[tuple[str, ...], str]]:
    """The references to secrets of a worker, each with its place in its entry."""
    if worker.api_key:
        yield ("api_key",), worker.api_key
    if worker.proxy and is_reference(worker.proxy):
        yield ("proxy",), worker.proxy
    yield from ((("env", name), value) for name, value in worker.env.items() if is_reference(value))


def resolve_secret(ref: str, env: Mapping[str, str]) -> str:
    """The secret behind `env:NAME` or `file:/path`, stripped. Raises ConfigError, which names the reference, never the
    value."""
    kind, _, where = ref.partition(":")
    if kind == "env":
        value = env.get(where, "").strip()
        if not value:
            raise ConfigError(f"`{ref}` is not set in the environment; export {where}=… or remove the worker")
    elif kind == "file":
        value = _secret_file(ref, Path(where))
    else:
        raise ConfigError(_KEEP_OUT)
    if not (value.isascii() and value.isprintable()) or " " in value:
        raise ConfigError(f"`{ref}` holds something that cannot be a key (spaces, line breaks or non-ASCII); check it")
    return value


def _secret_file(ref: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(SECRET_BYTES_MAX + 1)
        value = raw.decode().strip()
    except OSError as error:
        raise ConfigError(f"`{ref}` cannot be read ({error.strerror}); create the file or fix the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"`{ref}` is not text; it must hold the key alone") from None
    if not value or len(raw) > SECRET_BYTES_MAX:
        raise ConfigError(f"`{ref}` must hold the key alone: 1 to {SECRET_BYTES_MAX} bytes, not {len(raw)}")
    return value


def _all(document: Document, mistakes: list[tuple[Loc, str]]) -> ConfigError:
    """The error of all mistakes in file order, one a place; those of the whole file count only if there is no other."""
    first: dict[Loc, str] = {}
    for loc, what in mistakes:
        first.setdefault(loc, what)
    unnamed = any(loc[:1] == ("workers",) and loc[-1] == "name" for loc in first)  # so that pools name nobody
    left_out = {loc for loc in first if not loc or (unnamed and loc[0] == "pools")}
    told = sorted(set(first) - left_out or first, key=document.line)
    return ConfigError("\n".join(document.error(loc, first[loc]).message for loc in told[:MISTAKES_MAX]))


def _telling(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Errors without their consequences: a misspelt key also makes one missing, and a bad worker also shortens the
    list."""
    unknown = [error["loc"] for error in errors if error["type"] == "extra_forbidden"]
    meant = {(*loc[:-1], _near(str(loc[-1]), _fields_at(loc))) for loc in unknown}
    inner = {error["loc"][:depth] for error in errors for depth in range(len(error["loc"]))}
    return [
        error
        for error in errors
        if not (error["type"] == "missing" and error["loc"] in meant)
        and not (error["type"] == "too_short" and error["loc"] in inner)
    ]


def _workers(data: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    workers = data.get("workers")
    return [(i, w) for i, w in enumerate(workers) if isinstance(w, dict)] if isinstance(workers, list) else []


def _inline_secrets(data: Mapping[str, Any]) -> Iterator[tuple[Loc, str]]:
    for index, worker in _workers(data):
        key = worker.get("api_key")
        if key is not None and not (isinstance(key, str) and _SECRET_REF.match(key)):
            yield ("workers", index, "api_key"), _KEEP_OUT
        for name in ("url", "proxy"):
            if isinstance(worker.get(name), str) and _SECRET_URL.search(worker[name]):
                yield ("workers", index, name), _KEEP_OUT.replace("api_key", "proxy" if name == "proxy" else "api_key")
        params, variables = worker.get("params"), worker.get("env")
        for name in params if isinstance(params, dict) else ():
            if _SECRET_KEY.search(name):
                yield ("workers", index, "params", name), _KEEP_OUT
        for name, value in variables.items() if isinstance(variables, dict) else ():
            if _SECRET_VARIABLE.search(str(name)) and not (isinstance(value, str) and is_reference(value)):
                yield (
                    ("workers", index, "env", name),
                    f"a secret must not stand in this file; write `{name}: env:{name}`",
                )


def _name_clashes(data: Mapping[str, Any]) -> Iterator[tuple[Loc, str]]:
    first: dict[tuple[str, str], int] = {}
    for index, worker in _workers(data):
        for what in ("name", "handle"):
            value = worker.get(what)
            if isinstance(value, str) and first.setdefault((what, value), index) != index:
                place = f"workers[{first[what, value]}]"
                yield ("workers", index, what), f"`{value}` is already the {what} of {place}; make it unique"
    names = [name for what, name in first if what == "name"]
    names += [str(worker[key]) for _, worker in _workers(data) for key in worker if _means(key, "name")]
    pools = data.get("pools")
    for pool, members in pools.items() if isinstance(pools, dict) else ():
        for position, member in enumerate(members) if isinstance(members, list) else ():
            if names and isinstance(member, str) and member not in names:
                yield ("pools", pool, position), f"no worker is named `{member}`; {_suggest(member, names)}"


def _means(key: str, field: str) -> bool:
    """Whether an unknown key of a worker is a misspelt `field`."""
    return key != field and _near(key, list(WorkerSpec.model_fields)) == field


def _place(error: ErrorDetails, document: Document) -> Loc:
    """Pydantic's location without the parts that it adds (tags of unions, `[key]`)."""
    loc: Loc = ()
    for part in error["loc"]:
        if (*loc, part) in document.lines or error["type"] == "missing":
            loc = (*loc, part)
    return loc


def _explain(error: ErrorDetails) -> str:
    loc = error["loc"]
    name = str(loc[-1]) if loc else ""
    match error["type"]:
        case "missing":
            return "is missing; add it (docs/pool.md)"
        case "extra_forbidden":
            return f"unknown key; {_suggest(name, _fields_at(loc))}"
        case "string_pattern_mismatch" if name == "handle":
            return "must be 2 to 16 lower-case letters and digits, starting with a letter, e.g. `atlas`"
        case "string_pattern_mismatch" if name == "name":
            return "must hold no spaces and not start with `/`, e.g. `claude-haiku`"
        case "value_error":
            return error["msg"].removeprefix("Value error, ")
        case _:
            return f"{error['msg'][0].lower()}{error['msg'][1:]}; see docs/pool.md"


def _fields_at(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = PoolFile
    if loc[0] == "workers" and len(loc) > 2:
        model = Price if "price" in loc[:-1] else ToolSpec if "tools" in loc[:-1] else WorkerSpec
    return list(model.model_fields)


def _suggest(name: str, names: list[str]) -> str:
    near = _near(name, names)
    return f"did you mean `{near}`?" if near else f"known: {', '.join(names)}"


def _near(name: str, names: list[str]) -> str | None:
    """The name that was probably meant: one that begins so, or that looks alike."""
    longer = [each for each in names if each.startswith(f"{name}_")]
    return next(iter(longer or difflib.get_close_matches(name, names, n=1, cutoff=0.5)), None)


def _priced(worker: WorkerSpec, index: int, document: Document) -> WorkerSpec:
    """The worker with a price. Only workers that cost nothing by construction may have none."""
    if worker.price is not None and worker.price.model_fields_set:
        return worker
    if worker.kind == "self" or (worker.kind == "tool" and (worker.url or "").startswith("builtin:")):
        return worker.model_copy(update={"price": FREE})
    loc: Loc = ("workers", index, "price")
    if worker.kind == "mcp":
        prices = [tool.call_usd for tool in worker.tools.values()]
        if None in prices:
            raise document.error(
                loc, "is missing; add `price: {call_usd: …}` (0 where it is free), or one to each tool"
            )
        return worker.model_copy(update={"price": Price(call_usd=max(filter(None, prices), default=Decimal(0)))})
    if worker.kind == "tool":
        raise document.error(loc, "is missing; add `price: {call_usd: …}` (0 where it is free)")
    if worker.kind == "openai":
        fix = "add `price: {input_usd_per_mtok: …, output_usd_per_mtok: …}` (0 for a model of your own)"
        raise document.error(loc, f"is missing; {fix}")
    try:
        price = offline_price(worker.model or "", worker.context_tokens)
    except ConfigError as error:
        raise document.error(loc, error.message) from None
    if price is None:
        raise document.error(loc, f"LiteLLM's offline map has no price for `{worker.model}`; add `price:` yourself")
    return worker.model_copy(update={"price": price})


def _judge(worker: WorkerSpec, index: int, workers: Sequence[WorkerSpec], document: Document) -> WorkerSpec:
    """A judge with the price and the context of the model that it asks, for what it spends is billed to its step; any
    other worker as it is."""
    if worker.url != JUDGE_URL:
        return worker
    models = {one.name: one for one in workers if one.kind in MODEL_KINDS and one.task == "chat"}
    model = models.get(str(worker.params.get("model")))
    if model is None:
        raise document.error(("workers", index, "url"), "needs `params: {model: NAME}`, a model under workers")
    return worker.model_copy(update={"price": model.price, "context_tokens": model.context_tokens})


# ---------------------------------------------------------------- the pool of this gateway


class PoolFileSource:
    """The port PoolSource: the file, completed by the settings. `default`: the pool of keys that name none, instead of
    the file's. `named`: workers that must exist, by the setting that names each. `planner`: the worker that plans; it
    answers no planned request unless the file says so. `first_token_s`: of models whose entry sets no
    `first_token_timeout_s`; None: none."""

    def __init__(
        self,
        path: Path,
        environment: Callable[[], Mapping[str, str]],
        default: str | None,
        named: Mapping[str, str | None],
        planner: str | None = None,
        first_token_s: float | None = None,
    ) -> None:
        self._first_token_s = first_token_s
        self._path = path
        self._environment = environment
        self._default = default
        self._named = named
        self._planner = planner

    def load(self) -> LoadedPool:
        """Read the file and look its secrets up. A start and a reload make the same checks. Raises ConfigError."""
        env = self._environment()
        pools = with_planner(self._with_default(load(self._path, env)), self._planner)
        pools = with_first_token(pools, self._first_token_s)
        for setting, worker in self._named.items():
            if worker:
                pool_with(pools, setting, worker)
        return LoadedPool(pools, secrets(pools, env))

    async def read(self) -> LoadedPool:
        """`load` in a thread: disks may hang, and LiteLLM's price map is long."""
        try:
            async with asyncio.timeout(READ_S_MAX):
                return await asyncio.to_thread(self.load)
        except TimeoutError:
            raise ConfigError(
                f"{self._path}:1: not read in {READ_S_MAX:g} s; check the disk that it and its keys are on"
            ) from None

    def _with_default(self, pools: PoolFile) -> PoolFile:
        name = self._default
        if name is None:
            return pools
        if name not in pools.pools:
            raise ConfigError(f"BATON_DEFAULT_POOL_NAME={name}: no such pool; there are {', '.join(pools.pools)}")
        return pools.model_copy(update={"default": name})


def with_planner(pools: PoolFile, planner: str | None) -> PoolFile:
    """The pool file in which the worker that plans (None: no worker does) answers only if its entry says so. Raises
    ConfigError."""
    if planner is None:
        return pools
    models = {one.name: one for one in pools.workers if one.kind in MODEL_KINDS and one.task == "chat"}
    if planner not in models:
        raise ConfigError(f"BATON_CONDUCTOR=worker:{planner}: no such model; {_suggest(planner, list(models))}")
    if "answers" in models[planner].model_fields_set:
        return pools
    plans = models[planner].model_copy(update={"answers": False})
    return pools.model_copy(update={"workers": tuple(plans if one.name == planner else one for one in pools.workers)})


def pool_with(pools: PoolFile, setting: str, worker: str) -> str:
    """Return the first pool with the model that a setting names. Raises ConfigError."""
    for name, workers in pools.pools.items():
        if worker in workers and pools.worker(worker).kind in MODEL_KINDS and pools.worker(worker).task == "chat":
            return name
    raise ConfigError(f"{setting}={worker}: no pool has such a worker")
