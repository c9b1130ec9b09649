"""Conversations over a whole gateway that is killed: what a client saw of a reply is there, once."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.faults.site import Gateway, Site
from tests.faults.test_background import Planned, case_named, ended
from tests.faults.test_batches import sdk_of
from tests.waiting import BOUND_S, until

ASKED, AGAIN = f"What holds in {case_named(0)}?", f"And now in {case_named(0)}?"
pytestmark = pytest.mark.timeout(300)


async def texts(sdk: openai.AsyncOpenAI, name: str) -> list[str]:
    items: Any = [item async for item in sdk.conversations.items.list(name, order="asc")]
    return [part.text for item in items for part in item.content]


async def serving(here: Site, worker: Planned) -> Gateway:
    here.settings |= {"BATON_BATCH_LEASE_S": "1"}
    here.upstream.behave = worker
    gateway = await here.gateway()
    await here.new_key(1_000_000_000)
    return gateway


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_is_in_its_conversation_once_where_the_gateway_dies_behind_it(here: Site, stream: bool) -> None:
    gateway = await serving(here, Planned())
    async with sdk_of(here, gateway) as sdk:
        name = (await sdk.conversations.create()).id
        made: Any = await sdk.responses.create(model="baton", input=ASKED, conversation=name, stream=stream)
        if stream:
            async for event in made:
                last = event
            assert last.type == "response.completed"
        await gateway.kill()
    gateway.start()
    await gateway.serving()

    async def next_turn(sdk: openai.AsyncOpenAI) -> bool:
        """A turn is refused while the journal of the dead process is on its way."""
        try:
            await sdk.responses.create(model="baton", input=AGAIN, conversation=name)
        except openai.ConflictError:
            return False
        return True

    async with sdk_of(here, gateway) as sdk:
        await until(lambda: next_turn(sdk), 2 * BOUND_S)
        assert await texts(sdk, name) == [ASKED, "answer", AGAIN, "answer"]


async def test_another_gateway_ends_the_turn_of_a_dead_one_in_the_background(here: Site) -> None:
    worker = Planned("answer")
    gateway = await serving(here, worker)
    async with sdk_of(here, gateway) as sdk:
        name = (await sdk.conversations.create()).id
        made = await sdk.responses.create(model="baton", input=ASKED, conversation=name, background=True)
        await asyncio.wait_for(worker.reached[case_named(0)].wait(), BOUND_S)
        with pytest.raises(openai.ConflictError):
            await sdk.responses.create(model="baton", input=AGAIN, conversation=name)
    heir = await here.gateway()
    await gateway.kill()
    worker.gate.set()
    async with sdk_of(here, heir) as sdk:
        assert (await ended(sdk, made.id)).status == "completed"
        assert await texts(sdk, name) == [ASKED, "answer"]
        await sdk.responses.create(model="baton", input=AGAIN, conversation=name)
        assert await texts(sdk, name) == [ASKED, "answer", AGAIN, "answer"]
