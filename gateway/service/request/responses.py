"""The use cases of the Responses API: convert a request to a chat request; read and delete stored responses.

The log stores responses: the rollout is the record of one. So a client can read a response as soon as it has its
reply, from any gateway on the same database, but only if the log of its key keeps text as it was sent (log mode
`full`).
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
from gateway.service.ports.request import Journal
from gateway.service.ports.turns import LoggedResponse, ResponseStore

PAGE_ITEMS, PAGE_ITEMS_MAX = 20, 100
RESPONSES_REFERRED_MAX = 32


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A request that is ready to be served. `to_log` is what the log keeps in addition to the chat request; it is empty
    if the response is not stored."""

    chat: ChatRequest
    to_log: Mapping[str, Any]
    request: ResponsesRequest
    names: ParamNames

    def head(self, record: RolloutRecord) -> Head:
        """The facts of the request that the reply repeats. `record` is its rollout."""
        created_s = record.created_us // 1_000_000
        request = self.request
        return Head(
            record.completion_id, created_s, request.model, request.instructions, request.body, bool(self.to_log)
        )


class Responses:
    """Serves the Responses API.

    `messages_max` and `body_bytes_max` bound a conversation together with the history that it continues, as they bound
    a chat request that carries both. `strict` refuses unknown properties. `media_bytes_max` bounds one image or file.
    """

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

    async def prepare(self, principal: Principal, body: object) -> PreparedResponse:
        """Read a request's body and the conversation that it continues. Raises BadRequest and NotFound, which name the
        field, TooLarge and Unavailable."""
        request = parse_responses_request(
            body, items_max=self._messages_max, strict=self._strict, media_bytes_max=self._media_bytes_max
        )
        stored = _is_stored(request, principal)
        history = await self._history(request.previous, principal) if request.previous is not None else []
        items = await self._resolve_references(request.items, principal)
        chat, names = chat_request(
            request, items, history, messages_max=self._messages_max, media_bytes_max=self._media_bytes_max
        )
        if (history or items is not request.items) and len(json_bytes(chat.messages)) > self._body_bytes_max:
            raise TooLarge(f"the conversation has grown over {self._body_bytes_max} bytes; begin a new one")
        return PreparedResponse(chat, to_log(request) if stored else {}, request, names)

    async def get(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """Return a stored response as the client received it. Raises NotFound, Unavailable."""
        response = await self._stored(response_id, principal)
        head = head_of_log(response.request, response.id, response.created_s)
        if response.status == "aborted":
            return response_in_progress(head) | {"status": "cancelled"}
        if response.status != "done" or response.reply is None:
            return failed_response(head, response.error or {})
        return finished_response(head, response.reply, response.finished_s)

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
        response = await self._stored(response_id, principal)
        await self._store.erase(response.id, principal.public_id)
        return {"id": response.id, "object": "response", "deleted": True}

    async def cancel(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """Always raises: nothing runs in the background. Raises NotFound, Unavailable, BadRequest(not_cancellable)."""
        await self._stored(response_id, principal)
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

    async def _resolve_references(self, items: Sequence[Item], principal: Principal) -> Sequence[Item]:
        """Replace every reference among the items by the item that it points at. Raises NotFound, BadRequest,
        Unavailable."""
        ids_by_index = references(items)
        if not ids_by_index:
            return items
        owners = [response_of(item_id) for item_id in ids_by_index.values()]
        response_ids = sorted({owner for owner in owners if owner is not None})
        if len(response_ids) > RESPONSES_REFERRED_MAX:
            problem = (
                f"`input` refers to items of more than {RESPONSES_REFERRED_MAX} responses; send the items themselves"
            )
            raise BadRequest(problem, param="input", code="too_many_references")
        responses = await self._find(response_ids, principal)
        by_id = {item["id"]: item for response in responses.values() if response.stored for item in _items(response)}
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
