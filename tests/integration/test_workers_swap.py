"""Another pool under calls that are under way: keys and addresses are those of the pool that a call began with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.adapters.upstream.pooled import PooledWorkers, pooled_workers
from gateway.core.pool.revision import revision_of
from gateway.core.pool.workers import PoolFile, WorkerSpec
from gateway.errors import UpstreamError, UpstreamTimeout
from gateway.service.ports.pools import LoadedPool
from gateway.service.ports.request import WorkerCall
from tests.fakes.workers import FakeWorkers
from tests.upstreams.server import Reply, Request, Server, json_reply


class Closing(FakeWorkers):
    """The fake, with something to close."""

    closed = 0

    async def close(self) -> None:
        self.closed += 1


def worker(name: str = "w", *, places: int = 4, url: str = "http://w/v1", **more: Any) -> WorkerSpec:
    price = {"input_usd_per_mtok": "0", "output_usd_per_mtok": "0"}
    fields = {"handle": f"h{name}", "kind": "openai", "model": "m", "url": url, "concurrency_max": places}
    return WorkerSpec.model_validate({"name": name, "price": price, **fields, **more})


def pool(*workers: WorkerSpec) -> PoolFile:
    return PoolFile(workers=workers, pools={"default": tuple(each.name for each in workers)})


def call(spec: WorkerSpec, of: PoolFile | None = None, timeout_s: float = 5.0) -> WorkerCall:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    return WorkerCall(spec, body, timeout_s, "r", "s", revision="" if of is None else revision_of(of))


class Swapping:
    """`PooledWorkers` over a fake that answers when it is told to."""

    def __init__(self, first: PoolFile, keep_s: float = 60.0) -> None:
        self.fakes: list[Closing] = []
        self.answer = asyncio.Event()
        self.workers = PooledWorkers(
            self.make(LoadedPool(first, {})), revision=revision_of(first), make=self.make, keep_s=keep_s
        )

    def make(self, loaded: LoadedPool) -> dict[str, Closing]:
        self.fakes.append(Closing())
        return {"openai": self.fakes[-1]}

    async def take(self, file: PoolFile) -> None:
        (await self.workers.prepare(LoadedPool(file, {}), revision_of(file))).take()

    async def busy(self, spec: WorkerSpec, count: int) -> list[asyncio.Task[Any]]:
        """So many streams that have begun and not ended."""
        begun: list[asyncio.Event] = [asyncio.Event() for _ in range(count)]

        async def hold(told: asyncio.Event) -> None:
            async for _ in self.workers.stream(call(spec)):
                told.set()
                await self.answer.wait()

        tasks = [asyncio.create_task(hold(told)) for told in begun]
        await asyncio.gather(*(told.wait() for told in begun))
        return tasks


async def later() -> None:
    """What was put off for no time has happened."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_fewer_places_come_about_as_calls_end_and_more_at_once() -> None:
    many, few = worker(places=4), worker(places=1)
    swap = Swapping(pool(many))
    tasks = await swap.busy(many, 3)
    await swap.take(pool(few))
    for spec in (few, many):  # whichever pool a call is of, the worker has as many places as the file says now
        with pytest.raises(UpstreamTimeout, match="no free place"):
            await swap.workers.complete(call(spec, timeout_s=0.02))
    swap.answer.set()
    await asyncio.gather(*tasks)
    fake = swap.fakes[-1]
    await asyncio.gather(*(swap.workers.complete(call(few)) for _ in range(5)))
    assert fake.in_flight_peak == 1
    await swap.take(pool(many))
    swap.answer.clear()
    tasks = await swap.busy(many, 4)
    with pytest.raises(UpstreamTimeout):
        await swap.workers.complete(call(many, timeout_s=0.02))
    swap.answer.set()
    await asyncio.gather(*tasks)


async def test_places_taken_away_and_given_back_while_all_are_busy_are_as_many_as_before() -> None:
    three, one = worker(places=3), worker(places=1)
    swap = Swapping(pool(three))
    tasks = await swap.busy(three, 3)
    await swap.take(pool(one))
    await swap.take(pool(three))
    swap.answer.set()
    await asyncio.gather(*tasks)
    swap.answer.clear()
    again = await swap.busy(three, 3)
    with pytest.raises(UpstreamTimeout):
        await swap.workers.complete(call(three, timeout_s=0.02))
    swap.answer.set()
    await asyncio.gather(*again)


async def test_a_worker_first_called_by_an_old_request_has_the_places_of_the_new_pool() -> None:
    many, few = worker(places=4), worker(places=1)
    swap = Swapping(pool(many))
    await swap.take(pool(few))
    tasks = await swap.busy(many, 1)
    with pytest.raises(UpstreamTimeout):
        await swap.workers.complete(call(many, timeout_s=0.02))
    swap.answer.set()
    await asyncio.gather(*tasks)


