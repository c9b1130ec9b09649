"""What differs between two pool files, as people and the audit are told it. Pure; no secret and no reference to one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from gateway.core.pool.workers import PoolFile, plain_pools


class KeyNames(Protocol):
    """What a key names of the pool file; no workers: all of its pools."""

    @property
    def public_id(self) -> str: ...
    @property
    def pools(self) -> Sequence[str]: ...
    @property
    def workers(self) -> Sequence[str]: ...


def changes(before: PoolFile, after: PoolFile, rekeyed: Collection[str] = ()) -> dict[str, Any]:
    """`workers` {added: names, removed: names, changed: {name: {field: [was, is]}}}, `rekeyed` names of workers whose
    key is another, `pools` {added, removed: {name: workers}, changed: {name: [was, is]}}, `default` [was, is]. What did
    not change is not there: equal files make an empty mapping."""
    old, new = plain_pools(before), plain_pools(after)
    workers = _parts(old["workers"], new["workers"])
    if "changed" in workers:
        workers["changed"] = {name: _fields(*pair) for name, pair in workers["changed"].items()}
    for kind in ("added", "removed"):
        if kind in workers:
            workers[kind] = list(workers[kind])
    default = [] if old["default"] == new["default"] else [old["default"], new["default"]]
    kept = sorted(name for name in rekeyed if name in old["workers"] and name in new["workers"])
    found = {"workers": workers, "rekeyed": kept, "pools": _parts(old["pools"], new["pools"]), "default": default}
    return {name: part for name, part in found.items() if part}


def stranded(keys: Iterable[KeyNames], before: PoolFile, after: PoolFile) -> dict[str, list[str]]:
    """By id of a key, the names among its pools and workers that lead nowhere any more, and did before."""
    gone = {key.public_id: sorted(_leads(key, before) - _leads(key, after)) for key in keys}
    return {public_id: names for public_id, names in gone.items() if names}


def _leads(key: KeyNames, file: PoolFile) -> set[str]:
    """The names of a key that mean something in a file; without pools of its own, it has the default one."""
    pools = [name for name in key.pools or (file.default,) if name in file.pools]
    reached = {worker for name in pools for worker in file.pools[name]}
    return set(pools if key.pools else ()) | reached.intersection(key.workers)


def told(found: Mapping[str, Any]) -> list[str]:
    """The changes, one line each."""
    return [*_worker_lines(found), *_pool_lines(found)]


def _parts(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    parts = {
        "added": {name: new[name] for name in sorted(new) if name not in old},
        "removed": {name: old[name] for name in sorted(old) if name not in new},
        "changed": {name: [old[name], new[name]] for name in sorted(new) if name in old and old[name] != new[name]},
    }
    return {kind: part for kind, part in parts.items() if part}


def _fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """By field; a price by its amounts."""
    was, now = (dict(_flat(one)) for one in (old, new))
    return {name: [was[name], now[name]] for name in sorted(now) if was[name] != now[name]}


def _flat(worker: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in worker.items():
        if name == "price":
            yield from ((f"price.{amount}", said) for amount, said in value.items())
        else:
            yield name, value


def _worker_lines(found: Mapping[str, Any]) -> Iterator[str]:
    workers = found.get("workers", {})
    for kind in ("added", "removed"):
        yield from (f"worker {name}: {kind}" for name in workers.get(kind, ()))
    for name, fields in workers.get("changed", {}).items():
        yield from (f"worker {name}: {field}: {_said(was)} -> {_said(now)}" for field, (was, now) in fields.items())
    yield from (f"worker {name}: another api_key" for name in found.get("rekeyed", ()))


def _pool_lines(found: Mapping[str, Any]) -> Iterator[str]:
    pools = found.get("pools", {})
    for kind in ("added", "removed"):
        yield from (f"pool {name}: {kind} ({', '.join(names)})" for name, names in pools.get(kind, {}).items())
    for name, (was, now) in pools.get("changed", {}).items():
        yield f"pool {name}: {', '.join(was)} -> {', '.join(now)}"
    if "default" in found:
        yield f"default pool: {found['default'][0]} -> {found['default'][1]}"


def _said(value: Any) -> str:
    return "none" if value in (None, "", [], {}) else str(value)
