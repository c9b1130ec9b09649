"""The table of tokens: WordPiece, the two halves of a vector, other alphabets, and a file that is damaged."""

from __future__ import annotations

import hashlib
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.loop.experience import meaning
from gateway.core.loop.experience.likeness import EMBEDDED_CHARS_MAX, EMBEDDING_DIM, HASHED
from gateway.core.loop.experience.meaning import (
    CACHED_WORDS_MAX,
    TABLE_FILE,
    WORD_CHARS_MAX,
    TokenTable,
    by_meaning,
    read_table,
)
from gateway.errors import ConfigError
from gateway.files import shipped

SHIPPED = by_meaning(shipped(TABLE_FILE))
VOCABULARY = ["a", "ab", "##c", "d", "中", "naive"]
SMALL = TokenTable(
    {token: row for row, token in enumerate(VOCABULARY)}, np.eye(6, dtype=np.int8), np.ones(6, np.float32)
)


def near(a: str, b: str) -> float:
    return sum(x * y for x, y in zip(SHIPPED.embed(a), SHIPPED.embed(b), strict=True))


@given(st.text(st.characters(), max_size=300))
def test_any_text_has_an_embedding_of_length_one_or_none(text: str) -> None:
    vector = SHIPPED.embed(text)
    assert len(vector) == EMBEDDING_DIM
    norm = math.sqrt(sum(x * x for x in vector))
    assert norm == pytest.approx(1) or norm == 0


@given(st.lists(st.text(max_size=60) | st.sampled_from(["", "a a b", "7", "中文 naïve"]), max_size=6))
def test_texts_have_the_same_vectors_together_as_alone(texts: list[str]) -> None:
    for embedding in (SHIPPED, HASHED):
        assert embedding.embed_all(texts).tolist() == [embedding.embed(text) for text in texts]


@pytest.mark.parametrize("text", ["", " \n\t", "_"])
def test_text_without_words_is_nowhere(text: str) -> None:
    assert SHIPPED.embed(text) == [0.0] * EMBEDDING_DIM


@pytest.mark.parametrize("text", ["what is \ud83d ?", "7", "x" * 9_999, "1 2 3 " * 2_000])
def test_odd_texts_have_a_vector(text: str) -> None:
    assert any(SHIPPED.embed(text))
    assert SHIPPED.embed(text) == SHIPPED.embed(text[:EMBEDDED_CHARS_MAX])


def test_the_embedding_is_the_same_everywhere() -> None:
    """Stored vectors outlive the process: whoever changes them gives `MINILM` another name."""
    rounded = np.round(np.array(SHIPPED.embed("How many days are there between 3 May and 7 June?")), 5) + 0.0
    digest = hashlib.sha256(rounded.tobytes()).hexdigest()
    assert digest == "240a8aa31c5b3a8772a31d0e047714f1fd165d01ca446ae81551cf2e00ab0bb1"
    assert (SHIPPED.name, SHIPPED.replaces) == ("minilm-1", ("hashing",))


def test_the_longest_token_comes_first_and_a_strange_part_takes_the_word_along() -> None:
    assert SMALL.tokens("abc") == [1, 2]
    assert SMALL.tokens("acc") == [0, 2, 2]
    assert SMALL.tokens("abx") == SMALL.tokens("") == []
    assert SMALL.tokens("a中d") == [0, 4, 3]
    assert SMALL.tokens("naïve") == [5]
    assert SMALL.tokens("a0") == SMALL.tokens("0") == []
    assert SMALL.tokens("a" + "c" * (WORD_CHARS_MAX - 1)) == [0] + [2] * (WORD_CHARS_MAX - 1)
    assert SMALL.tokens("a" + "c" * WORD_CHARS_MAX) == []


def test_a_repeated_word_counts_by_the_root_of_its_count() -> None:
    vector = SMALL.embed("a a a a d")
    assert vector[0] == pytest.approx(2 * vector[3])
    assert vector[1] == vector[2] == 0.0


