"""The Responses API's use cases: a request → the chat it stands for, and stored responses read back and deleted.

A response is stored by being logged: the rollout is its record, so it can be had as soon as its reply is out, from any
gateway over the same database, and only where its key's log keeps text as it was sent (log mode `full`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.access.keys import Principal
from gateway.core.log.rollout import RolloutRecord
from gateway.core.openai.chat import ChatRequest
from gateway.core.openai.reply import json_bytes
from gateway.core.openai.responses.items import Item, no_such_item, references, response_of, to_input_items
from gateway.core.openai.responses.reply import (
    Head,
    begun,
    conversation_of_log,
    ended,
    failed,
    head_of_log,
    output_items,
    response_name,
    to_log,
)
from gateway.core.openai.responses.request import (
    Places,
    ResponsesRequest,
    chat_request,
    parse_responses_request,
)
from gateway.errors import BadRequest, NotFound, TooLarge, Unavailable
from gateway.service.ports.request import Journal
from gateway.service.ports.responses import LoggedResponse, ResponseStore

PAGE_ITEMS, PAGE_ITEMS_MAX = 20, 100
RESPONSES_REFERRED_MAX = 32


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be served: as chat, what the log keeps beside it (nothing: it is not stored), as asked."""

    chat: ChatRequest
    to_log: Mapping[str, Any]
    asked: ResponsesRequest
    places: Places

    def head(self, record: RolloutRecord) -> Head:
        """What the reply says of the request, once it is being served."""
        made_s = record.created_us // 1_000_000
        asked = self.asked
        return Head(record.completion_id, made_s, asked.model, asked.instructions, asked.body, bool(self.to_log))


