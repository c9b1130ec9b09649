"""The pool file: what is read, and the one line that each mistake gets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.adapters.host.poolfile import load, resolve_secret, secrets
from gateway.core.pool.handles import WORDS, neutral_handles
from gateway.core.pool.workers import PoolFile, Price, WorkerSpec
from gateway.errors import ConfigError
from scripts.pool_schema import PAGE, render, schema

EXAMPLES = sorted((PAGE.parent.parent / "deploy" / "pools").glob("*.yaml"))
ENV = {name: "k-123" for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "OPENROUTER_API_KEY")} | {
    "RUN_PYTHON_KEY": "k-456"
}
GOOD = """\
workers:
  - name: first
    handle: atlas
    kind: openai
    model: m
    url: http://127.0.0.1:1/v1/
    api_key: env:OPENAI_API_KEY
    price: {input_usd_per_mtok: 0.1, output_usd_per_mtok: 1e1}
    version: 1.10
    params: {temperature: 0.5, seed: 7}
  - name: vote
    handle: chorus
    kind: tool
    url: builtin:vote
pools:
  default: [first, vote]
"""
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "pool.yaml"
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        return path

    return write


JUDGE = GOOD.replace("builtin:vote", "builtin:judge\n    params: {model: first}")


def test_a_judge_has_the_price_and_the_context_of_its_model(write: Write) -> None:
    pool = load(write(JUDGE), ENV)
    first, judge = pool.worker("first"), pool.worker("vote")
    assert (judge.price, judge.context_tokens) == (first.price, first.context_tokens)
    for model in ("vote", "nobody"):
        with pytest.raises(ConfigError, match="a model under workers"):
            load(write(JUDGE.replace("{model: first}", f"{{model: {model}}}")), ENV)


def test_a_good_file(write: Write) -> None:
    pool = load(write(GOOD), ENV)
    first = pool.worker("first")
    assert first.url == "http://127.0.0.1:1/v1"
    assert first.price is not None
    assert first.price.input_usd_per_mtok == Decimal("0.1"), "prices never pass through a float"
    assert first.price.output_usd_per_mtok == 10
    assert first.version == "1.10"
    assert first.params == {"temperature": 0.5, "seed": 7}
    assert [worker.name for worker in pool.pool("default")] == ["first", "vote"]
    assert secrets(pool, ENV) == {"first": "k-123"}


def test_builtin_tools_and_self_need_no_price(write: Write) -> None:
    text = GOOD.replace("    kind: tool\n    url: builtin:vote\n", "    kind: self\n")
    for good in (GOOD, text):
        price = load(write(good), ENV).worker("vote").price
        assert price is not None
        assert price.input_nano_per_mtok == price.output_nano_per_mtok == price.call_nano == 0


# (what to replace, by what, the line, the field, words of the message)
MISTAKES = [
    ("handle: chorus", "handle: atlas", 12, "workers[1].handle", "already the handle of workers[0]; make it unique"),
    ("name: vote", "name: first", 11, "workers[1].name", "already the name of workers[0]; make it unique"),
    ("    model: m\n", "    modle: m\n", 5, "workers[0].modle", "unknown key; did you mean `model`?"),
    ("pools:", "pool:", 15, "pool", "unknown key; did you mean `pools`?"),
    ("input_usd_per_mtok", "input_usd_per_mtoks", 8, "workers[0].price.input_usd_per_mtoks", "did you mean"),
    ("env:OPENAI_API_KEY", "sk-proj-abcdef", 7, "workers[0].api_key", "write `api_key: env:NAME`"),
    ("env:OPENAI_API_KEY", "12345678", 7, "workers[0].api_key", "a secret must not stand in this file"),
    ("seed: 7", "api_key: sk-proj-abcdef", 10, "workers[0].params.api_key", "a secret must not stand"),
    ("http://127", "http://me:sk-proj-abcdef@127", 6, "workers[0].url", "a secret must not stand"),
    ("env:OPENAI_API_KEY", "env:OTHER_KEY", 7, "workers[0].api_key", "`env:OTHER_KEY` is not set"),
    ("env:OPENAI_API_KEY", "file:/no/such", 7, "workers[0].api_key", "cannot be read"),
    ("[first, vote]", "[first, vota]", 16, "pools.default[1]", "no worker is named `vota`; did you mean `vote`?"),
    ("  default: [", "  others: [", 1, "", "`default` is `default`, which is not under pools (others)"),
    ("[first, vote]", "[]", 1, "", "pool `default` is empty"),
    ("handle: atlas", "handle: At Las", 3, "workers[0].handle", "must be 2 to 16 lower-case letters"),
    ("name: first", "name: fir st", 2, "workers[0].name", "must hold no spaces"),
    (
        "kind: openai",
        "kind: openia",
        4,
        "workers[0].kind",
        "input should be 'openai', 'litellm', 'tool', 'mcp'",
    ),
    ("    model: m\n", "", 2, "workers[0]", "kind openai needs `url` (…/v1) and `model`"),
    ("http://127.0.0.1:1/v1/", "ftp://x", 6, "workers[0].url", "must start with http://"),
    ("builtin:vote", "builtin:note", 14, "workers[1].url", "must start with http://"),
    ("0.1,", "-1,", 8, "workers[0].price.input_usd_per_mtok", "greater than or equal to 0"),
    ("0.1,", "cheap,", 8, "workers[0].price.input_usd_per_mtok", "valid decimal"),
    ("input_usd_per_mtok: 0.1, ", "", 2, "workers[0]", "needs input_usd_per_mtok and output_usd_per_mtok"),
    ("builtin:vote", "http://127.0.0.1:2/run", 11, "workers[1].price", "is missing; add `price: {call_usd: …}`"),
    ("    version: 1.10", "    price: 3", 9, "workers[0].price", "given twice; keep one"),
    ("    version: 1.10", "\tversion: 1.10", 9, "", "indented with a tab; use spaces"),
    ("version: 1.10", "version: [", 11, "", "not YAML"),
    ("version: 1.10", "version: &a 1\n    model: *a", 10, "workers[0].model", "given twice"),
    (
        "    model: m\n",
        "    model: m\n    tokenizer: o300k\n",
        6,
        "workers[0].tokenizer",
        "give cl100k_base, o200k_base",
    ),
    ("    model: m\n", "    model: m\n    tokenizer: /no/such.json\n", 6, "workers[0].tokenizer", "cannot be read"),
    ("builtin:vote", "builtin:vote\n    tokenizer: o200k_base", 11, "workers[1]", "kind tool has no tokens of its own"),
    ("tool\n", "!!python/name:os.system x\n", 13, "workers[1].kind", "the tag"),
    ("default: [first", "? [a]\n  : [first", 16, "pools", "a key must be plain text"),
    ("http://127.0.0.1:1/v1/", "\udcff", 6, "", "not UTF-8"),
]


@pytest.mark.parametrize(("old", "new", "line", "field", "words"), MISTAKES)
def test_a_mistake_is_one_line_with_place_and_fix(
    write: Write, old: str, new: str, line: int, field: str, words: str
) -> None:
    assert old in GOOD
    path = write(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load(path, ENV)
    message = caught.value.message
    assert message.startswith(f"{path}:{line}: {field}: " if field else f"{path}:{line}: "), message
    assert words in message
    assert "\n" not in message
    assert "sk-proj" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("# nothing\n", "empty"),
        ("- a\n- b\n", "must be a mapping"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("workers: []\npools: {}\n", "workers"),
        ("workers: &w [*w]\n", "aliases"),
        ("x: " + "[" * 40 + "]" * 40, "deeply nested"),
        ("x: " + "[" * 2000, "not YAML"),
        ("x: [" + "1," * 10_001 + "]", "too many values"),
        ("a" * (1 << 19), "larger than"),
    ],
)
def test_files_that_are_no_pool_file(write: Write, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(write(text), ENV)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml", ENV)


@given(st.text(max_size=300))
def test_no_text_gives_anything_but_a_pool_or_an_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, errors="ignore")
    with pytest.raises(ConfigError):
        load(path, ENV)


def test_all_mistakes_are_named_at_once_in_file_order(write: Write) -> None:
    changes = [
        ("name: first", "nam: first"),
        ("kind: openai", "kindd: openai"),
        ("http://127.0.0.1:1/v1/", "127.0.0.1:1/v1"),
        ("input_usd_per_mtok: 0.1", "input: 0.1"),
        ("handle: chorus", "handle: Cho rus"),
        ("[first, vote]", "[first, cheep]"),
    ]
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load(path, ENV)
    lines = caught.value.message.splitlines()
    assert [line.removeprefix(f"{path}:").split(": ")[0] for line in lines] == ["2", "4", "6", "8", "12", "16"]
    told = (
        "workers[0].nam: unknown key; did you mean `name`?",
        "workers[0].kindd: unknown key; did you mean `kind`?",
        "workers[0].url: `url` must start with http://",
        "workers[0].price.input: unknown key; did you mean `input_usd_per_mtok`?",
        "workers[1].handle: must be 2 to 16 lower-case letters",
        "pools.default[1]: no worker is named `cheep`",
    )
    assert all(what in line for what, line in zip(told, lines, strict=True))


def test_what_the_workers_refer_to_is_checked_at_once_too(write: Write) -> None:
    text = GOOD.replace("OPENAI_API_KEY", "ONE_KEY").replace("builtin:vote", "http://127.0.0.1:2/run")
    text = text.replace("    kind: tool\n", "    kind: tool\n    api_key: env:TWO_KEY\n")
    with pytest.raises(ConfigError) as caught:
        load(write(text), ENV)
    price, *keys = caught.value.message.splitlines()
    assert "workers[1].price: is missing" in price
    assert ["`env:ONE_KEY` is not set" in keys[0], "`env:TWO_KEY` is not set" in keys[1]] == [True, True]


def test_a_worker_without_a_handle_gets_a_neutral_one(write: Write) -> None:
    text = (
        GOOD.replace("    handle: atlas\n", "")
        .replace("    handle: chorus\n", "")
        .replace("version: 1.10", "bills: no")
    )
    jsonschema.validate(yaml.safe_load(text), schema())
    pool, again = load(write(text), ENV), load(write(text.replace("  - name: vote", "\n  - name: vote")), ENV)
    handles = {worker.name: worker.handle for worker in pool.workers}
    assert set(handles.values()) <= set(WORDS)
    assert handles == {worker.name: worker.handle for worker in again.workers}
    assert "first" not in handles.values()


@given(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=200), st.sets(st.sampled_from(WORDS)))
def test_handles_are_unique_valid_and_the_same_in_any_order(names: list[str], taken: set[str]) -> None:
    handles = neutral_handles(names, taken)
    assert len({*handles.values(), *taken}) == len(names) + len(taken)
    assert all(re.fullmatch(r"[a-z][a-z0-9]{1,15}", handle) for handle in handles.values())
    assert neutral_handles(reversed(names), taken) == handles


def test_a_model_at_anthropic_itself_has_the_key_of_its_own_variable() -> None:
    price = {"input_usd_per_mtok": 1, "output_usd_per_mtok": 1}
    entry = {"kind": "litellm", "model": "anthropic/claude-sonnet-4-5", "price": price}
    workers = [
        {**entry, "name": "a", "handle": "aa"},
        {**entry, "name": "b", "handle": "bb", "url": "http://elsewhere"},
        {**entry, "name": "c", "handle": "cc", "api_key": "env:OTHER"},
        {**entry, "name": "d", "handle": "dd", "model": "gemini/gemini-2.5-pro"},
    ]
    pool = PoolFile.model_validate({"workers": workers, "pools": {"default": ["a"]}})
    assert secrets(pool, {"ANTHROPIC_API_KEY": "theirs", "OTHER": "ours"}) == {"a": "theirs", "c": "ours"}
    assert secrets(pool, {"OTHER": "ours"}) == {"c": "ours"}


def test_secrets_by_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("  sk-in-file\n")
    assert resolve_secret(f"file:{path}", {}) == "sk-in-file"


@pytest.mark.parametrize(
    "content", [b"", b" \n", b"x" * 20_000, b"\xff\xfe", b"two words", b"two\nlines", b"k\xc3\xa9y"]
)
def test_a_secret_file_that_holds_no_key(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        resolve_secret(f"file:{path}", {})
    assert str(path) in caught.value.message
    assert "words" not in caught.value.message


@pytest.mark.parametrize("value", [None, "", "  ", "a b", "a\nb"])
def test_an_environment_that_holds_no_key(value: str | None) -> None:
    with pytest.raises(ConfigError, match="env:MY_KEY"):
        resolve_secret("env:MY_KEY", {} if value is None else {"MY_KEY": value})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_loads_and_meets_the_published_schema(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), json.loads(PAGE.read_text()))
    if "litellm" in path.read_text() and find_spec("litellm") is None:
        with pytest.raises(ConfigError, match="litellm"):
            load(path, ENV)
        return
    pool = load(path, ENV)
    assert all(worker.price is not None for worker in pool.workers)
    assert all(worker.description for worker in pool.workers)
    brands = ("gpt", "claude", "gemini", "qwen", "llama", "openai", "deepseek")
    assert not any(brand in worker.handle for worker in pool.workers for brand in brands)


def test_there_are_the_promised_examples() -> None:
    assert {path.stem for path in EXAMPLES} == {"openai", "anthropic", "gemini", "openrouter", "local", "mixed", "smol"}


def test_the_published_schema_is_current() -> None:
    assert PAGE.read_text() == render(), "run `make docs`"


def test_the_schema_refuses_what_the_reader_refuses() -> None:
    good = yaml.safe_load(GOOD.replace("1.10", "'1.10'"))
    jsonschema.validate(good, schema())
    good["workers"][0]["modle"] = "m"
    with pytest.raises(jsonschema.ValidationError, match="modle"):
        jsonschema.validate(good, schema())


def test_every_field_is_documented() -> None:
    text = (PAGE.parent / "pool.md").read_text()
    fields = [*PoolFile.model_fields, *WorkerSpec.model_fields, *Price.model_fields]
    assert [field for field in fields if f"`{field}`" not in text] == []


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        ({"kind": "litellm", "model": "gemini/x", "proxy": "http://p:1"}, "follows HTTPS_PROXY"),
        ({"kind": "tool", "url": "builtin:vote", "ca_file": "/x.pem"}, "it has no URL; leave ca_file out"),
        ({"kind": "openai", "model": "m", "url": "https://a/v1", "client_key": "/k"}, "`client_key` needs"),
        ({"kind": "openai", "model": "m", "url": "https://a/v1", "proxy": "http://me:pass@p:1"}, "proxy: env:NAME"),
        ({"kind": "openai", "model": "m", "url": "https://a/v1", "proxy": "env:NO_SUCH_PROXY"}, "NO_SUCH_PROXY"),
        ({"kind": "openai", "model": "m", "url": "https://a/v1", "proxy": "socks5://p:1"}, "takes HTTP proxies"),
        ({"kind": "openai", "model": "m", "url": "https://a/v1", "ca_file": "/nowhere.pem"}, "No such file"),
    ],
)
def test_a_way_that_cannot_be_taken_is_a_mistake_of_the_file(
    tmp_path: Path, worker: dict[str, Any], words: str
) -> None:
    price = {"call_usd": 0} if worker["kind"] == "tool" else {"input_usd_per_mtok": 0, "output_usd_per_mtok": 0}
    path = tmp_path / "pool.yaml"
    path.write_text(json.dumps({"workers": [{"name": "w", "price": price, **worker}], "pools": {"default": ["w"]}}))
    with pytest.raises(ConfigError) as refused:
        load(path, {})
    assert words in refused.value.message
    assert "pass@" not in refused.value.message