def test_a_text_without_tokens_is_its_words() -> None:
    vector = SMALL.embed("zzz 123")
    assert not any(vector[:6])
    assert math.sqrt(sum(x * x for x in vector[6:])) == pytest.approx(1)


@pytest.mark.parametrize(
    ("question", "paraphrase", "other"),
    [
        ("Fix the bug in this program", "Repair an error in my code", "Book a table in this restaurant"),
        ("What is the capital of France?", "Name the main city of Italy", "What is the price of the ticket?"),
        ("Translate this letter into German", "Say the message in French", "Put this letter into the box"),
    ],
)
def test_a_paraphrase_is_nearer_than_a_text_with_common_words(question: str, paraphrase: str, other: str) -> None:
    def by_table(a: str, b: str) -> float:
        one, two = (np.array(SHIPPED.embed(text)[:128]) for text in (a, b))
        return float(one @ two / np.sqrt(one @ one * (two @ two)))

    assert by_table(question, paraphrase) > by_table(question, other)


TEXTS = (
    "Wie viele Tage liegen zwischen dem dritten Mai und dem siebten Juni?",
    "Fasse diesen Vertrag in drei Sätzen zusammen.",
    "请把这段话翻译成英文。",
    "这个函数为什么返回空列表？",
    "この文章を要約してください。",
    "비밀번호를 바꾸는 방법을 알려 주세요",
    "Сколько будет семью восемь?",
    "Напиши стихотворение о море",
    "كم عدد الأيام في السنة؟",
    "def f(xs):\n    return sorted(set(xs))[::-1]",
    "SELECT name FROM users WHERE id = 7 ORDER BY name",
    "🙂🙃🚀 🔥",
    "aGVsbG8gd29ybGQhIQ== ZGVhZGJlZWY=",
)


def test_texts_in_other_alphabets_and_code_do_not_fall_together() -> None:
    for index, text in enumerate(TEXTS):
        for other in TEXTS[index + 1 :]:
            assert near(text, other) < 0.75, (text, other)
    assert near("请把这段话翻译成英文。", "请把这句话翻译成英文") > near("请把这段话翻译成英文。", TEXTS[3])
    assert near("Сколько будет семью восемь?", "Сколько будет пятью восемь?") > near(TEXTS[6], TEXTS[7])


def test_a_full_cache_is_emptied_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"{Random(n).getrandbits(40):x}" for n in range(50)]
    plain = [SHIPPED.embed(" ".join(words[n : n + 9])) for n in range(40)]
    monkeypatch.setattr(meaning, "CACHED_WORDS_MAX", 5)
    assert [SHIPPED.embed(" ".join(words[n : n + 9])) for n in range(40)] == plain
    assert CACHED_WORDS_MAX > 5


def test_a_damaged_file_is_refused_with_the_way_out() -> None:
    good = shipped(TABLE_FILE)
    for damaged in (b"", good[:-1], good[:5000] + b"\0" + good[5001:], b"version https://git-lfs.github.com/spec/v1\n"):
        with pytest.raises(ConfigError, match="BATON_EMBEDDER=hashing"):
            by_meaning(damaged)


@pytest.mark.parametrize(
    "file", [b"", b"\0" * 8, b"\xff" * 40, (2).to_bytes(8, "little") + b"{}", (9).to_bytes(8, "little") + b'{"rows":1']
)
def test_bytes_that_are_no_table_are_refused(file: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        read_table(file)


@pytest.mark.parametrize(
    ("rows", "scales", "vocabulary"),
    [
        (np.zeros((2, EMBEDDING_DIM), np.int8), np.ones(2, np.float32), {}),
        (np.zeros((2, 4), np.int8), np.ones(3, np.float32), {}),
        (np.zeros((0, 4), np.int8), np.ones(0, np.float32), {}),
        (np.zeros((2, 4), np.int8), np.ones(2, np.float32), {"a": 2}),
    ],
)
def test_a_table_whose_parts_do_not_fit_is_refused(rows: object, scales: object, vocabulary: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"shape|outside"):
        TokenTable(vocabulary, rows, scales)  # type: ignore[arg-type]
