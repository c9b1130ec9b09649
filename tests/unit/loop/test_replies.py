"""What a reply is, whether two agree, and a reply in brief."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.loop.digest import shown_replies
from gateway.core.loop.replies.agreement import compare, groups, majority
from gateway.core.loop.replies.answers import TEXT_CHARS_MAX, final_answer, normalise
from gateway.core.loop.replies.brief import brief
from gateway.core.loop.replies.kinds import ReplyKind, read_message, read_text, wanted_kind
from gateway.core.loop.replies.trial import MARK, by_returns, returns_of, shared_calls

LONG = TEXT_CHARS_MAX - 20
ESSAY = (
    "Trees cool our streets, and they clean the air that all of us breathe. They also bring birds.\n\n"
    "Shade saves power. On hot days a street with trees needs a third less of it.\n\n"
    "- Trees keep rain water where it falls.\n- They make people walk.\n\n"
    "In the end the question is not what trees cost but what it costs to have none."
)
OTHER_ESSAY = ESSAY.replace("Trees cool our streets", "Nothing is as cheap as a tree").replace("birds", "rest")
CODE = """Here is the function:

```python
import re


def words(text: str) -> list[str]:
    # split
    return re.findall(r"[a-z]+", text)


class Counter(dict):
    def add(self, word: str, n: int = 1) -> None:
        self[word] = self.get(word, 0) + n
```

