"""The marks by which a later turn is known."""

from __future__ import annotations

from typing import Any

from gateway.core.loop.turns.marks import CALLS_MAX, CHOICES_MAX, MARK_CHARS, Marker, asks_client

MARKER = Marker(b"secret", "key1")
ASKED: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]
ANSWER: dict[str, Any] = {"role": "assistant", "content": "Where?", "refusal": None}


def call(number: int = 1, arguments: str = '{"city": "Rome", "day": 1}') -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}


ASKING = {"role": "assistant", "content": None, "tool_calls": [call()]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
NEXT = {"role": "user", "content": "In Rome."}


def found(given: tuple[list[str], list[str]], wanted: tuple[list[str], bool]) -> bool:
    return bool({*given[0], *given[1]} & set(wanted[0]))


def test_a_conversation_that_goes_on_is_known() -> None:
    given = MARKER.mark_replies(ASKED, "baton", [ANSWER])
    wanted = MARKER.marks_of_last_turn([*ASKED, ANSWER, NEXT], "baton")
    assert given == (wanted[0], [])
    assert not wanted[1]
    assert len(given[0][0]) == MARK_CHARS


def test_how_a_client_writes_a_message_changes_nothing() -> None:
    given = MARKER.mark_replies(ASKED, "baton", [ANSWER])
    parts = [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]
    user = {"role": "user", "content": parts, "name": None}
    back: list[dict[str, Any]] = [{"role": "developer", "content": "Be brief."}, user]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Where?"}]}
    assert found(given, MARKER.marks_of_last_turn([*back, answer, NEXT], "baton"))


def test_what_was_said_does() -> None:
    given = MARKER.mark_replies(ASKED, "baton", [ANSWER])
    other: list[list[dict[str, Any]]] = [
        [ASKED[0], {"role": "user", "content": "Weather!"}, ANSWER, NEXT],
        [*ASKED, {**ANSWER, "content": "Who?"}, NEXT],
        [{"role": "user", "content": "Be brief."}, ASKED[1], ANSWER, NEXT],
        [*ASKED, {**ANSWER, "refusal": "no"}, NEXT],
    ]
    for changed in other:
        assert not found(given, MARKER.marks_of_last_turn(changed, "baton"))
    assert not found(given, MARKER.marks_of_last_turn([*ASKED, ANSWER, NEXT], "baton/vote"))


def test_the_end_of_a_cached_prefix_may_move() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    asked = [{"role": "user", "content": [{**image, "cache_control": {"type": "ephemeral"}}]}]
    given = MARKER.mark_replies(asked, "baton", [ANSWER])
    moved = [{"role": "user", "content": [image]}, ANSWER, NEXT]
    assert found(given, MARKER.marks_of_last_turn(moved, "baton"))


def test_images_are_part_of_a_mark() -> None:
    def asked(url: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]

    given = MARKER.mark_replies(asked("https://a/1.png"), "baton", [ANSWER])
    assert found(given, MARKER.marks_of_last_turn([*asked("https://a/1.png"), ANSWER, NEXT], "baton"))
    assert not found(given, MARKER.marks_of_last_turn([*asked("https://a/2.png"), ANSWER, NEXT], "baton"))


def test_another_key_and_another_secret_never_meet() -> None:
    given = MARKER.mark_replies(ASKED, "baton", [ASKING])
    for other in (Marker(b"secret", "key2"), Marker(b"other", "key1")):
        assert not found(given, other.marks_of_last_turn([*ASKED, ASKING, RESULT], "baton"))


def test_tool_results_are_known_though_the_conversation_was_shortened() -> None:
    given = MARKER.mark_replies(ASKED, "baton", [ASKING])
    rewritten = {"role": "assistant", "tool_calls": [call(arguments='{"day":1,"city":"Rome"}')]}
    marks, brings = MARKER.marks_of_last_turn([rewritten, RESULT], "baton/vote")
    assert brings
    assert marks[1:] == given[1]
    assert marks[0] not in given[0]
    whole, brings = MARKER.marks_of_last_turn([*ASKED, ASKING, RESULT], "baton")
    assert (whole, brings) == ([*given[0], *given[1]], True)  # the surest first


def test_equal_ids_of_other_calls_are_other_calls() -> None:
    given = MARKER.mark_replies(ASKED, "baton", [ASKING])
    other = {"role": "assistant", "tool_calls": [call(arguments='{"city": "Oslo"}')]}
    assert not found(given, MARKER.marks_of_last_turn([other, RESULT], "baton"))


def test_arguments_that_are_no_json_and_calls_without_a_shape_are_marked_as_they_are() -> None:
    odd: dict[str, Any] = {"role": "assistant", "tool_calls": [call(arguments="{broken"), "nonsense", {"id": "call_9"}]}
    whole, calls = MARKER.mark_replies(ASKED, "baton", [odd])
    assert (len(whole), len(calls)) == (1, 2)
    assert MARKER.marks_of_last_turn([*ASKED, odd, RESULT], "baton") == ([*whole, *calls], True)
    custom = {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "n", "input": "i"}}]}
    assert len(MARKER.mark_replies(ASKED, "baton", [custom])[1]) == 1
    assert MARKER.mark_replies(ASKED, "baton", [{"role": "assistant", "tool_calls": {"not": "a list"}}])[1] == []
    unnamed = {"role": "assistant", "tool_calls": [{"function": {"name": "n", "arguments": "{}"}}]}
    assert MARKER.mark_replies(ASKED, "baton", [unnamed])[1] == []


def test_the_older_function_calls_bring_results_too() -> None:
    asking = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}}
    given = MARKER.mark_replies(ASKED, "baton", [asking])
    marks, brings = MARKER.marks_of_last_turn(
        [*ASKED, asking, {"role": "function", "name": "weather", "content": "sunny"}], "baton"
    )
    assert (marks, brings) == (given[0], True)


def test_a_first_turn_and_one_that_ends_with_an_answer_want_nothing() -> None:
    assert MARKER.marks_of_last_turn(ASKED, "baton") == ([], False)
    assert MARKER.marks_of_last_turn([*ASKED, ANSWER], "baton") == ([], False)
    assert MARKER.marks_of_last_turn([], "baton") == ([], False)


def test_every_choice_has_its_mark_up_to_a_bound() -> None:
    answers = [{**ANSWER, "content": str(n)} for n in range(CHOICES_MAX + 3)]
    whole, _ = MARKER.mark_replies(ASKED, "baton", answers)
    assert len(set(whole)) == CHOICES_MAX
    many = {"role": "assistant", "tool_calls": [call(n) for n in range(CALLS_MAX + 5)]}
    assert len(MARKER.mark_replies(ASKED, "baton", [many])[1]) == CALLS_MAX


def test_a_lone_surrogate_has_a_mark() -> None:
    odd = [{"role": "user", "content": "\ud800"}]
    assert found(MARKER.mark_replies(odd, "baton", [ANSWER]), MARKER.marks_of_last_turn([*odd, ANSWER, NEXT], "baton"))


def test_a_reply_with_calls_asks_its_client() -> None:
    def body(*messages: Any) -> dict[str, Any]:
        return {"choices": [{"message": message} for message in messages]}

    assert asks_client(body(ANSWER, ASKING))
    assert asks_client(body({"role": "assistant", "function_call": {"name": "f", "arguments": ""}}))
    assert not asks_client(body(ANSWER))
    assert not asks_client(body(None))
    assert not asks_client({"choices": ["nonsense"]})
    assert not asks_client({})
