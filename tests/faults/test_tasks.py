"""Requests that are no conversation, over a whole gateway with OpenAI's SDK: passed on, billed by units, logged."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.faults.site import Gateway, Site
from tests.faults.test_batches import ended, made, rollout, sdk_of
from tests.upstreams.server import Reply, Request, Server, json_reply
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)
SOUND = b"ID3" + b"\x00\xff" * 500
POOL = """
workers:
  - {{name: chatty, handle: atlas, kind: openai, model: m, url: "{url}", output_tokens_max: 16,
     price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}}
  - {{name: painter, handle: birch, kind: {kind}, task: images, model: {prefix}dall-e-3, url: "{url}", {key}
     price: {{unit_usd: "0.04"}}}}
  - {{name: speaker, handle: cedar, kind: {kind}, task: speech, model: {prefix}tts-1, url: "{url}", {key}
     price: {{unit_usd: "15"}}}}
  - {{name: listener, handle: dogwood, kind: {kind}, task: transcription, model: {prefix}whisper-1, url: "{url}", {key}
     price: {{unit_usd: "0.006"}}}}
  - {{name: censor, handle: elder, kind: {kind}, task: moderation, model: {prefix}omni-moderation-latest, {key}
     url: "{url}", price: {{unit_usd: "0.001"}}}}
  - {{name: sorter, handle: fir, kind: openai, task: rerank, model: rerank-1, url: "{url}",
     price: {{unit_usd: "0.002"}}}}
