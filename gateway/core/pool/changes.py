"""What changes between two pool files, for the audit trail and for operators; and which keys lose a name. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from gateway.core.pool.revision import plain_pools
from gateway.core.pool.workers import EVERY_POOL, MODEL_KINDS, PoolFile


class KeyNames(Protocol):
    """The names of the pool file that a key uses. Empty `workers`: all workers of its pools."""

    @property
    def public_id(self) -> str: ...
    @property
    def pools(self) -> Sequence[str]: ...
    @property
    def workers(self) -> Sequence[str]: ...


def changes(before: PoolFile, after: PoolFile, rekeyed: Collection[str] = ()) -> dict[str, Any]:
    """The differences, as JSON data. Parts without a change are absent, so equal files give an empty mapping.

    `workers`: {added: names, removed: names, changed: {name: {field: [old, new]}}} · `rekeyed`: names of the workers
    with another key · `pools`: {added, removed: {name: workers}, changed: {name: [old, new]}} · `default`: [old, new].
    """
    old, new = plain_pools(before), plain_pools(after)
    workers = _parts(old["workers"], new["workers"])
    if "changed" in workers:
        workers["changed"] = {name: _fields(*pair) for name, pair in workers["changed"].items()}
    for kind in ("added", "removed"):
        if kind in workers:
            workers[kind] = list(workers[kind])
    default = [] if old["default"] == new["default"] else [old["default"], new["default"]]
    rekeyed = sorted(name for name in rekeyed if name in old["workers"] and name in new["workers"])
    parts = {"workers": workers, "rekeyed": rekeyed, "pools": _parts(old["pools"], new["pools"]), "default": default}
    return {name: part for name, part in parts.items() if part}


def gone_names(before: PoolFile, after: PoolFile) -> tuple[list[str], list[str]]:
    """The pools, and the workers of any pool, that `after` lacks: no key can lose another name."""
    pools = [*((name, name) for name in before.pools), (before.default, after.default)]
    workers = {worker for was, is_ in pools for worker in set(before.pools[was]) - set(after.pools.get(is_, ()))}
    return sorted(before.pools.keys() - after.pools.keys()), sorted(workers)


def lost_names(keys: Iterable[KeyNames], before: PoolFile, after: PoolFile) -> dict[str, list[str]]:
    """Map key ids to the names among the key's pools and workers that exist in `before` but not in `after`."""
    lost = {key.public_id: sorted(_valid_names(key, before) - _valid_names(key, after)) for key in keys}
    return {public_id: names for public_id, names in lost.items() if names}


def _valid_names(key: KeyNames, file: PoolFile) -> set[str]:
    """The names of a key that exist in a file. A key without pools has the default pool; one that has every pool names
    none."""
    every = EVERY_POOL in key.pools
    pools = [name for name in (file.pools if every else key.pools or (file.default,)) if name in file.pools]
    reached = {worker for name in pools for worker in file.pools[name]}
    return set(pools if key.pools and not every else ()) | reached.intersection(key.workers)


def change_lines(diff: Mapping[str, Any]) -> list[str]:
    """Describe the result of `changes`, one line for each change."""
    return [*_worker_lines(diff), *_pool_lines(diff)]


def _parts(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    parts = {
        "added": {name: new[name] for name in sorted(new) if name not in old},
        "removed": {name: old[name] for name in sorted(old) if name not in new},
        "changed": {name: [old[name], new[name]] for name in sorted(new) if name in old and old[name] != new[name]},
    }
    return {kind: part for kind, part in parts.items() if part}


def _fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The changed fields of a worker: {field: [old, new]}. A price counts as one field for each amount."""
    old_fields, new_fields = dict(_flat(old)), dict(_flat(new))
    names = sorted(name for name in old_fields | new_fields if old_fields.get(name) != new_fields.get(name))
    return {name: [old_fields.get(name), new_fields.get(name)] for name in names}


def _flat(worker: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in worker.items():
        if name == "price":
            yield from ((f"price.{kind}", amount) for kind, amount in value.items())
        else:
            yield name, value


def _worker_lines(diff: Mapping[str, Any]) -> Iterator[str]:
    workers = diff.get("workers", {})
    for kind in ("added", "removed"):
        yield from (f"worker {name}: {kind}" for name in workers.get(kind, ()))
    for name, fields in workers.get("changed", {}).items():
        yield from (f"worker {name}: {field}: {_text(old)} -> {_text(new)}" for field, (old, new) in fields.items())
    yield from (f"worker {name}: another api_key" for name in diff.get("rekeyed", ()))


def _pool_lines(diff: Mapping[str, Any]) -> Iterator[str]:
    pools = diff.get("pools", {})
    for kind in ("added", "removed"):
        yield from (f"pool {name}: {kind} ({', '.join(names)})" for name, names in pools.get(kind, {}).items())
    for name, (old, new) in pools.get("changed", {}).items():
        yield f"pool {name}: {', '.join(old)} -> {', '.join(new)}"
    if "default" in diff:
        yield f"default pool: {diff['default'][0]} -> {diff['default'][1]}"


def _text(value: Any) -> str:
    return "none" if value in (None, "", [], {}) else str(value)


def with_first_token(pools: PoolFile, first_token_s: float | None) -> PoolFile:
    """The pool file in which models have this time to the first token, where their entries set none."""
    if first_token_s is None:
        return pools
    of = {"first_token_timeout_s": first_token_s}
    workers = tuple(
        one.model_copy(update=of) if one.kind in MODEL_KINDS and one.first_token_timeout_s is None else one
        for one in pools.workers
    )
    return pools.model_copy(update={"workers": workers})
