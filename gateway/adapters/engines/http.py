"""One engine's HTTP, in vLLM's shapes: a bounded request, its models, and the log-prob of a fixed sequence.

The routes that change weights ask for no key in vLLM and are unsafe to expose: an engine listens where only the
gateway reaches it.
"""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import aiohttp
import httpx

from gateway.adapters.upstream.client import http_client
from gateway.adapters.upstream.replies import bounded_body
from gateway.errors import EngineDown, NotFound, UpstreamError, VersionRefused

BODY_BYTES_MAX = 16 << 20
MESSAGE_CHARS_MAX = 300
HEALTH_TIMEOUT_S = 5.0
TRANSPORT_ERRORS = (
    *(httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, aiohttp.ClientError),
    *(OSError, zlib.error, UpstreamError),
)
ANY_PROBE: Mapping[str, Any] = {
    "prompt_ids": (1,),
    "token_ids": (2, 3, 5, 8, 13, 21, 34, 55),
}  # only tests whether scores are numbers

SELF_TEST_MESSAGES = [{"role": "user", "content": "Name three rivers, and say where each of them ends."}]
SELF_TEST_TEXTS, SELF_TEST_TOKENS = 4, 24
SELF_TEST_SAMPLING: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": True,
    "return_token_ids": True,
}