class Responses:
    """`messages_max` and `body_bytes_max` bound a conversation with all that it continues, as they bound a chat request
    that sends it whole; `strict`: unknown properties are refused; `media_bytes_max` bounds an image or file."""

    def __init__(
        self,
        store: ResponseStore,
        journal: Journal,
        *,
        messages_max: int,
        body_bytes_max: int,
        strict: bool,
        media_bytes_max: int,
    ) -> None:
        self._store = store
        self._journal = journal
        self._body_bytes_max = body_bytes_max
        self._messages_max = messages_max
        self._strict = strict
        self._media_bytes_max = media_bytes_max

    async def prepare(self, principal: Principal, body: object) -> Prepared:
        """A request's body, with the conversation it continues. Raises BadRequest and NotFound naming the field, and
        TooLarge."""
        asked = parse_responses_request(
            body, items_max=self._messages_max, strict=self._strict, media_bytes_max=self._media_bytes_max
        )
        kept = _is_stored(asked, principal)
        history = await self._history(asked.previous, principal) if asked.previous is not None else []
        items = await self._looked_up(asked.items, principal)
        chat, places = chat_request(
            asked, items, history, messages_max=self._messages_max, media_bytes_max=self._media_bytes_max
        )
        if (history or items is not asked.items) and len(json_bytes(chat.messages)) > self._body_bytes_max:
            raise TooLarge(f"the conversation has grown over {self._body_bytes_max} bytes; begin a new one")
        return Prepared(chat, to_log(asked) if kept else {}, asked, places)

    async def get(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """A stored response as it was replied. Raises NotFound."""
        found = await self._stored(response_id, principal)
        head = head_of_log(found.request, found.id, found.created_s)
        if found.status == "aborted":
            return begun(head) | {"status": "cancelled"}
        if found.status != "done" or found.reply is None:
            return failed(head, found.error or {})
        return ended(head, found.reply, found.finished_s)

    async def input_items(
        self, principal: Principal, response_id: str, *, limit: int = PAGE_ITEMS, order: str = "desc", after: str | None
    ) -> dict[str, Any]:
        """A page of what a stored response was made from, the conversation before it included. Raises NotFound."""
        found = await self._stored(response_id, principal)
        items = _inputs(found)
        if order == "desc":
            items.reverse()
        if after is not None:
            places = [index for index, item in enumerate(items) if item["id"] == after]
            if not places:
                raise BadRequest(f"`after`: no item '{after[:64]}' of this response", param="after")
            items = items[places[0] + 1 :]
        page = items[:limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return {"object": "list", "data": page, **ends, "has_more": len(items) > limit}

    async def delete(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """Take the texts of a stored response out of the log. Raises NotFound."""
        found = await self._stored(response_id, principal)
        await self._store.erase(found.id, principal.public_id)
        return {"id": found.id, "object": "response", "deleted": True}

    async def cancel(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """Always a refusal: nothing runs in the background. Raises NotFound, BadRequest."""
        await self._stored(response_id, principal)
        text = "Cannot cancel a synchronous response; to stop one, close the connection it is made on."
        raise BadRequest(text, param="response_id", code="not_cancellable")

    # ------------------------------------------------------------ looking up

    async def _history(self, previous_id: str, principal: Principal) -> list[Mapping[str, Any]]:
        found = (await self._find([previous_id], principal)).get(previous_id)
        if found is None or not found.stored:
            why = "" if found is None else " It was not stored, or has been deleted."
            text = f"Previous response with id '{previous_id}' not found.{why}"
            raise BadRequest(text, param="previous_response_id", code="previous_response_not_found")
        if found.status != "done":
            text = f"Previous response with id '{previous_id}' came to no end and cannot be continued."
            raise BadRequest(text, param="previous_response_id", code="previous_response_failed")
        return conversation_of_log(found.request, found.reply)

    async def _looked_up(self, items: Sequence[Item], principal: Principal) -> Sequence[Item]:
        """Items with every reference replaced by what it points at. Raises NotFound."""
        wanted = references(items)
        if not wanted:
            return items
        homes = {index: response_of(name) for index, name in wanted.items()}
        ids = sorted({home for home in homes.values() if home is not None})
        if len(ids) > RESPONSES_REFERRED_MAX:
            text = f"`input` refers to items of more than {RESPONSES_REFERRED_MAX} responses"
            raise BadRequest(text, param="input", code="too_many_references")
        found = await self._find(ids, principal)
        known = {item["id"]: item for one in found.values() if one.stored for item in _all_items(one)}
        whole = list(items)
        for index, name in wanted.items():
            if name not in known:
                raise no_such_item(name, index)
            whole[index] = known[name]
        return whole

    async def _stored(self, response_id: str, principal: Principal) -> LoggedResponse:
        found = (await self._find([response_id], principal)).get(response_id)
        if found is None or not found.stored:
            text = f"Response with id '{response_id[:64]}' not found."
            raise NotFound(text, param="response_id", code="response_not_found")
        return found

    async def _find(self, ids: Sequence[str], principal: Principal) -> Mapping[str, LoggedResponse]:
        """Those of them that are this key's; one that is on disk only is waited for. Raises Unavailable."""
        named = [name for name in ids if response_name(name)]
        found = await self._store.find(named, principal.public_id) if named else {}
        if len(found) == len(set(named)):
            return found
        try:
            await self._journal.shipped()
        except TimeoutError:
            text = "the log is still on its way to the database; ask again"
            raise Unavailable(text, code="store_behind", headers={"retry-after": "2"}) from None
        return await self._store.find(named, principal.public_id)


def _is_stored(asked: ResponsesRequest, principal: Principal) -> bool:
    """Whether the response can be read back later. Raises BadRequest where that is asked for and cannot be."""
    if principal.log_mode == "full":
        return asked.store is not False
    if asked.store:
        text = f"`store`: this key's log mode is `{principal.log_mode}`, which keeps no text as it was sent; send false"
        raise BadRequest(text, param="store", code="store_unavailable")
    return False


def _inputs(found: LoggedResponse) -> list[dict[str, Any]]:
    return to_input_items(conversation_of_log(found.request, None), found.id.removeprefix("resp_"))


def _all_items(found: LoggedResponse) -> list[dict[str, Any]]:
    head = head_of_log(found.request, found.id, found.created_s)
    made = output_items(head, found.reply) if found.reply is not None else []
    return [*_inputs(found), *made]
