"""In-process workers: what a `Speaker` says (the arena's programs, recorded answers), without HTTP and without waiting.

The bodies are those that `policy.simulators.server` sends over HTTP and the errors those the gateway's adapters make of
them, so a plan gives here what it gives when served; its simulated seconds are noted, not slept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from gateway.core.loop.replies.agreement import majority
from gateway.core.money.amounts import Usage
from gateway.core.openai.reply import chunks_of
from gateway.core.openai.vendors.usage import read_usage, usage_body
from gateway.core.pool.workers import VOTE_URL
from gateway.errors import UpstreamError, UpstreamRateLimited, UpstreamRefused
from gateway.service.ports.request import REFUSED_STATUSES, WorkerCall, WorkerReply
from policy.simulators.server import RequestRefusal, Speaker, bill_nano, completion, cuts_of, seconds

NOWHERE = "http://127.0.0.1:9"  # the workers are in this process; a pool file wants an address


class SpeakerWorkers:
    """`ports.Workers` of one episode: a speaker's workers and the `vote` tool. `seconds` by (rollout, step)."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self.seconds: dict[tuple[str, str], float] = {}

    async def complete(self, call: WorkerCall) -> WorkerReply:
        """Return the complete reply at once. Raises UpstreamRefused (404 `no_recording`, …), UpstreamError."""
        if call.worker.kind == "tool":
            return self.tool(call)
        try:
            body = {**call.worker.params, **call.body}
            answer = self._speaker.say(call.worker.name, body)
            cuts = cuts_of(answer, body)
        except RequestRefusal as refusal:
            raise _error(refusal) from None
        except KeyError:
            raise UpstreamError(f"worker {call.worker.name} is not simulated here", upstream_status=404) from None
        key = (call.rollout_id, call.step_id)
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds(answer, cuts)
        reply = completion(answer, cuts)
        return WorkerReply(reply, read_usage(reply) or Usage(), cost_nano=bill_nano(answer, cuts))

    def tool(self, call: WorkerCall) -> WorkerReply:
        """Return what a tool says at once. Raises UpstreamRefused."""
        return vote(call)

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the same reply as chunks, then its usage."""
        reply = await self.complete(call)
        for choices in chunks_of(reply.body):
            yield {"choices": choices}
        yield {"choices": [], "usage": usage_body(reply.usage)}


def vote(call: WorkerCall) -> WorkerReply:
    """The gateway's built-in tool: the reply that most of the replies seen agree with. Raises UpstreamRefused."""
    if call.worker.url != VOTE_URL:
        raise UpstreamRefused(f"tool {call.worker.name} is not built in and cannot be run here", dispatched=False)
    if not call.saw:
        raise UpstreamRefused("vote sees no replies; let its step see at least one", dispatched=False)
    replies = [reply for _, _, reply in call.saw]
    return tool_reply(replies[majority(replies)])


def tool_reply(text: str, cost_nano: int | None = None) -> WorkerReply:
    """The reply of a tool, without tokens; `cost_nano` None: free."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    body = {"object": "chat.completion", "choices": [choice], "usage": usage_body(Usage())}
    return WorkerReply(body, Usage(), cost_nano=cost_nano)


def _error(refusal: RequestRefusal) -> UpstreamError:
    text, status = refusal.message, refusal.status
    if status in REFUSED_STATUSES:
        return UpstreamRefused(text, upstream_status=status, code=refusal.code)
    if status == 429:
        return UpstreamRateLimited(text, upstream_status=status)
    return UpstreamError(text, upstream_status=status, retryable=status >= 500)
