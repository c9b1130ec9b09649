"""Decoding in this process: bounds, the prefix cache, forced tokens, grammars and text."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from gateway.errors import VersionRefused
from policy.serve.engine import Busy, DecodeRequest, Drafts, Engine, PrefixCache, TokenSample
from policy.serve.runtime import Cache, Runtime
from policy.serve.tokens import BadSchema, TextStream, Tokens
from tests.contract.conductors import LONG_SCHEMA, SCHEMA, text_schema
from tests.tiny_model import write_tiny_model
from tests.waiting import until

MESSAGES = [{"role": "user", "content": "Plan for this request. " * 6}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("engine") / "tiny")


@pytest.fixture(scope="module")
def base(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights without a graph, as a base comes: the runtime builds its own."""
    place = tmp_path_factory.mktemp("engine") / "base"
    shutil.copytree(directory, place)
    (place / "graph.onnx").unlink()
    return place


def make_engine(directory: Path, threads: int = 1, queue_max: int = 1) -> Engine:
    runtime = Runtime(directory)
    return Engine(runtime, Tokens(directory, runtime.shape), threads, queue_max)


def job(engine: Engine, **changes: Any) -> DecodeRequest:
    fields: dict[str, Any] = {
        "prompt_ids": engine.tokens.encode_chat(MESSAGES),
        "schema": SCHEMA,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 1,
        "tokens_max": 200,
    }
    return DecodeRequest(**(fields | changes))


def text(engine: Engine, sampled: list[TokenSample]) -> str:
    return b"".join(engine.tokens.token_bytes(s.token) for s in sampled).decode()