Let me know if you need tests."""
RUST = '```rust\nfn main() {\n    println!("4");\n}\n```'


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("<answer></answer>", "empty"),
        ("42", "short"),
        ("Paris", "short"),
        ("0 1 0 1 2\n1 2 1 2 3\n0 1 0 0 1", "short"),
        ("[3, 4]", "short"),
        ("First we add, then we carry, and so on until every digit is done.\nAnswer: 42", "short"),
        ("Some reasoning.\n<answer>1 0\n0 1</answer>", "short"),
        ('{"reasoning": "two and two, which everybody knows from school", "answer": 4}', "short"),
        ('```json\n{"reasoning": "a", "answer": "4"}\n```', "short"),
        ("```python\nx = f(2)\n```\nSo the call returns four.\nAnswer: 4", "short"),
        ("```\n0 1 0\n1 0 1\n```", "short"),
        (CODE, "code"),
        (RUST, "code"),
        ("def f(x):\n    return x", "code"),
        ('{"city": "Paris", "people": 2100000}', "json"),
        ('```json\n["Paris", "Rome"]\n```', "json"),
        ('{"items": [{"answer": 1}, {"answer": 2}]}', "json"),
        (ESSAY, "prose"),
        (ESSAY + "\n\nThe answer is to plant many more trees in every street of every city of this land.", "prose"),
        ("Question: why trees? Answer: shade.\n\n" + ESSAY, "prose"),
        (ESSAY + "\n\n```sh\nls\n```\n", "prose"),
        ("I'm sorry, but I can't help with that.", "refusal"),
    ],
)
def test_the_kind_of_a_reply_comes_from_its_structure(text: str, kind: ReplyKind) -> None:
    assert read_text(text).kind == kind


def test_the_fields_of_a_message_come_first() -> None:
    call = {"function": {"name": "look_up", "arguments": '{"b": 1, "a": 2}'}}
    assert read_message({"content": None, "tool_calls": [call]}).calls == (("look_up", '{"a":2,"b":1}'),)
    assert read_message({"content": None, "refusal": "No."}).kind == "refusal"
    assert read_message({"content": "42"}).kind == "short"
    assert read_message({}).kind == "empty"


def test_a_request_says_what_it_wants() -> None:
    assert wanted_kind({"response_format": {"type": "json_schema", "json_schema": {}}}) == "json"
    assert wanted_kind({}, {"grader": "numeric@1"}) == "short"
    assert wanted_kind({}, {"grader": "python"}) == "code"
    assert wanted_kind({"response_format": {"type": "text"}}, {"grader": "judge"}) is None
    assert read_text("Long words without any mark lead us here at last to\n42", "short").answer == "42"
    assert read_text("7", "json").kind == "json"
    assert read_text(ESSAY + "\n```python\nx = 1\n```", "code").kind == "code"


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ("Answer: 3/4", "so\nAnswer: 0.75", "same"),
        ("Answer: \\frac{3}{4}", "<answer>0.75</answer>", "same"),
        ("\\boxed{2\\sqrt{3}}", "\\boxed{\\sqrt{12}}", "same"),
        ("\\boxed{x^2+2x+1}", "\\boxed{(x+1)^2}", "same"),
        ("Answer: {1, 2}", "Answer: {2, 1}", "same"),
        ("Answer: 5 km", "Answer: 5000 m", "same"),
        ("Answer: 2 hours", "Answer: 120 minutes", "same"),
        ("Answer: x = 5", "5", "same"),
        ("Answer: [1, 2]", "Answer: [2, 1]", "different"),
        ("Answer: 4", "Answer: 5", "different"),
        ("Answer: 2024-01-02", "Answer: 2023-01-01", "different"),
        ("Answer: 12", "Answer: 12 apples", "same"),
        ("Answer: 12", "Answer: 13 apples", "different"),
        ("Answer: 12 pears", "Answer: 12 apples", "unknown"),
        ("Answer: 50%", "Answer: 0.5", "same"),
        ("Answer: 5 km", "Answer: 5000", "unknown"),
        ("Answer: 9^9^9^9", "Answer: 1", "different"),
        ("Paris", "Rome", "different"),
        ("Paris", "I looked it up in several books, and all of them say\nParis.", "same"),
        ("Answer: 4", "I do not quite know how many there are, perhaps one or two of them", "unknown"),
        ('{"a": 1, "b": "x"}', '```json\n{"b": "X", "a": 1.0}\n```', "same"),
        ('{"a": 1, "b": 2}', '<answer>{"b": 2, "a": 1}</answer>', "same"),
        ('{"city": "Paris"}', '{"city": "Rome"}', "different"),
        ('{"city": "Paris"}', '{"town": "Paris"}', "different"),
        ('{"text": "' + "some word " * 9 + '"}', '{"text": "' + "other word " * 9 + '"}', "unknown"),
        (CODE, CODE.replace("    # split\n", "").replace("Here is", "This is"), "same"),
        (CODE, CODE.replace("n: int = 1", "n: int = 2"), "unknown"),
        (RUST, RUST.replace("4", "5"), "unknown"),
        (ESSAY, ESSAY.replace("\n", " "), "same"),
        (ESSAY, OTHER_ESSAY, "unknown"),
        (ESSAY, CODE, "unknown"),
        (ESSAY, "", "different"),
        ("", "", "different"),
        (ESSAY, "I cannot help with that.", "different"),
    ],
)
def test_agreement_is_known_or_unknown(a: str, b: str, found: str) -> None:
    assert compare(read_text(a), read_text(b)) == compare(read_text(b), read_text(a)) == found


@given(st.text(max_size=300), st.text(max_size=300))
def test_any_two_texts_compare_alike_both_ways(a: str, b: str) -> None:
    assert compare(read_text(a), read_text(b)) == compare(read_text(b), read_text(a))
    assert len(brief(read_text(a), 20).encode()) <= 4 * 20 + 16


def test_a_vote_on_essays_elects_the_first_and_a_verdict_the_most_alike() -> None:
    essays = ["", ESSAY, OTHER_ESSAY, OTHER_ESSAY + " So it is."]
    assert majority(essays) == 1
    assert majority(essays, {(2, 3): "same"}) == 2
    assert groups([read_text(text) for text in essays], {(2, 3): "same"}) == [[2, 3], [0], [1]]


def test_a_digest_shows_each_kind_in_brief_and_says_what_it_cut() -> None:
    shown = shown_replies(["a", "b", "c", "d"], [CODE, ESSAY, "Answer: 4", None], ["stop", "stop", "stop", None])
    assert "tests" not in (shown[0].answer or "").split("…")[0]
    assert (shown[0].answer or "").startswith("import re; def words(text: str) -> list[str]")
    assert shown[0].answer is not None
    assert shown[0].answer.endswith("(code, 71 tokens, cut)")
    assert (shown[1].answer or "").startswith("Trees cool our streets")
    assert (shown[1].answer or "").endswith("tokens, cut)")
    assert [reply.flags for reply in shown] == [
        ("code", "agreement:unknown"),
        ("prose", "agreement:unknown"),
        ("agreement:unknown",),
        ("failed",),
    ]
    assert [len((reply.answer or "").encode()) <= 164 for reply in shown] == [True] * 4


def test_prose_in_brief_is_its_opening_and_its_claims() -> None:
    text = brief(read_text(ESSAY), 72)
    assert "Shade saves power." in text
    assert "On hot days" not in text
    assert "They make people walk." in text
    assert brief(read_text(ESSAY), 1_000) == ESSAY
    assert brief(read_text('{"b": 1, "a": "text of words"}'), 100) == '{"a":"text of words","b":1}'


def test_short_answers_keep_their_flags() -> None:
    shown = shown_replies(["a", "b", "c"], ["Answer: 4", "Answer: 5", "Answer: 4.0"], ["stop", "stop", "length"])
    assert [(reply.answer, reply.flags, reply.differs) for reply in shown] == [
        ("4", (), ()),
        ("5", (), (0,)),
        ("4.0", ("agrees:0", "truncated"), (1,)),
    ]


def test_programs_are_called_alike_and_differ_only_where_most_returns_do() -> None:
    one, other = "def f(a: int, b=2):\n    return a", "def f(x):\n    return x\n\ndef g(*rest):\n    pass"
    calls = shared_calls([one, other])
    assert {name for name, _ in calls} == {"f"}
    assert all(isinstance(value, int) for _, (value,) in calls)
    assert shared_calls([one, "def f(x, y):\n    return x"]) == []
    four = [["1"], ["2"], ["3"], ["4"]]
    assert by_returns(four, [*four[:3], None]) == "unknown"
    assert by_returns(four, four) == "same"
    assert by_returns(four, [*four[:3], ["5"]]) == "unknown"
    assert by_returns(four, [["5"]] * 4) == "different"
    assert returns_of("noise\n" + MARK + '[["1"], null]\n') == [["1"], None]
    assert returns_of(MARK + "[") == returns_of("") == []


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"{mark}{(blank * LONG)[:LONG]}x"
            for mark in ("answer", "Final answer", "```")
            for blank in (" ", "\n", "\t ")
        ),
        "```" + "a" * LONG,
        "1" * LONG + "x",
        '"' * LONG,
    ],
    ids=lambda text: f"{text[:14]!r}",
)
def test_a_hostile_reply_is_read_in_linear_time(text: str) -> None:
    began_s = time.thread_time()
    read_text(text)
    normalise(text)
    final_answer(text)
    assert time.thread_time() - began_s < 3  # of this thread's own work; quadratic time is half a minute


def test_parsers_warnings_of_what_others_wrote_are_not_printed() -> None:
    r"""Python 3.12 printed `<unknown>:2: SyntaxWarning: invalid escape sequence '\s'` into the log of each job."""
    words = (
        r"from gateway.core.loop.replies.code import is_program; print(is_program('import re\nre.split(\"\\s\", x)'))"
    )
    done = subprocess.run([sys.executable, "-W", "always", "-c", words], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
