"""The use cases of the Responses API: convert a request to a chat request; read and delete stored responses.

The log stores responses: the rollout is the record of one. So a client can read a response as soon as it has its
reply, from any gateway on the same database, but only if the log of its key keeps text as it was sent (log mode
`full`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.access.keys import Principal
from gateway.core.log.events import uuid7
from gateway.core.log.rollout import RolloutRecord
from gateway.core.openai.chat import ChatRequest
from gateway.core.openai.reply import chunks_of, json_bytes
from gateway.core.openai.responses.conversations import to_log_turn
from gateway.core.openai.responses.events import Events, begun_events, failed_events
from gateway.core.openai.responses.items import Item, no_such_item, references, response_of, to_input_items
from gateway.core.openai.responses.reply import (
    Head,
    conversation_of_log,
    failed_response,
    finished_response,
    head_of_log,
    is_response_id,
    output_items,
    response_in_progress,
    to_log,
)
from gateway.core.openai.responses.request import (
    ParamNames,
    ResponsesRequest,
    chat_request,
    parse_responses_request,
)
from gateway.core.openai.responses.tools import tool_names
from gateway.errors import BadRequest, NotFound, TooLarge, Unavailable
from gateway.service.ports.background import BackgroundRequest, BackgroundStore
from gateway.service.ports.request import Clock, Journal
from gateway.service.ports.turns import ConversationTurns, LoggedResponse, OpenTurn, ResponseStore
from gateway.threads import beside

PAGE_ITEMS, PAGE_ITEMS_MAX = 20, 100
RESPONSES_REFERRED_MAX = 32
BACKGROUND_OPEN_MAX = 1_000  # of one key, that have not ended


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A request that is ready to be served. `to_log`: what the log keeps in addition to the chat request. `turn`: its
    claim on the conversation that it is a turn of."""

    chat: ChatRequest
    to_log: Mapping[str, Any]
    request: ResponsesRequest
    names: ParamNames
    turn: str | None = None

    @property
    def stored(self) -> bool:
        """Whether the response can be read back later."""
        return "response" in self.to_log

    def head(self, record: RolloutRecord) -> Head:
        """The facts of the request that the reply repeats. `record` is its rollout."""
        created_s = record.created_us // 1_000_000
        return _head(self.request, record.completion_id, created_s, stored=self.stored)


