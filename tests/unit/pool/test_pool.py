"""The pool file's model: what a worker must say, names that agree, prices that never round down."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.core.pool.revision import plain_pools
from gateway.core.pool.workers import PoolFile, Price, WorkerSpec, pool_hash
from tests.kit import model_worker

PRICE = {"input_usd_per_mtok": "0.15", "output_usd_per_mtok": "0.6"}


def raw(name: str = "local", **changes: Any) -> dict[str, Any]:
    worker = {
        "name": name,
        "handle": name,
        "kind": "openai",
        "model": "m",
        "url": "http://127.0.0.1:8000/v1",
        "price": PRICE,
    }
    return {**worker, **changes}


def spec(name: str = "local", **changes: Any) -> WorkerSpec:
    return WorkerSpec.model_validate(raw(name, **changes))


def pool_file(**changes: Any) -> PoolFile:
    whole = {"workers": [raw("ember"), raw("atlas")], "pools": {"default": ["atlas", "ember"], "one": ["ember"]}}
    return PoolFile.model_validate({**whole, **changes})


def test_pools_list_their_workers_in_their_own_order() -> None:
    pools = pool_file()
    assert [worker.name for worker in pools.pool("default")] == ["atlas", "ember"]
    assert pools.pool("one") == (pools.worker("ember"),)
    assert pools.worker("atlas").handle == "atlas"


@pytest.mark.parametrize("name", ["nobody", ""])
def test_an_unknown_name_is_a_key_error(name: str) -> None:
    with pytest.raises(KeyError):
        pool_file().worker(name)
    with pytest.raises(KeyError):
        pool_file().pool(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": [raw("ember"), raw("ember", handle="other")]}, "two workers share the name `ember`"),
        ({"workers": [raw("ember"), raw("atlas", handle="ember")]}, "two workers share the handle `ember`"),
        ({"pools": {"default": []}}, "pool `default` is empty"),
        ({"pools": {"default": ["ember", "atlas", "ember"]}}, "pool `default` names a worker twice"),
        ({"pools": {"default": ["nobody"]}}, "names `nobody`, which is not under workers"),
        ({"default": "best"}, r"`default` is `best`, which is not under pools \(default, one\)"),
        ({"pools": {}}, "`default` is `default`, which is not under pools"),
        ({"workers": []}, "at least 1 item"),
        ({"worker": []}, "Extra inputs"),
    ],
)
def test_names_must_agree(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        pool_file(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": None}, "kind openai needs `url`"),
        ({"model": None}, "kind openai needs `url`"),
        ({"kind": "litellm", "model": None}, "kind litellm needs `model`"),
        ({"kind": "tool", "url": None}, "kind tool needs `url`"),
        ({"kind": "magic"}, "'openai', 'litellm', 'tool', 'mcp' or 'self'"),
        ({"url": "ftp://x/v1"}, "must start with http"),
        ({"url": "local:"}, "must start with http"),
        ({"url": "local:gpt-9"}, "local models are smollm2, of kind openai"),
        ({"kind": "tool", "url": "local:smollm2"}, "local models are smollm2, of kind openai"),
        ({"url": ""}, "must start with http"),
        ({"url": "http://"}, "must start with http"),
        ({"url": "builtin:vote\n"}, "must start with http"),
        ({"url": "builtin:exec"}, "must start with http"),
        ({"handle": "Atlas"}, "pattern"),
        ({"handle": "a"}, "pattern"),
        ({"handle": "a" * 17}, "pattern"),
        ({"handle": "atlas\n"}, "pattern"),
        ({"name": "/x"}, "pattern"),
        ({"name": "a b"}, "pattern"),
        ({"api_key": "sk-secret"}, "pattern"),
        ({"tags": ["UPPER"]}, "pattern"),
        ({"context_tokens": 0}, "greater than or equal"),
        ({"timeout_s": 0}, "greater than 0"),
        ({"price": {"input_usd_per_mtok": "1"}}, "needs input_usd_per_mtok and output_usd_per_mtok"),
        ({"price": {"call_usd": "1"}}, "needs input_usd_per_mtok and output_usd_per_mtok"),
        ({"price": {**PRICE, "input_usd_per_mtok": "-1"}}, "greater than or equal"),
        ({"price": {**PRICE, "input_usd_per_mtok": "NaN"}}, "finite"),
        ({"price": {**PRICE, "input_usd_per_mtok": "Infinity"}}, "finite"),
        ({"price": {**PRICE, "input_usd": "1"}}, "Extra inputs"),
        ({"kind": "litellm", "model": "gemini/x", "hosted": ["web_search"]}, "kind openai or of Anthropic's models"),
        ({"kind": "litellm", "model": "gemini/x", "proxy": "http://p:1"}, "follows HTTPS_PROXY"),
    ],
)
def test_a_worker_that_cannot_be_used_says_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec(**changes)


def test_workers_of_every_kind() -> None:
    assert spec(url="http://127.0.0.1:8000/v1/").url == "http://127.0.0.1:8000/v1"
    assert spec(kind="litellm", model="anthropic/claude", url=None, price=None).price is None
    claude = spec(kind="litellm", model="anthropic/claude", url=None, hosted=("web_search",), proxy="http://p:1")
    assert (claude.claude, claude.speaks_messages, spec().claude) == ("claude", True, "")
    assert spec(kind="self", model=None, url=None).kind == "self"
    tool = spec(kind="tool", model=None, url="builtin:vote", price={"call_usd": "0.001"})
    assert tool.price is not None
    assert tool.price.call_nano == 1_000_000


@given(
    st.decimals(min_value=0, max_value=1000, places=12, allow_nan=False),
    st.sampled_from(["input_usd_per_mtok", "output_usd_per_mtok", "call_usd"]),
)
def test_prices_are_never_rounded_down(usd: Decimal, field: str) -> None:
    price = Price.model_validate({field: usd})
    nano = {
        "input_usd_per_mtok": price.input_nano_per_mtok,
        "output_usd_per_mtok": price.output_nano_per_mtok,
        "call_usd": price.call_nano,
    }
    exact = usd * 10**9
    assert exact <= nano.pop(field) < exact + 1
    assert set(nano.values()) == {0}


def test_the_hash_of_a_pool_knows_what_its_workers_are_and_not_their_order_or_secrets() -> None:
    ember, atlas = spec("ember"), spec("atlas")
    assert pool_hash((ember, atlas)) == pool_hash((atlas, ember))
    assert pool_hash((ember,)) == pool_hash((spec("ember", api_key="env:OTHER"),))
    different = {
        pool_hash(workers)
        for workers in (
            (ember, atlas),
            (ember,),
            (spec("ember", version="2"),),
            (spec("ember", price={**PRICE, "call_usd": "1"}),),
            (),
        )
    }
    assert len(different) == 5


def test_a_changed_copy_of_a_worker_has_a_hash_and_a_price_of_its_own() -> None:
    one = spec()
    before = pool_hash((one,))
    other = one.model_copy(update={"model": "n"})
    dearer = one.model_copy(update={"price": Price(input_usd_per_mtok=Decimal(1), output_usd_per_mtok=Decimal(2))})
    assert len({before, pool_hash((other,)), pool_hash((dearer,))}) == 3
    assert pool_hash((one.model_copy(),)) == before == pool_hash((one,))
    assert dearer.price is not None
    assert dearer.price.input_nano_per_mtok == 1_000_000_000


def test_tiers_of_prices_change_the_hash_of_those_that_have_them_alone() -> None:
    plain = model_worker("alpha", "atlas")
    assert '"above"' not in plain.identity
    assert plain.price is not None
    tier = {"prompt_tokens": 200_000, "input_usd_per_mtok": "2.5"}
    tiered = model_worker("alpha", "atlas", price={**plain.price.model_dump(), "above": [tier]})
    assert pool_hash((tiered,)) != pool_hash((plain,))
    file = PoolFile(workers=(tiered,), pools={"default": ("alpha",)})
    assert plain_pools(file)["workers"]["alpha"]["price"]["above"] == [tier]