pools: {{main: [chatty, painter, speaker, listener, censor, sorter]}}
default: main
"""
MODERATION: dict[str, Any] = {
    "id": "modr-1",
    "model": "omni",
    "results": [{"flagged": True, "categories": {}, "category_scores": {}, "category_applied_input_types": {}}],
}


class Worker(Server):
    """One server with all of these APIs. `wrong`: it says nothing of use."""

    def __init__(self) -> None:
        super().__init__(self._serve)
        self.wrong = False

    def _serve(self, request: Request) -> Reply:
        path = request.path.removeprefix("/v1/")
        if self.wrong:
            return json_reply({"choices": []})
        if path == "images/generations":
            n = request.body.get("n", 1)
            return json_reply({"created": 1, "data": [{"b64_json": "aGk="}] * n})
        if path == "audio/speech":
            return Reply(SOUND, headers={"content-type": "audio/mpeg"})
        if path.startswith("audio/"):
            if b"vtt" in request.content:
                return Reply(b"WEBVTT\n", headers={"content-type": "text/html"})
            return json_reply({"text": "hello", "usage": {"type": "duration", "seconds": 1}})
        if path == "moderations":
            return json_reply(MODERATION)
        if path == "rerank":
            return json_reply({"id": "r", "results": [{"index": 1, "relevance_score": 0.9}]})
        return json_reply({"object": "list", "data": []})

    def last(self) -> Any:
        return self.requests[-1]


@asynccontextmanager
async def serving(here: Site, kind: str = "openai") -> AsyncIterator[tuple[Gateway, Worker]]:
    async with Worker() as worker:
        through = {"kind": kind, "prefix": "openai/" if kind == "litellm" else ""}
        pool = POOL.format(url=f"{worker.url}/v1", key='api_key: "env:UPSTREAM_KEY",', **through)
        (here.place / "pool.yaml").write_text(pool)
        gateway = await here.gateway(BATON_CONDUCTOR="worker:chatty")
        await here.new_key()
        yield gateway, worker


async def cost_of(here: Site, gateway: Gateway, raw: Any) -> tuple[str, Any]:
    """(dollars by the header, the rollout's row), once it is logged; nothing is held any more."""
    rollout_id = raw.headers["x-baton-rollout-id"]
    logged = await until(lambda: rollout(here, gateway, rollout_id.replace("-", "")))
    kinds = [row["kind"] for row in logged["ledger"]]
    assert sorted(set(kinds)) == ["dispatched", "hold", "posted"]
    return raw.headers["x-baton-cost-usd"], logged


@pytest.mark.parametrize("kind", ["openai", "litellm"])
async def test_images_speech_transcripts_and_moderations_are_passed_on_and_billed(here: Site, kind: str) -> None:
    async with serving(here, kind) as (gateway, worker), sdk_of(here, gateway) as sdk:
        image = await sdk.images.with_raw_response.generate(model="painter", prompt="a cat", n=2, size="1024x1024")
        made_of = image.parse()
        assert [one.b64_json for one in made_of.data or ()] == ["aGk=", "aGk="]
        sent = json.loads(worker.last().content)
        assert (sent["model"], sent["n"], sent["size"]) == ("dall-e-3", 2, "1024x1024")
        cost, logged = await cost_of(here, gateway, image)
        assert cost == "0.08"
        assert "aGk=" not in json.dumps(logged)
        assert logged["steps"][0]["usage_details"]["images"] == 2

        speech = await sdk.audio.speech.with_raw_response.create(model="speaker", input="x" * 1000, voice="alloy")
        assert speech.content == SOUND
        assert speech.headers["content-type"] == "audio/mpeg"
        cost, logged = await cost_of(here, gateway, speech)
        assert cost == "0.015"
        assert logged["reply"] == {"content_type": "audio/mpeg", "bytes": len(SOUND)}

        file = ("a.mp3", SOUND, "audio/mpeg")
        heard = await sdk.audio.transcriptions.with_raw_response.create(model="listener", file=file, language="en")
        assert heard.parse().text == "hello"
        assert SOUND in worker.last().content
        assert b"whisper-1" in worker.last().content
        cost, logged = await cost_of(here, gateway, heard)
        assert cost == "0.0001"  # one second of a minute
        assert logged["request"]["file"] == {"name": "a.mp3", "type": "audio/mpeg", "bytes": len(SOUND)}

        moderated = await sdk.moderations.with_raw_response.create(model="censor", input="well")
        assert moderated.parse().results[0].flagged
        cost, _ = await cost_of(here, gateway, moderated)
        assert cost == "0.001"


async def test_rerank_and_translations_and_subtitles(here: Site) -> None:
    async with serving(here) as (gateway, worker), sdk_of(here, gateway) as sdk:
        asked = {"model": "sorter", "query": "cat", "documents": ["dog"] * 101, "top_n": 1}
        ranked = await sdk.post("/rerank", body=asked, cast_to=object)
        assert ranked == {"id": "r", "results": [{"index": 1, "relevance_score": 0.9}]}
        assert json.loads(worker.last().content)["top_n"] == 1
        file = ("a.mp3", SOUND, "audio/mpeg")
        translated = await sdk.audio.translations.create(model="listener", file=file)
        assert translated.text == "hello"
        assert worker.last().path == "/v1/audio/translations"
        subtitles = await sdk.audio.transcriptions.with_raw_response.create(
            model="listener", file=file, response_format="vtt", timestamp_granularities=["word"], temperature=0.5
        )
        assert subtitles.text == "WEBVTT\n"
        assert subtitles.headers["content-type"].startswith("text/plain")
        assert b'name="timestamp_granularities[]"' in worker.last().content
        models = {model.id async for model in sdk.models.list()}
        assert {"painter", "speaker", "listener", "censor", "sorter"} <= models


async def test_what_no_worker_has_is_refused_by_name_and_costs_nothing(here: Site) -> None:
    async with serving(here) as (gateway, worker), sdk_of(here, gateway) as sdk:
        before = len(worker.requests)
        with pytest.raises(openai.NotFoundError) as no_task:
            await sdk.images.generate(model="chatty", prompt="x")
        assert "images" in no_task.value.message
        with pytest.raises(openai.NotFoundError):
            await sdk.chat.completions.create(model="painter", messages=[{"role": "user", "content": "x"}])
        wrong: list[tuple[Any, str]] = [
            (sdk.images.generate(model="painter", prompt="x", n=11), "n"),
            (sdk.images.generate(model="painter", prompt="x", stream=True), "stream"),
            (sdk.audio.speech.create(model="speaker", input="", voice="alloy"), "input"),
            (sdk.moderations.create(model="censor", input=[]), "input"),
            (sdk.post("/rerank", body={"model": "sorter", "query": "x"}, cast_to=object), "documents"),
            (sdk.post("/images/generations", body={"model": "painter", "prompt": "x", "api_key": "x"}, cast_to=object),
             "api_key"),
        ]  # fmt: skip
        for call, param in wrong:
            with pytest.raises(openai.BadRequestError) as refused:
                await call
            assert refused.value.param == param
        with pytest.raises(openai.APIStatusError) as cheap:
            await sdk.images.generate(model="painter", prompt="x", n=2, extra_headers={"x-baton-max-cost-usd": "0.07"})
        assert cheap.value.code == "cap_reached"
        assert len(worker.requests) == before
        worker.wrong = True
        with pytest.raises(openai.InternalServerError) as broken:
            await sdk.moderations.create(model="censor", input="x")
        assert broken.value.status_code == 502


async def test_images_and_moderations_run_in_a_batch(here: Site) -> None:
    async with serving(here) as (gateway, _), sdk_of(here, gateway) as sdk:
        asked = {"model": "censor", "input": "x"}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/moderations", "body": asked}
        done = await ended(sdk, await made(sdk, [line]))
        assert done.request_counts is not None
        assert done.request_counts.completed == 1
