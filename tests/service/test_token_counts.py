"""What a call counts as where its worker did not say: by its tokenizer, never above what was held for it."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.money.amounts import TOKENS_PER_REQUEST, Usage
from gateway.core.openai.vendors.usage import TOKENS_PER_CHOICE, TOKENS_PER_TURN
from gateway.errors import UpstreamError, UpstreamProtocol
from gateway.service.loop.spending.charges import Paces
from tests.fakes.tokens import WordCounter
from tests.fakes.workers import Says
from tests.kit import Kit, ask, items_of
from tests.waiting import until

ASKED = "how many words is this"
PROMPT_TOKENS = TOKENS_PER_REQUEST + TOKENS_PER_TURN + 5
UNREPORTED = Usage(9, 9, estimated=True, unreported=True)
DIES = Says("one two three four five", dies_after=4)  # after three of its words


def nano(prompt_tokens: int, completion_tokens: int) -> int:
    return prompt_tokens * 1000 + completion_tokens * 2000  # $1 and $2 a million


async def test_a_stream_cut_short_is_billed_by_its_workers_tokenizer() -> None:
    kit = Kit(workers={"alpha": DIES}, tokens=WordCounter())
    running = await kit.serve(ask(ASKED, model="alpha", stream=True))
    assert isinstance(running.error, UpstreamProtocol)
    (step,) = running.record.steps
    assert (step.prompt_tokens, step.completion_tokens) == (PROMPT_TOKENS, 3 + TOKENS_PER_CHOICE)
    assert step.usage_estimated
    assert [attempt.counted_by for attempt in step.attempts] == ["tokenizer"]
    assert await kit.posted_nano() == step.cost_nano == nano(PROMPT_TOKENS, 4)
    assert await kit.open_nano() == 0


async def test_a_client_that_leaves_is_billed_for_what_came_until_then() -> None:
    tokens = WordCounter()
    kit = Kit(workers={"alpha": Says("one two three four five", piece_delay_s=0.02)}, tokens=tokens)
    running = await kit.start(ask(ASKED, model="alpha", stream=True))
    said = items_of(running)
    for _ in range(3):
        await anext(said)
    running.cancel()
    await running.finished.wait()
    (step,) = running.record.steps
    assert kit.workers.cancelled == ["alpha"]
    assert step.attempts[-1].counted_by == "tokenizer"
    assert nano(PROMPT_TOKENS, 1) <= step.cost_nano < nano(PROMPT_TOKENS, 6)
    assert await kit.posted_nano() == step.cost_nano
    assert await kit.open_nano() == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_reports_no_usage_is_counted(stream: bool) -> None:
    kit = Kit(workers={"alpha": Says("one two", usage=UNREPORTED)}, tokens=WordCounter())
    running = await kit.serve(ask(ASKED, model="alpha", stream=stream))
    (step,) = running.record.steps
    assert (step.prompt_tokens, step.completion_tokens) == (PROMPT_TOKENS, 2 + TOKENS_PER_CHOICE)
    assert (step.usage_estimated, step.attempts[-1].counted_by) == (True, "tokenizer")
    assert await kit.posted_nano() == step.cost_nano == nano(PROMPT_TOKENS, 3)


async def test_usage_that_a_worker_reports_is_not_counted_again() -> None:
    tokens = WordCounter()
    kit = Kit(workers={"alpha": Says("one two", usage=Usage(100, 50))}, tokens=tokens)
    running = await kit.serve(ask(ASKED, model="alpha", stream=True))
    (step,) = running.record.steps
    assert (step.usage_estimated, step.attempts[-1].counted_by) == (False, None)
    assert await kit.posted_nano() == nano(100, 50)
    assert tokens.asked == []


async def test_without_a_tokenizer_bytes_are_counted_and_the_record_says_so() -> None:
    kit = Kit(workers={"alpha": DIES}, tokens=WordCounter(without=["alpha"]))
    running = await kit.serve(ask(ASKED, model="alpha", stream=True))
    (step,) = running.record.steps
    assert (step.usage_estimated, step.attempts[-1].counted_by) == (True, "bytes")
    assert step.completion_tokens == 4  # "one two three", by four bytes
    assert await kit.posted_nano() == step.cost_nano > 0


async def test_a_count_is_never_above_what_was_held() -> None:
    wordy = Says(" ".join(["w"] * 500), usage=UNREPORTED)
    kit = Kit(workers={"alpha": wordy}, tokens=WordCounter())
    running = await kit.serve(ask(ASKED, model="alpha", max_tokens=20))
    (step,) = running.record.steps
    assert step.completion_tokens == 20
    assert await kit.open_nano() == 0


async def test_a_request_that_ends_while_it_is_counted_is_billed_by_bytes() -> None:
    tokens = WordCounter(delay_s=30.0)
    kit = Kit(workers={"alpha": DIES}, tokens=tokens)
    running = await kit.start(ask(ASKED, model="alpha", stream=True))
    reading = asyncio.create_task(_read(items_of(running)))
    await until(lambda: tokens.asked)
    running.cancel()
    await running.finished.wait()
    await reading
    (step,) = running.record.steps
    assert (step.usage_estimated, step.attempts[-1].counted_by) == (True, "bytes")
    assert await kit.posted_nano() == step.cost_nano > 0
    assert await kit.open_nano() == 0


async def test_an_answer_that_never_came_is_charged_its_prompt_and_a_usual_reply() -> None:
    gone = UpstreamError("gone")
    kit = Kit(workers={"alpha": [Says("hi", usage=Usage(9, 2)), gone, gone]}, tokens=WordCounter(), attempts_max=1)
    usual = await kit.serve(ask(ASKED, model="alpha"))
    assert (usual.record.completion_tokens, usual.record.steps[0].usage_estimated) == (2, False)
    silent = await kit.serve(ask(ASKED, model="alpha"))
    (step,) = silent.record.steps
    assert (step.usage_estimated, step.attempts[-1].counted_by) == (True, "pace")
    prompt_tokens = step.prompt_tokens
    assert 5 <= prompt_tokens < PROMPT_TOKENS  # by the worker's tokenizer, within what is held
    assert 2 <= step.completion_tokens <= 64  # a usual reply, or what its pace makes of the time; within what is held
    assert step.cost_nano == nano(prompt_tokens, step.completion_tokens)


async def _read(said: object) -> None:
    async for _ in said:  # type: ignore[attr-defined]
        pass


def test_a_silent_worker_made_a_usual_reply_or_what_its_pace_makes_of_the_time() -> None:
    paces = Paces()
    assert paces.tokens("new", 0.1) == 300  # as of a typical call
    paces.learn("known", 20, 2.0)
    assert [paces.tokens("known", seconds) for seconds in (0.1, 1.0, 2.0, 10.0)] == [20, 20, 20, 100]
    paces.learn("known", 120, 2.0)
    assert paces.tokens("known", 1.0) == 30  # the newest counts a tenth