async def test_the_old_pool_is_forgotten_when_its_last_request_must_be_over() -> None:
    old, new = pool(worker()), pool(worker(), worker("x"))
    swap = Swapping(old, keep_s=0.0)
    await swap.take(new)
    await swap.workers.complete(call(worker(), old))
    assert [len(fake.calls) for fake in swap.fakes] == [1, 0]
    await later()
    with pytest.raises(UpstreamError, match="to a pool that is no longer loaded") as caught:
        await swap.workers.complete(call(worker(), old))
    assert not caught.value.dispatched
    await swap.workers.complete(call(worker("x"), new))
    await swap.workers.complete(call(worker("x")))  # the conductor's own calls name no pool
    assert [len(fake.calls) for fake in swap.fakes] == [1, 2]
    await swap.workers.close()
    assert swap.fakes[1].closed > 0


async def test_a_pool_that_came_back_is_not_forgotten_with_its_first_time() -> None:
    one, other = pool(worker()), pool(worker("x"))
    swap = Swapping(one, keep_s=0.0)
    await swap.take(other)
    await swap.take(one)
    await later()
    await swap.workers.complete(call(worker(), one))
    assert [len(fake.calls) for fake in swap.fakes] == [0, 0, 1]


@asynccontextmanager
async def an_upstream() -> AsyncIterator[tuple[str, list[str | None]]]:
    """A model, and the keys that it was shown."""
    keys: list[str | None] = []

    def answer(request: Request) -> Reply:
        keys.append(request.headers.get("authorization"))
        choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
        return json_reply({"id": "c", "object": "chat.completion", "model": "m", "choices": [choice]})

    async with Server(answer) as server:
        yield f"{server.url}/v1", keys


async def test_no_key_goes_to_an_address_that_it_was_not_given_for() -> None:
    async with an_upstream() as (here, seen_here), an_upstream() as (there, seen_there):
        before, after = pool(worker(url=here)), pool(worker(url=there))
        workers = pooled_workers(before, {"w": "first-key"}, b"depth", keep_s=60)
        (await workers.prepare(LoadedPool(after, {"w": "second-key"}), revision_of(after))).take()
        for of in (before, after, before):
            await workers.complete(call(of.worker("w"), of))
        (await workers.prepare(LoadedPool(after, {"w": "third-key"}), revision_of(after))).take()  # the key alone
        await workers.complete(call(after.worker("w"), after))
        await workers.close()
    assert seen_here == ["Bearer first-key"] * 2
    assert seen_there == ["Bearer second-key", "Bearer third-key"]


async def test_workers_that_came_from_no_file_take_none() -> None:
    with pytest.raises(ValueError, match="made without `make`"):
        await PooledWorkers({}).prepare(LoadedPool(pool(worker()), {}), "x")


# ---------------------------------------------------------------- errors that name their worker


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_names_the_worker_its_host_and_where_its_key_comes_from(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def failure(url: str, answer: Reply | None, **more: Any) -> tuple[str, str]:
        async with Server(lambda request: answer or Reply()) as server:
            one = worker(url=url or f"{server.url}/v1", **more)
            workers = pooled_workers(pool(one), {"w": "a-key"}, b"depth")
            asked = (
                anext(aiter(workers.stream(call(one, pool(one))))) if stream else workers.complete(call(one, pool(one)))
            )
            with pytest.raises(UpstreamError) as caught:
                await asked
            await workers.close()
            lines = [record.getMessage() for record in caplog.records if record.name == "baton.workers"]
            logged = [line.replace(str(server.port), "PORT") for line in lines]
            caplog.clear()
            assert len(logged) == 1
            message, place = caught.value.message, caught.value.place.replace(str(server.port), "PORT")
            assert caught.value.in_full.replace(str(server.port), "PORT") == f"{message} ({place})"
            assert place in logged[0]
            assert "worker w" in logged[0]
            return message, logged[0]

    message, line = await failure("http://127.0.0.1:1/v1", None)
    assert message == "worker w cannot be reached"
    assert "at 127.0.0.1:1, no key" in line
    refused = json_reply({"error": {"message": "bad key sk-123"}}, 401)
    message, line = await failure("", refused, api_key="env:SOME_KEY")
    assert message == "worker w refused Baton's key (401)"
    assert line == ("worker w (at 127.0.0.1:PORT, key `env:SOME_KEY`): refused Baton's key (401); upstream_error")
    message, line = await failure("", json_reply({"error": {"message": "temperature is too hot"}}, 400))
    assert message == "temperature is too hot"
    assert "too hot" not in line  # a vendor's words may quote the request


async def test_a_worker_that_keeps_failing_writes_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    async with Server(lambda request: json_reply({"error": {"message": "no"}}, 401)) as server:
        one = worker(url=f"{server.url}/v1")
        workers = pooled_workers(pool(one), {"w": "a-key"}, b"depth")
        for _ in range(20):
            with pytest.raises(UpstreamError):
                await workers.complete(call(one, pool(one)))
        await workers.close()
    assert len([line for line in caplog.messages if "refused Baton's key" in line]) == 1