def count_passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each pass from now on."""
    passes: list[int] = []
    states = engine.runtime.states

    def counting(ids: Sequence[int], cache: Cache, rows: int = 1) -> Any:
        passes.append(len(ids))
        return states(ids, cache, rows)

    monkeypatch.setattr(engine.runtime, "states", counting)
    return passes


def plain_logprobs(engine: Engine, sampled: list[TokenSample]) -> list[float]:
    """The log-probs of a plain decode: the whole vocabulary, one pass a token, no guess."""
    logits, cache = engine.runtime.forward(job(engine).prompt_ids, engine.runtime.empty())
    matcher = engine.tokens.matcher(SCHEMA)
    logprobs = []
    for s in sampled:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        scores = np.where(bits[: len(logits)] == 1, logits.astype(np.float64), -np.inf)
        logprobs.append(float(scores[s.token] - np.log(np.exp(scores).sum())))
        matcher.consume_token(s.token)
        logits, cache = engine.runtime.forward([s.token], cache)
    return logprobs


@pytest.mark.parametrize("kind", ["sealed", "base"])
def test_forced_tokens_skip_the_model_and_change_no_logprob(
    kind: str, directory: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(base if kind == "base" else directory)
    passes = count_passes(engine, monkeypatch)
    sampled = list(engine.decode(job(engine)))
    forced = [s for s in sampled if s.logprob == 0.0]
    assert len(forced) > 5
    assert len(passes) <= len(sampled) - len(forced)
    assert passes[0] > len(job(engine).prompt_ids)  # what is forced at the beginning goes in with the prompt
    jsonschema.validate(json.loads(text(engine, sampled)), SCHEMA)
    assert [s.logprob for s in sampled] == pytest.approx(plain_logprobs(engine, sampled), abs=1e-4)


def test_a_guess_saves_passes_and_changes_no_token(
    directory: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sealed = make_engine(base), make_engine(directory)
    passes = count_passes(engine, monkeypatch)
    for seed in range(6):
        first = list(engine.decode(job(engine, seed=seed)))
        unguessed = len(passes)
        again = list(engine.decode(job(engine, seed=seed)))  # the guess is the whole plan
        assert len(passes) - unguessed <= 1 + len(again) // 8 < unguessed
        expected = list(sealed.decode(job(sealed, seed=seed)))
        assert [s.token for s in first] == [s.token for s in again] == [s.token for s in expected]
        assert [s.logprob for s in again] == pytest.approx([s.logprob for s in expected], abs=1e-4)
        passes.clear()


def test_a_guess_stays_within_the_bounds_and_the_grammar(base: Path) -> None:
    engine = make_engine(base)
    full = list(engine.decode(job(engine)))
    short = list(engine.decode(job(engine, tokens_max=len(full) - 1)))
    assert [s.token for s in short] == [s.token for s in full][:-1]
    assert short[-1].finish == "length"
    other = list(engine.decode(job(engine, schema=text_schema(4))))
    jsonschema.validate(json.loads(text(engine, other)), text_schema(4))


def test_a_draft_follows_the_longest_end_it_knows() -> None:
    drafts = Drafts(plans_max=2)
    assert drafts.after([1, 2]) == ()
    drafts.add([9, 9, 9])
    drafts.add([1, 2, 3, 4])
    drafts.add([5, 2, 6, *range(20, 40)])
    assert drafts.after([1, 2]) == (3, 4)
    assert drafts.after([0, 2]) == (6, *range(20, 27))
    assert drafts.after([9]) == ()  # forgotten
    assert drafts.after([4]) == drafts.after([]) == ()


def test_a_shared_beginning_is_computed_once_and_changes_nothing(directory: Path) -> None:
    engine, fresh = make_engine(directory), make_engine(directory)
    longer = [*MESSAGES, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And now?"}]
    list(engine.decode(job(engine)))
    ids = engine.tokens.encode_chat(longer)
    warm = list(engine.decode(job(engine, prompt_ids=ids)))
    cold = list(fresh.decode(job(fresh, prompt_ids=ids)))
    assert [s.token for s in warm] == [s.token for s in cold]
    assert [s.logprob for s in warm] == pytest.approx([s.logprob for s in cold], abs=1e-4)


def test_the_prefix_cache_is_bounded_and_leaves_one_token() -> None:
    kept = PrefixCache(prefixes_max=2)
    arrays = (np.arange(40, dtype=np.float32).reshape(1, 1, 40, 1),)
    for first in range(3):
        kept.add([first, *range(1, 40)], Cache(40, arrays))
    assert kept.longest([0, *range(1, 40)]) is None
    same = kept.longest([2, *range(1, 40)])
    assert same is not None
    assert same.length == 39
    assert kept.longest([2, *range(1, 10), 99]) is None  # too short to be worth it


def test_the_prefix_cache_is_bounded_in_bytes() -> None:
    kept = PrefixCache(bytes_max=1000)
    small, large = np.zeros((1, 1, 100, 1), np.float32), np.zeros((1, 1, 300, 1), np.float32)
    for first in range(3):
        kept.add([first, *range(1, 100)], Cache(100, (small,)))
    kept.add(range(500, 800), Cache(300, (large,)))  # alone too large
    hits = [kept.longest([first, *range(1, 101)]) is not None for first in range(3)]
    assert hits == [False, True, True]
    assert kept.longest(range(500, 801)) is None


async def test_the_queue_is_bounded(directory: Path) -> None:
    engine = make_engine(directory, threads=1, queue_max=0)
    stream = engine.stream(job(engine, schema=LONG_SCHEMA, tokens_max=700))
    await anext(stream)
    assert engine.full
    with pytest.raises(Busy):
        await anext(engine.stream(job(engine)))
    await stream.aclose()
    await until(lambda: not engine.in_flight)
    engine.close()


async def test_a_failing_decode_reaches_its_reader(directory: Path) -> None:
    engine = make_engine(directory)
    with pytest.raises(BadSchema):
        await anext(engine.stream(job(engine, schema={"type": "nonsense"})))
    await asyncio.sleep(0)
    assert engine.in_flight == 0
    engine.close()


def test_free_text_and_alternatives(directory: Path) -> None:
    engine = make_engine(directory)
    sampled = list(engine.decode(job(engine, schema=None, tokens_max=8, top_logprobs=3)))
    assert all(len(s.top) == 3 and s.top[0][1] >= s.top[1][1] for s in sampled)
    assert sampled[-1].finish == "length" or sampled[-1].token in engine.tokens.eos_ids


def test_torn_characters_are_joined_and_torn_ends_replaced() -> None:
    stream = TextStream()
    euro = "€".encode()
    assert [stream.feed(euro[:1]), stream.feed(euro[1:]), stream.feed(euro[:2], final=True)] == ["", "€", "�"]


def test_special_tokens_have_names_and_no_bytes(directory: Path) -> None:
    tokens = make_engine(directory).tokens
    assert (tokens.token_bytes(2), tokens.token_text(2)) == (b"", "<|im_end|>")


def test_compiled_grammars_are_bounded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policy.serve.tokens.GRAMMARS_KEPT", 2)
    tokens = make_engine(directory).tokens
    for size in range(1, 5):
        tokens.matcher(text_schema(size + 2))
    assert len(tokens._grammars) == 2


def test_a_template_file_wins_and_a_refusing_one_says_so(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] + eos_token }}")
    shape = Runtime(model).shape
    assert Tokens(model, shape).encode_chat([{"role": "user", "content": "a"}])[-1] == 2
    (model / "chat_template.jinja").write_text("{{ nothing.at.all }}")
    with pytest.raises(ValueError, match="template"):
        Tokens(model, shape).encode_chat(MESSAGES)


@pytest.mark.parametrize("text_", ["{}", '{"chat_template": "{% if %}"}', "["])
def test_a_bad_template_is_named(text_: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    (model / "tokenizer_config.json").write_text(text_)
    with pytest.raises(VersionRefused, match="template"):
        Tokens(model, Runtime(model).shape)