@dataclass(frozen=True, slots=True)
class EngineReply:
    """A status, and a body: parsed JSON, or the text where it is none."""

    status: int
    body: Any

    def message(self) -> str:
        """The error message on one line; the body where there is none."""
        body = self.body
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message", error.get("detail", error)) if isinstance(error, dict) else error
        return " ".join(str(text).split())[:MESSAGE_CHARS_MAX]

    def code(self) -> str:
        """The error code; empty where there is none."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return str(error.get("code") or "") if isinstance(error, dict) else ""


class EngineApi:
    """The server at `url` (without `/v1`). `timeout_s` bounds every request that has no bound of its own."""

    def __init__(
        self, url: str, *, key: str | None = None, timeout_s: float = 60.0, client: httpx.AsyncClient | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._timeout_s = timeout_s
        self._client = client or http_client()

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def send(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> EngineReply:
        """Send a request and return the reply of any status. Raises EngineDown if none comes in time."""
        bound_s = timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(bound_s):
                request = self._client.build_request(method, self.url + path, json=body, headers=self._headers)
                response = await self._client.send(request, stream=True)
                try:
                    raw = await bounded_body(response, BODY_BYTES_MAX)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise EngineDown(f"the engine at {self.url} did not answer {path} within {bound_s:g} s") from None
        except TRANSPORT_ERRORS as error:
            what = str(error) or type(error).__name__
            raise EngineDown(f"the engine at {self.url} does not answer {path}: {what}; is it running?") from None
        return EngineReply(response.status_code, _parsed(raw))

    async def do(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> EngineReply:
        """POST a request that must succeed. Raises VersionRefused(engine) if the engine refuses it and is alive, else
        EngineDown."""
        answer = await self.send("POST", path, body, timeout_s=timeout_s)
        if answer.status == 200:
            return answer
        await self.check_alive()
        raise VersionRefused(
            "engine", f"the engine at {self.url} answered {path} with {answer.status}: {answer.message()}; see its log"
        )

    async def check_alive(self) -> None:
        """Raises EngineDown unless the engine reports that it is healthy."""
        answer = await self.send("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        if answer.status != 200:
            raise EngineDown(f"the engine at {self.url} is not healthy any more ({answer.status}); restart it")

    async def models(self) -> dict[str, dict[str, Any]]:
        """The entries of /v1/models by id. Raises EngineDown."""
        answer = await self.send("GET", "/v1/models")
        entries = answer.body.get("data") if isinstance(answer.body, dict) else None
        if answer.status != 200 or not isinstance(entries, list):
            raise EngineDown(f"the engine at {self.url} answered /v1/models with {answer.status}: {answer.message()}")
        return {str(entry["id"]): entry for entry in entries if isinstance(entry, dict) and "id" in entry}

    async def drift(self, model: str, probe: Mapping[str, Any]) -> float:
        """`ports.PolicyEngine.probe` for the model of that name. If `probe` is empty or has no log-probs, it scores any
        sequence and returns 0 if every result is a number. Raises EngineDown, NotFound."""
        probe = probe or ANY_PROBE
        scores = await self._scores(model, list(probe["prompt_ids"]), list(probe["token_ids"]))
        found = differences(scores, probe.get("logprobs"))
        return sum(found) / len(found)

    async def _scores(self, model: str, prompt_ids: list[int], token_ids: list[int]) -> list[float]:
        """The log-probs of these tokens behind the prompt; NaN where the engine has none. Raises EngineDown, NotFound,
        VersionRefused(probe)."""
        body = {"model": model, "prompt": prompt_ids + token_ids, "max_tokens": 1, "temperature": 0}
        answer = await self.send("POST", "/v1/completions", {**body, "prompt_logprobs": 0})
        if answer.status == 404:
            raise NotFound(
                f"the engine at {self.url} does not serve {model}: {answer.message()}", code="model_not_found"
            )
        if answer.status == 503:
            raise EngineDown(f"the engine at {self.url} is too busy to score the probe of {model}; try again")
        if answer.status >= 500:  # vLLM cannot write a NaN as JSON
            await self.check_alive()
            return [math.nan] * len(token_ids)
        if answer.status != 200:
            raise VersionRefused("probe", f"the engine at {self.url} cannot score the probe: {answer.message()}")
        return token_scores(answer.body, token_ids)

    async def sampled_drift(self, model: str, probe: Mapping[str, Any]) -> float:
        """The mean |Δ log-prob| in nats between texts as `model` samples them and the same tokens as it scores them:
        what the log would say of a plan against what is true. Sampled as exploring plans are, without a grammar, whose
        mask scoring lacks. `probe`: its `messages` are the prompt, if it has them. Raises EngineDown, NotFound,
        VersionRefused(tokenizer) if the server makes other tokens of them than the trainer did, VersionRefused(probe)
        if it does not say what it sampled."""
        texts = (self._sampled_differences(model, probe, seed) for seed in range(SELF_TEST_TEXTS))
        found = list(chain.from_iterable(await asyncio.gather(*texts)))
        return sum(found) / len(found)

    async def _sampled_differences(self, model: str, probe: Mapping[str, Any], seed: int) -> list[float]:
        """Of one text, a token each. Raises as `sampled_drift`."""
        messages = probe.get("messages") or SELF_TEST_MESSAGES
        body = {"model": model, "messages": messages, "max_tokens": SELF_TEST_TOKENS, "seed": seed}
        answer = await self.send("POST", "/v1/chat/completions", body | dict(SELF_TEST_SAMPLING))
        if answer.status == 404:
            raise NotFound(f"the engine at {self.url} does not serve {model}", code="model_not_found")
        if answer.status == 503:
            raise EngineDown(f"the engine at {self.url} is too busy to sample a text of {model}; try again")
        if answer.status >= 500:
            await self.check_alive()
            return [math.inf]
        prompt_ids, token_ids, logprobs = sampled_tokens(answer, self.url)
        if probe.get("messages") and prompt_ids != list(probe["prompt_ids"]):
            raise VersionRefused(
                "tokenizer",
                f"the engine at {self.url} makes other tokens of the probe's messages than {model} was trained on; "
                "start it with the tokenizer and the chat template of its base",
            )
        return differences(await self._scores(model, prompt_ids, token_ids), logprobs)


def sampled_tokens(answer: EngineReply, url: str) -> tuple[list[int], list[int], list[float]]:
    """Prompt ids, token ids and log-probs of a completion. Raises VersionRefused(probe)."""
    try:
        choice = answer.body["choices"][0]
        logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
        prompt_ids = answer.body.get("prompt_token_ids") or choice["prompt_token_ids"]
        sample = [int(one) for one in prompt_ids], [int(one) for one in choice["token_ids"]], logprobs
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        reason = "" if answer.status == 200 else f" ({answer.status}: {answer.message()})"
        raise VersionRefused(
            "probe",
            f"the engine at {url} does not return token ids with their log-probs{reason}; start it as deploy/vllm.sh "
            "does",
        ) from None
    if len(sample[1]) != len(logprobs):
        raise VersionRefused("probe", f"the engine at {url} gave {len(logprobs)} log-probs for {len(sample[1])} tokens")
    return sample


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw[:MESSAGE_CHARS_MAX].decode(errors="replace")


def token_scores(body: Any, token_ids: Sequence[int]) -> list[float]:
    """The log-probs of the last tokens of the prompt; NaN if the reply has none."""
    try:
        entries = body["choices"][0]["prompt_logprobs"][-len(token_ids) :]
        return [float(entry[str(token)]["logprob"]) for token, entry in zip(token_ids, entries, strict=True)]
    except (KeyError, IndexError, TypeError, ValueError):
        return [math.nan] * len(token_ids)


def differences(scores: Sequence[float], expected: Sequence[float] | None) -> list[float]:
    """|Δ log-prob| of each token, 0 where nothing is expected; infinite where a score is no number, or their counts
    differ."""
    if not scores or not all(map(math.isfinite, scores)) or (expected and len(expected) != len(scores)):
        return [math.inf]
    return [abs(score - value) for score, value in zip(scores, expected or scores, strict=True)]
