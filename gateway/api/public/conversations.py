"""The routes of OpenAI's Conversations API: conversations that `/v1/responses` continues, and their items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from gateway.api.edge.bodies import data_key, query_number
from gateway.api.edge.stack import Json, Router, read_json
from gateway.api.public.chat import OpenAIApi
from gateway.core.access.keys import Principal
from gateway.errors import BadRequest
from gateway.service.batches.conversations import PAGE_ITEMS, PAGE_ITEMS_MAX, StoredConversations


@dataclass(frozen=True, slots=True)
class ConversationsApi:
    """What the routes need. `chats` knows the keys."""

    chats: OpenAIApi
    conversations: StoredConversations

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/v1/conversations")
        router.add("POST", "", self.create)
        router.add("GET", "/{conversation_id}", self.get)
        router.add("POST", "/{conversation_id}", self.update)
        router.add("DELETE", "/{conversation_id}", self.delete)
        router.add("POST", "/{conversation_id}/items", self.add_items)
        router.add("GET", "/{conversation_id}/items", self.list_items)
        router.add("GET", "/{conversation_id}/items/{item_id}", self.get_item)
        router.add("DELETE", "/{conversation_id}/items/{item_id}", self.delete_item)
        return router

    async def create(self, request: Request) -> Response:
        """Make a conversation: `items` (at most 20) and `metadata`."""
        principal = await self._who(request)
        return Json(await self.conversations.create(principal, await self._body(request, principal, empty=True)))

    async def get(self, request: Request, conversation_id: str) -> Response:
        """A conversation of this key."""
        return Json(await self.conversations.get(await self._who(request), conversation_id))

    async def update(self, request: Request, conversation_id: str) -> Response:
        """Replace the `metadata` of a conversation."""
        principal = await self._who(request)
        body = await self._body(request, principal)
        return Json(await self.conversations.update(principal, conversation_id, body))

    async def delete(self, request: Request, conversation_id: str) -> Response:
        """Delete a conversation with its items. Rollouts of its turns stay in the log."""
        return Json(await self.conversations.delete(await self._who(request), conversation_id))

    async def add_items(self, request: Request, conversation_id: str) -> Response:
        """Add `items` (at most 20) at the end of a conversation."""
        principal = await self._who(request)
        body = await self._body(request, principal)
        return Json(await self.conversations.add(principal, conversation_id, body, _include(request)))

    async def list_items(self, request: Request, conversation_id: str) -> Response:
        """The items of a conversation, newest first: `limit`, `order`, `after` (the id of the last item of a page)."""
        principal, query = await self._who(request), request.query_params
        order = query.get("order") or "desc"
        if order not in ("asc", "desc"):
            raise BadRequest("`order` must be asc or desc", param="order", code="invalid_value")
        page = self.conversations.items(
            principal,
            conversation_id,
            after=query.get("after") or None,
            limit=query_number(request, "limit", PAGE_ITEMS, 1, PAGE_ITEMS_MAX),
            newest_first=order == "desc",
            include=_include(request),
        )
        return Json(await page)

    async def get_item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """One item of a conversation."""
        principal = await self._who(request)
        return Json(await self.conversations.item(principal, conversation_id, item_id, _include(request)))

    async def delete_item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """Delete an item; the reply is its conversation."""
        return Json(await self.conversations.remove(await self._who(request), conversation_id, item_id))

    async def _body(self, request: Request, principal: Principal, *, empty: bool = False) -> dict[str, Any]:
        if empty and request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
            return {}
        body = await read_json(request, self.chats.body_bytes_max, principal.public_id)
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object", code="invalid_type")
        return body

    async def _who(self, request: Request) -> Principal:
        return await data_key(request, self.chats.authenticator)


def _include(request: Request) -> list[str]:
    query = request.query_params
    return query.getlist("include") + query.getlist("include[]")
