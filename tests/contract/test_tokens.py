"""The port that counts tokens: the same suite on the fake and on real tokenizers, and what the real ones count."""

from __future__ import annotations

import base64
import json
import random
import socket
import string
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.adapters.upstream import tokens
from gateway.adapters.upstream.tokens import ENCODINGS, PIECE_CHARS, Tokenizers, check, tokenizer_of
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import ConfigError
from gateway.service.ports.request import TokenCount, TokenCounter
from tests.fakes.tokens import WordCounter
from tests.kit import model_worker
from tests.waiting import BOUND_S

SHIPPED = Path(__file__).parents[2] / "policy" / "shipped" / "arena-3" / "tokenizer.json"
WORDS = " ".join(random.Random(5).choices(["a", "gateway", "counts", "été", "日本", "0xdead", "x = 1;"], k=6000))


def worker(tokenizer: str | None = None, model: str = "gpt-4o", **more: Any) -> WorkerSpec:
    return model_worker("alpha", "atlas", tokenizer=tokenizer, **{"model": model, **more})


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabularies are there, and a busy machine may take its time."""
    for name in ENCODINGS:
        check(name)
    monkeypatch.setattr(tokens, "COUNT_S_MAX", BOUND_S)
    monkeypatch.setattr(tokens, "MEASURE_S_MAX", BOUND_S)


@pytest.fixture(params=["fake", "o200k_base", "cl100k_base", "tokenizer.json", "none named"])
def counting(request: pytest.FixtureRequest) -> tuple[TokenCounter, WorkerSpec]:
    name = {"tokenizer.json": str(SHIPPED), "none named": None}.get(request.param, request.param)
    return (WordCounter(), worker()) if name == "fake" else (Tokenizers(), worker(name))


async def count(counting: tuple[TokenCounter, WorkerSpec], *texts: str, at_most: int = 10**9) -> int:
    counted = await counting[0].count(counting[1], texts, at_most)
    assert counted is not None
    return counted


async def test_nothing_said_is_nothing(counting: tuple[TokenCounter, WorkerSpec]) -> None:
    assert await count(counting) == await count(counting, "", "") == 0


async def test_texts_add_up_and_never_pass_the_bound(counting: tuple[TokenCounter, WorkerSpec]) -> None:
    one, two = await count(counting, WORDS), await count(counting, "hello world")
    assert two >= 1
    assert await count(counting, WORDS, "hello world") == one + two
    for bound in (0, 1, two, one, one + two - 1):
        assert await count(counting, WORDS, "hello world", at_most=bound) == bound


async def test_a_worker_without_a_tokenizer_is_not_counted(counting: tuple[TokenCounter, WorkerSpec]) -> None:
    fake = isinstance(counting[0], WordCounter)
    counter: TokenCounter = WordCounter(without=["alpha"]) if fake else counting[0]
    tool = WorkerSpec(name="alpha", handle="atlas", kind="tool", url="builtin:vote")
    assert await counter.count(tool, ["hello"], 10) is None


# ---------------------------------------------------------------- what they count

# of OpenAI's cookbook, "How to count tokens with tiktoken"
KNOWN = [
    ("cl100k_base", "antidisestablishmentarianism", 6),
    ("cl100k_base", "2 + 2 = 4", 7),
    ("cl100k_base", "お誕生日おめでとう", 9),
    ("o200k_base", "antidisestablishmentarianism", 6),
    ("o200k_base", "2 + 2 = 4", 7),
    ("o200k_base", "お誕生日おめでとう", 8),
    ("o200k_base", "tiktoken is great!", 6),
]


@pytest.mark.parametrize(("encoding", "text", "expected"), KNOWN)
async def test_openais_encodings_count_as_openai_says(encoding: str, text: str, expected: int) -> None:
    assert await Tokenizers().count(worker(encoding), [text], 100) == expected


async def test_a_tokenizer_json_counts_as_the_library_does_without_marks_of_its_own() -> None:
    from tokenizers import Tokenizer

    whole = Tokenizer.from_file(str(SHIPPED)).encode("Which of these is 6 × 7?", add_special_tokens=False)
    assert await Tokenizers().count(worker(str(SHIPPED)), ["Which of these is 6 × 7?"], 100) == len(whole.ids)


@pytest.mark.parametrize("name", [*ENCODINGS, str(SHIPPED)])
@pytest.mark.parametrize(
    "text",
    [WORDS, "a" * 30_000, " " * 30_000, "\n \n" * 9000, "日本語" * 9000, "\ud800" * 20_000, "A1b2" * 9000,
     "I'll  go\n" * 4000],
    ids=["words", "letters", "blanks", "lines", "no blanks", "halves", "base64", "two blanks"],
)  # fmt: skip
def test_a_long_text_in_pieces_has_no_fewer_tokens_than_in_one(name: str, text: str) -> None:
    one = tokens._tokens(name)
    pieces = list(tokens._pieces(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE_CHARS
    whole, counted = one(text), sum(map(one, pieces))
    assert whole <= counted <= whole + 2 * len(pieces)


@pytest.mark.parametrize("name", [*ENCODINGS, str(SHIPPED)])
def test_no_piece_of_a_megabyte_keeps_the_interpreter_for_long(name: str) -> None:
    one, longest = tokens._tokens(name), 0.0
    for text in (WORDS * 10, "é" * 500_000, " " * 500_000):
        for piece in tokens._pieces(text):
            began = time.thread_time()  # processor time, so that other programs do not count
            one(piece)
            longest = max(longest, time.thread_time() - began)
    assert longest < 0.05


async def test_a_count_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "COUNT_S_MAX", 0.0)
    assert await Tokenizers().count(worker("o200k_base"), [WORDS], 10**9) is None


def test_nothing_is_asked_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("a socket")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(tokens, "_loaded", {})
    for name in (*ENCODINGS, str(SHIPPED)):
        check(name)


# ---------------------------------------------------------------- which one


@pytest.mark.parametrize(
    ("model", "expected"),
    [("gpt-4o-mini", "o200k_base"), ("gpt-4.1", "o200k_base"), ("gpt-5", "o200k_base"), ("o3", "o200k_base"),
     ("gpt-4", "cl100k_base"), ("gpt-4-turbo", "cl100k_base"), ("openai/gpt-3.5-turbo", "cl100k_base"),
     ("text-embedding-3-small", "cl100k_base"), ("qwen2.5-7b", "o200k_base")],
)  # fmt: skip
def test_a_model_that_names_no_tokenizer_has_the_one_of_its_name_or_the_newest(model: str, expected: str) -> None:
    assert tokenizer_of(worker(model=model)) == expected
    assert tokenizer_of(worker("cl100k_base", model=model)) == "cl100k_base"


def test_without_the_vocabularies_only_a_path_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_vocabularies", lambda: None)
    monkeypatch.setattr(tokens, "_loaded", {})
    assert tokenizer_of(worker()) is None
    check(str(SHIPPED))
    with pytest.raises(ConfigError, match="extra litellm"):
        check("o200k_base")


def test_a_vocabulary_that_is_not_openais_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ENCODINGS["cl100k_base"][0]).write_text("AA== 0\n")
    monkeypatch.setattr(tokens, "_vocabularies", lambda: tmp_path)
    monkeypatch.setattr(tokens, "_loaded", {})
    with pytest.raises(ConfigError, match="not OpenAI's"):
        check("cl100k_base")


@pytest.mark.parametrize("name", ["o300k", "gpt-4o", "/nowhere/tokenizer.json", "cl100k_base.json"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check(name)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for number, text in enumerate(["", "{}", json.dumps({"model": {"type": "BPE"}}), "\x00"]):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"is not a Hugging Face tokenizer\.json"):
            check(str(path))


# ---------------------------------------------------------------- the bound of a stand-in

SEED = random.Random(13)
LETTERS, DIGITS, MARKS = string.ascii_letters, string.digits, string.punctuation
SCRIPTS = {
    "prose": "It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 50,
    "code": "    for index, value in enumerate(values):\n        total[index] += value ** 2  # squares\n" * 50,
    "json": '{"id": 1234567, "name": "Łódź", "tags": ["a", "b"], "ok": true, "price": 12.5},\n' * 50,
    "letters": "".join(SEED.choices(LETTERS, k=3000)),
    "digits": "".join(SEED.choices(DIGITS, k=3000)),
    "hex": SEED.randbytes(1500).hex(),
    "marks": "".join(SEED.choices(MARKS, k=3000)),
    "base64": base64.b64encode(SEED.randbytes(3000)).decode(),
    "blanks": " " * 2000 + "\n" * 500 + " \t" * 500,
    "dashes": "-" * 1000 + "=" * 1000,
    "long words": " ".join(["internationalization", "antidisestablishmentarianism", "incomprehensibilities"] * 40),
    "chinese": "今天的天气很好，我们一起去公园散步，看看那里的花和树木。" * 20,
    "rare signs": "".join(chr(SEED.randrange(0x4E00, 0x9FFF)) for _ in range(1000)),
    "russian": "Сегодня хорошая погода, и мы пойдём гулять в парк. " * 20,
    "thai": "วันนี้อากาศดีมาก เราไปเดินเล่นที่สวนสาธารณะกันเถอะ" * 20,
    "emoji": "".join(chr(SEED.randrange(0x1F300, 0x1F600)) for _ in range(1000)),
}


@pytest.mark.parametrize("script", SCRIPTS)
async def test_the_bound_of_a_stand_in_covers_other_tokenizers(script: str) -> None:
    text = SCRIPTS[script]
    size = await Tokenizers().measure(worker(model="anthropic/claude-sonnet-4-5"), [text])
    assert size is not None
    others = Path(str(tokens._vocabularies())) / "anthropic_tokenizer.json"
    claude = Tokenizer.from_file(str(others)).encode(text, add_special_tokens=False)
    assert max(len(claude.ids), tokens._tokens("cl100k_base")(text)) <= size.tokens_max <= len(text.encode())


@pytest.mark.parametrize(("model", "own"), [("openai/gpt-5.1", True), ("o3-mini", True), ("gpt-neox-20b", False)])
def test_openais_encodings_are_the_own_ones_of_openais_models(model: str, own: bool) -> None:
    assert tokens.is_own(worker(model=model)) is own
    assert tokens.is_own(worker("o200k_base", model=model))


async def test_a_count_by_the_workers_own_tokenizer_has_a_tenth_more_for_a_bound() -> None:
    size = await Tokenizers().measure(worker("o200k_base"), ["antidisestablishmentarianism", "2 + 2 = 4"])
    assert size == TokenCount(13, 15)
    assert await Tokenizers().measure(worker(str(SHIPPED)), [""]) == TokenCount(0, 0)


async def test_a_text_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Tokenizers()
    before = await counter.measure(worker("o200k_base"), [WORDS])
    monkeypatch.setattr(tokens, "_sizes_of", lambda name: pytest.fail("measured again"))
    assert await counter.measure(worker("o200k_base"), [WORDS]) == before


async def test_a_size_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MEASURE_S_MAX", 0.0)
    assert await Tokenizers().measure(worker("o200k_base"), [WORDS]) is None


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "SIZES_MAX", 2)
    counter = Tokenizers()
    assert await counter.measure(worker("o200k_base"), ["a", "b", "c"]) is not None
    assert len(counter._sizes) == 2
