"""Where clients look: Baton's options in the body, what a model can do, and the requests of a key."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.test_api import served
from tests.kit import Kit, ask, model_worker
from tests.kit import pool_file as kit_pool


async def test_options_in_the_body_are_headers() -> None:
    async with served(Kit()) as gateway:
        baton = {"max_cost_usd": 0.00001, "sticky": False}
        capped = await gateway.http.post("/v1/chat/completions", json={**ask(), "baton": baton})
        assert (capped.status_code, capped.json()["error"]["code"]) == (400, "cap_reached")
        reply = await gateway.sdk.chat.completions.with_raw_response.create(
            **ask(), extra_body={"baton": {"max_cost_usd": "0.4", "max_calls": 3, "timeout_s": 30, "pool": "default"}}
        )
        assert "x-baton-dropped-fields" not in reply.headers
        caps = (await gateway.http.get(f"/v1/rollouts/{reply.headers['x-baton-rollout-id']}")).json()["caps"]
        assert (caps["cost_nano"], caps["calls"], caps["wall_s"]) == (400_000_000, 3, 30)


async def test_options_reach_every_endpoint_and_replace_headers() -> None:
    async with served(Kit()) as gateway:
        for path, body in (
            ("/v1/responses", {"model": "baton", "input": "a"}),
            ("/v1/completions", {"model": "alpha", "prompt": "a"}),
            ("/v1/messages", {"model": "baton", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}),
        ):
            asked = {**body, "baton": {"max_calls": 3}}
            reply = await gateway.http.post(path, json=asked, headers={"x-baton-max-calls": "5"})
            assert reply.status_code == 200, reply.text
            caps = (await gateway.http.get(f"/v1/rollouts/{reply.headers['x-baton-rollout-id']}")).json()["caps"]
            assert caps["calls"] == 3


@pytest.mark.parametrize(
    ("baton", "param", "said"),
    [
        ({"max_cost": 1}, "baton.max_cost", "did you mean `baton.max_cost_usd`?"),
        ({"depth": "x"}, "baton.depth", "did you mean `baton.max_depth`?"),  # of gateways, which no client may set
        ({"pool": []}, "baton.pool", "must be a text"),
        ([], "baton", "must be an object"),
    ],
)
async def test_a_wrong_option_is_refused_by_name(baton: Any, param: str, said: str) -> None:
    async with served(Kit()) as gateway:
        refused = await gateway.http.post("/v1/chat/completions", json={**ask(), "baton": baton})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param)
        assert said in error["message"]


async def test_a_model_says_its_context_its_prices_and_what_it_takes() -> None:
    small = model_worker("small", "sedge", context_tokens=4096, cannot=("image", "tools"))
    vectors = model_worker("vectors", "vault", task="embeddings")
    async with served(Kit(pools=kit_pool(small, vectors))) as gateway:

        async def about(model: str) -> Any:
            return (await gateway.http.get(f"/v1/models/{model}")).json()

        one = await about("small")
        assert one["id"] == "small"
        assert one["baton"]["context_tokens"] == 4096
        assert "image" not in one["baton"]["abilities"]
        assert "temperature" in one["baton"]["abilities"]
        [worker] = one["baton"]["workers"]
        assert (worker["price"]["input_usd_per_mtok"], worker["price"]["output_usd_per_mtok"]) == ("1", "2")
        planned = (await about("baton"))["baton"]
        assert [each["name"] for each in planned["workers"]] == ["alpha", "beta", "gamma", "small"]
        assert (planned["context_tokens"], "image" in planned["abilities"]) == (8192, True)
        assert (await about("baton/fixed:small"))["baton"] == one["baton"]
        assert (await about("vectors"))["baton"]["workers"][0]["task"] == "embeddings"
        assert (await gateway.sdk.models.retrieve("small")).id == "small"


async def test_a_key_lists_its_own_rollouts_and_no_others() -> None:
    async with served(Kit()) as gateway:
        _, other = await gateway.keys.create_key("other")
        mine = await gateway.http.post("/v1/chat/completions", json=ask())
        headers = {"authorization": f"Bearer {other}"}
        await gateway.http.post("/v1/chat/completions", json=ask(), headers=headers)
        page = (await gateway.http.get("/v1/rollouts", params={"limit": 5})).json()
        assert [line["id"] for line in page["data"]] == [mine.headers["x-baton-rollout-id"]]
        theirs = (await gateway.http.get("/v1/rollouts", headers=headers)).json()["data"]
        assert len(theirs) == 1
        assert theirs != page["data"]
        for wrong, param in (({"limit": "0"}, "limit"), ({"status": "lost"}, "status")):
            refused = await gateway.http.get("/v1/rollouts", params=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