class Responses:
    """Serves the Responses API.

    `messages_max` and `body_bytes_max` bound a conversation together with the history that it continues, as they bound
    a chat request that carries both. `strict` refuses unknown properties. `media_bytes_max` bounds one image or file.
    `background_s`: how long after its request a response in the background may take, waiting and crashes included.
    """

    def __init__(
        self,
        store: ResponseStore,
        journal: Journal,
        clock: Clock,
        *,
        messages_max: int,
        body_bytes_max: int,
        strict: bool,
        media_bytes_max: int,
        background: BackgroundStore,
        background_s: float,
        conversations: ConversationTurns,
    ) -> None:
        self._store = store
        self._conversations = conversations
        self._background = background
        self._background_s = background_s
        self._journal = journal
        self._clock = clock
        self._body_bytes_max = body_bytes_max
        self._messages_max = messages_max
        self._strict = strict
        self._media_bytes_max = media_bytes_max

    async def prepare(
        self,
        principal: Principal,
        body: object,
        vendor: Collection[str] = (),
        *,
        turn: str | None = None,
        reads_only: bool = False,
        body_bytes: int = 0,
    ) -> PreparedResponse:
        """Read a request's body and the conversation that it continues. `vendor`: the names of parameters that are not
        OpenAI's and that some worker takes. `turn`: the claim on its conversation that a request in the background has
        already; `reads_only`: it needs none. `body_bytes`: the size of the body, if it is known. Raises BadRequest and
        NotFound, which name the field, ConversationLocked, TooLarge and Unavailable."""
        request = await beside(
            body_bytes,
            parse_responses_request,
            body,
            items_max=self._messages_max,
            strict=self._strict,
            media_bytes_max=self._media_bytes_max,
            vendor=vendor,
        )
        stored = _is_stored(request, principal)
        if request.conversation is None:
            return await self._prepared(request, principal, None, body_bytes, stored=stored)
        claim = None if reads_only else turn or self._conversations.new_turn()
        lease_s = self._background_s if request.body.get("background") else self._conversations.turn_s
        opened = await self._conversations.open(principal, request.conversation, claim, lease_s)
        try:
            return await self._prepared(request, principal, opened, body_bytes, stored=stored)
        except BaseException:  # boundary: whatever stopped it, a turn that was claimed here has not begun
            await self._conversations.leave(claim if turn is None else None)
            raise

    async def leave(self, prepared: PreparedResponse) -> None:
        """Give up the turn of a request that is not served."""
        await self._conversations.leave(prepared.turn)

    async def _prepared(
        self, request: ResponsesRequest, principal: Principal, opened: OpenTurn | None, body_bytes: int, *, stored: bool
    ) -> PreparedResponse:
        history: Sequence[Mapping[str, Any]] = () if opened is None else opened.messages
        if request.previous is not None:
            history = await self._history(request.previous, principal)
        items = await self._resolve_references(request.items, principal, () if opened is None else opened.items)
        limits = {"messages_max": self._messages_max, "media_bytes_max": self._media_bytes_max}
        chat, names = await beside(body_bytes, chat_request, request, items, history, **limits)
        if (history or items is not request.items) and len(json_bytes(chat.messages)) > self._body_bytes_max:
            raise TooLarge(f"the conversation has grown over {self._body_bytes_max} bytes; begin a new one")
        to_keep: dict[str, Any] = {"response": to_log(request)} if stored else {}
        if opened is None or opened.turn is None:
            return PreparedResponse(chat, to_keep, request, names)
        to_keep["conversation"] = to_log_turn(request, opened.conversation_id, opened.turn, len(history))
        return PreparedResponse(chat, to_keep, request, names, opened.turn)

    async def queue(
        self, principal: Principal, prepared: PreparedResponse, body: Mapping[str, Any], options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Store a request for the background and return its response as it is then. `options`: headers of Baton's that
        it came with. Raises BadRequest where the response cannot be stored, RateLimited, Unavailable."""
        if not prepared.stored:
            problem = "Background mode requires `store` to be true, and a key that logs text as it was sent."
            raise BadRequest(problem, param="background", code="unsupported_parameter")
        now_us = self._clock.now_us()
        response_id = prepared.turn or "resp_" + uuid7(now_us // 1000).replace("-", "")
        expires_us = now_us + round(self._background_s * 1e6)
        given = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        request = BackgroundRequest(
            response_id, principal.public_id, given, options, "queued", now_us - now_us % 1000, expires_us
        )
        await self._background.create(request, BACKGROUND_OPEN_MAX)
        return self._shown(request)

    def _shown(self, request: BackgroundRequest) -> dict[str, Any]:
        """The Response object of a request in the background that the log does not have."""
        parsed = parse_responses_request(
            request.body, items_max=self._messages_max, strict=False, media_bytes_max=self._media_bytes_max
        )
        head = _head(parsed, request.id, request.created_us // 1_000_000, stored=True)
        if request.status == "failed":
            return failed_response(head, request.error or {})
        status = "in_progress" if request.status == "done" else request.status
        return response_in_progress(head) | {"status": "cancelled" if status == "cancelling" else status}

    async def get(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """Return a stored response as the client received it, or one in the background as it is now. Raises NotFound,
        Unavailable."""
        request = await self._background.get(principal.public_id, response_id) if is_response_id(response_id) else None
        if request is not None and request.status != "done":
            return self._shown(request)
        try:
            response = await self._stored(response_id, principal)
        except (NotFound, Unavailable):  # its rollout is in the journal of another gateway
            if request is None:
                raise
            return self._shown(request)
        head = head_of_log(response.request, response.id, response.created_s)
        if response.status == "aborted":
            return response_in_progress(head) | {"status": "cancelled"}
        if response.status != "done" or response.reply is None:
            return failed_response(head, response.error or {})
        return finished_response(head, response.reply, response.finished_s)

    async def events(self, principal: Principal, response_id: str) -> tuple[list[dict[str, Any]], bool]:
        """All events so far of a response that was made in the background, and whether it has ended. Raises NotFound,
        Unavailable, and BadRequest for one that was not."""
        response = await self.get(principal, response_id)
        if not response["background"]:
            raise BadRequest("`stream`: this response was not made in the background", param="stream")
        if response["status"] in ("queued", "in_progress"):
            return begun_events(response), False
        logged = (await self._find([response_id], principal)).get(response_id)
        if response["status"] in ("cancelled", "failed") or logged is None or logged.reply is None:
            return [*begun_events(response), *failed_events(response)], True
        head = head_of_log(logged.request, logged.id, logged.created_s)
        events = Events(head)
        made = events.open()
        for choices in chunks_of(logged.reply):
            made += events.chunk(choices)
        return [*made, *events.completed(logged.reply, logged.finished_s)], True

    async def input_items(
        self, principal: Principal, response_id: str, *, limit: int = PAGE_ITEMS, order: str = "desc", after: str | None
    ) -> dict[str, Any]:
        """Return a page of the input items of a stored response, with the conversation before it. Raises NotFound,
        BadRequest, Unavailable."""
        items = _input_items(await self._stored(response_id, principal))
        if order == "desc":
            items.reverse()
        if after is not None:
            indices = [index for index, item in enumerate(items) if item["id"] == after]
            if not indices:
                raise BadRequest(f"`after`: this response has no item '{after[:64]}'", param="after")
            items = items[indices[0] + 1 :]
        page = items[:limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return {"object": "list", "data": page, **ends, "has_more": len(items) > limit}

    async def delete(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """Erase the texts of a stored response from the log. Raises NotFound, Unavailable."""
        request = await self._background.get(principal.public_id, response_id) if is_response_id(response_id) else None
        if request is not None and request.open:
            problem = "The response is still being made; cancel it, and delete it once it has ended."
            raise BadRequest(problem, param="response_id", code="response_in_progress")
        if request is None or request.status == "done":
            response = await self._stored(response_id, principal)
            await self._store.erase(response.id, principal.public_id)
        elif response_id in await self._store.find([response_id], principal.public_id):
            await self._store.erase(response_id, principal.public_id)
        if request is not None:
            await self._background.delete(principal.public_id, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def cancel(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """Cancel a response in the background, and return it. One that has ended stays as it is. Raises NotFound,
        Unavailable, and BadRequest(not_cancellable) for a response that was not made in the background."""
        if is_response_id(response_id):
            request = await self._background.cancel(principal.public_id, response_id)
            if request is not None:
                return await self.get(principal, response_id)
        response = await self._stored(response_id, principal)
        if response.request["response"].get("background"):
            return await self.get(principal, response_id)
        problem = "Cannot cancel a synchronous response; to stop one, close its connection."
        raise BadRequest(problem, param="response_id", code="not_cancellable")

    # ------------------------------------------------------------ the store

    async def _history(self, previous_id: str, principal: Principal) -> list[Mapping[str, Any]]:
        """The conversation up to a stored response. Raises BadRequest, Unavailable."""
        previous = (await self._find([previous_id], principal)).get(previous_id)
        if previous is None or not previous.stored:
            reason = "" if previous is None else " It was not stored, or has been deleted."
            problem = f"Previous response with id '{previous_id}' not found.{reason}"
            raise BadRequest(problem, param="previous_response_id", code="previous_response_not_found")
        if previous.status != "done":
            problem = f"Previous response with id '{previous_id}' did not complete and cannot be continued."
            raise BadRequest(problem, param="previous_response_id", code="previous_response_failed")
        return conversation_of_log(previous.request, previous.reply)

    async def _resolve_references(
        self, items: Sequence[Item], principal: Principal, known: Sequence[Item]
    ) -> Sequence[Item]:
        """Replace every reference among the items by the item that it points at. `known`: items of its conversation.
        Raises NotFound, BadRequest, Unavailable."""
        ids_by_index = references(items)
        if not ids_by_index:
            return items
        by_id: dict[str, Item] = {item["id"]: item for item in known}
        owners = [response_of(item_id) for item_id in ids_by_index.values() if item_id not in by_id]
        response_ids = sorted({owner for owner in owners if owner is not None})
        if len(response_ids) > RESPONSES_REFERRED_MAX:
            problem = (
                f"`input` refers to items of more than {RESPONSES_REFERRED_MAX} responses; send the items themselves"
            )
            raise BadRequest(problem, param="input", code="too_many_references")
        responses = await self._find(response_ids, principal)
        by_id |= {item["id"]: item for response in responses.values() if response.stored for item in _items(response)}
        resolved = list(items)
        for index, item_id in ids_by_index.items():
            if item_id not in by_id:
                raise no_such_item(item_id, index)
            resolved[index] = by_id[item_id]
        return resolved

    async def _stored(self, response_id: str, principal: Principal) -> LoggedResponse:
        """A response that is stored under this key. Raises NotFound, Unavailable."""
        response = (await self._find([response_id], principal)).get(response_id)
        if response is None or not response.stored:
            problem = f"Response with id '{response_id[:64]}' not found."
            raise NotFound(problem, param="response_id", code="response_not_found")
        return response

    async def _find(self, ids: Sequence[str], principal: Principal) -> Mapping[str, LoggedResponse]:
        """The responses of this key among `ids`, by id. Waits for those that are still in the journal. Raises
        Unavailable."""
        valid = [name for name in ids if is_response_id(name)]
        responses = await self._store.find(valid, principal.public_id) if valid else {}
        if len(responses) == len(set(valid)):
            return responses
        try:
            await self._journal.shipped()
        except TimeoutError:
            problem = "the log has not reached the database yet; try again"
            raise Unavailable(problem, code="store_behind", headers={"retry-after": "2"}) from None
        return await self._store.find(valid, principal.public_id)


def _head(request: ResponsesRequest, response_id: str, created_s: int, *, stored: bool) -> Head:
    return Head(response_id, created_s, request.model, request.instructions, request.body, stored)


def _is_stored(request: ResponsesRequest, principal: Principal) -> bool:
    """Whether the response can be read back later. Raises BadRequest if the client asks for that in vain."""
    if principal.log_mode == "full":
        return request.store is not False
    if request.store:
        mode = principal.log_mode
        problem = f"`store`: this key's log mode is `{mode}`, which does not keep text as it was sent; send false"
        raise BadRequest(problem, param="store", code="store_unavailable")
    return False


def _input_items(response: LoggedResponse) -> list[dict[str, Any]]:
    names = tool_names(response.request["response"].get("tools") or ())
    return to_input_items(conversation_of_log(response.request, None), response.id.removeprefix("resp_"), names)


def _items(response: LoggedResponse) -> list[dict[str, Any]]:
    head = head_of_log(response.request, response.id, response.created_s)
    output = output_items(head, response.reply) if response.reply is not None else []
    return [*_input_items(response), *output]
