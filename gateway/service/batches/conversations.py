"""The use cases of conversations that outlive a request: their API, and the turns that responses take in them.

A turn claims its conversation, so a second one is refused until the first has ended. What a turn adds comes with its
rollout, in one transaction (service/ports/turns.py): a reply is added once, and a turn that fails adds nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from gateway.core.access.keys import Principal
from gateway.core.log.events import uuid7
from gateway.core.log.redact import Redactor
from gateway.core.openai.responses.conversations import (
    PREFIX,
    check_includes,
    conversation_json,
    history_of,
    is_conversation_id,
    read_items,
    read_metadata,
    shown_item,
    stored_items,
)
from gateway.core.openai.responses.items import ID_CHARS_MAX, PASSED, Item, parse_items, references
from gateway.core.openai.shapes import Reader, check_names, unknown_parameter
from gateway.errors import BadRequest, ConversationLocked, NotFound, TooLarge, Unavailable
from gateway.service.batches.files import listed
from gateway.service.ports.request import Clock, Journal
from gateway.service.ports.turns import ConversationStore, OpenTurn, StoredConversation

PAGE_ITEMS, PAGE_ITEMS_MAX = 20, 100
CONVERSATIONS_MAX = 100_000  # of one key
READ_ITEMS = 1_000  # of a conversation at a time
T = TypeVar("T")


class StoredConversations:
    """`bytes_max` bounds what a conversation holds, `media_bytes_max` one image or file. `turn_s`: how long a turn may
    have its conversation, unless it is made in the background."""

    def __init__(
        self,
        store: ConversationStore,
        journal: Journal,
        clock: Clock,
        redactor: Redactor,
        *,
        bytes_max: int,
        media_bytes_max: int,
        strict: bool,
        turn_s: float,
    ) -> None:
        self._store = store
        self._journal = journal
        self._clock = clock
        self._redactor = redactor
        self._bytes_max = bytes_max
        self._media_bytes_max = media_bytes_max
        self._strict = strict
        self.turn_s = turn_s

    # ------------------------------------------------------------ the API

    async def create(self, who: Principal, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make a conversation of `items` and `metadata`. Raises BadRequest, TooLarge, Unavailable."""
        check_names(body, ("items", "metadata"))
        _check_stored(who)
        metadata, items = read_metadata(body), self._read(body.get("items") or [])
        now_us = self._clock.now_us()
        new = StoredConversation(PREFIX + _hex(now_us), who.public_id, now_us // 1_000_000, metadata)
        await self._store.create(new, items, CONVERSATIONS_MAX)
        return _shown(new)

    async def get(self, who: Principal, conversation_id: str) -> dict[str, Any]:
        """A conversation of this key. Raises NotFound, Unavailable."""
        return _shown(await self._require(who, conversation_id))

    async def update(self, who: Principal, conversation_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the metadata of a conversation. Raises BadRequest, NotFound, Unavailable."""
        await self._require(who, conversation_id)  # before the body: to other keys it does not exist
        metadata = read_metadata(check_names(body, ("metadata",)), required=True)
        changed = self._store.update(who.public_id, _checked(conversation_id), metadata)
        return _shown(_known(await changed, conversation_id))

    async def delete(self, who: Principal, conversation_id: str) -> dict[str, Any]:
        """Delete a conversation with its items; the rollouts of its turns stay. Raises NotFound, Unavailable."""
        if not await self._store.delete(who.public_id, _checked(conversation_id)):
            raise _no_conversation(conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    async def add(
        self, who: Principal, conversation_id: str, body: Mapping[str, Any], include: Sequence[str]
    ) -> dict[str, Any]:
        """Add items to a conversation, and return them. Raises BadRequest, NotFound, ConversationLocked, TooLarge,
        Unavailable."""
        await self._require(who, conversation_id)  # before the body: to other keys it does not exist
        check_includes(include)
        check_names(body, ("items",))
        _check_stored(who)
        items = self._read(body.get("items"))
        if not items:
            raise BadRequest("`items` holds no item to add", param="items", code="empty_array")
        name = _checked(conversation_id)
        _known(
            await self._behind_turns(lambda: self._store.add(who.public_id, name, items, self._bytes_max)),
            conversation_id,
        )
        return listed([shown_item(item, include) for item in items], len(items))

    async def items(
        self,
        who: Principal,
        conversation_id: str,
        *,
        after: str | None,
        limit: int,
        newest_first: bool,
        include: Sequence[str],
    ) -> dict[str, Any]:
        """A page of the items of a conversation. Raises BadRequest, NotFound, Unavailable."""
        check_includes(include)
        await self._read_behind_turns(who, conversation_id)
        page = await self._store.page(
            who.public_id, conversation_id, after=after, limit=limit + 1, newest_first=newest_first
        )
        return listed([shown_item(item, include) for item in page], limit)

    async def item(self, who: Principal, conversation_id: str, item_id: str, include: Sequence[str]) -> dict[str, Any]:
        """One item of a conversation. Raises BadRequest, NotFound, Unavailable."""
        check_includes(include)
        await self._read_behind_turns(who, conversation_id)
        item = await self._store.item(who.public_id, conversation_id, item_id)
        if item is None:
            raise _no_item(item_id)
        return shown_item(item, include)

    async def remove(self, who: Principal, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Delete an item of a conversation, which is returned. Raises NotFound, ConversationLocked, Unavailable."""
        await self._read_behind_turns(who, conversation_id)
        removed = await self._behind_turns(lambda: self._store.remove(who.public_id, conversation_id, item_id))
        if removed is None:
            raise _no_item(item_id)
        return _shown(removed)

    # ------------------------------------------------------------ turns

    async def open(self, who: Principal, conversation_id: str, turn: str | None, lease_s: float) -> OpenTurn:
        """See `ports.ConversationTurns.open`."""
        _check_stored(who)
        name = _checked(conversation_id)
        if turn is None:
            conversation = await self._read_behind_turns(who, name)
        else:
            conversation = await self._claimed(who, name, turn, lease_s)
        try:
            if conversation.size_bytes > self._bytes_max:
                raise TooLarge(f"the conversation has grown over {self._bytes_max} bytes; begin a new one")
            items = await self._all(who, name)
        except BaseException:  # boundary: whatever stopped it, the turn has not begun
            await self.leave(turn)
            raise
        return OpenTurn(name, turn, items, history_of(items))

    async def leave(self, turn: str | None) -> None:
        """See `ports.ConversationTurns.leave`."""
        if turn is not None:
            try:
                await self._store.leave(turn)
            except Unavailable:
                return

    def new_turn(self) -> str:
        """See `ports.ConversationTurns.new_turn`."""
        return "resp_" + _hex(self._clock.now_us())

    async def _claimed(self, who: Principal, name: str, turn: str, lease_s: float) -> StoredConversation:
        """Claim a conversation; what earlier turns added is in the database then, where this gateway served them."""
        try:
            claimed = await self._store.begin(who.public_id, name, turn, lease_s, take_over=False)
        except ConversationLocked:
            await self._shipped()
            claimed = await self._store.begin(who.public_id, name, turn, lease_s, take_over=True)
        return _known(claimed, name)

    async def _all(self, who: Principal, name: str) -> list[Item]:
        items: list[Item] = []
        after = None
        while True:
            page = await self._store.page(who.public_id, name, after=after, limit=READ_ITEMS, newest_first=False)
            items += page
            if len(page) < READ_ITEMS:
                return items
            after = str(page[-1]["id"])

    async def _read_behind_turns(self, who: Principal, conversation_id: str) -> StoredConversation:
        """The conversation, once what this gateway has replied in it is there. Raises NotFound, Unavailable."""
        conversation = await self._require(who, conversation_id)
        if conversation.turn is not None:
            await self._shipped()
            conversation = await self._require(who, conversation_id)
        return conversation

    async def _behind_turns(self, change: Callable[[], Awaitable[T]]) -> T:
        """A change of a conversation, after the turn that this gateway has replied to. Raises ConversationLocked."""
        try:
            return await change()
        except ConversationLocked:
            await self._shipped()
            return await change()

    async def _shipped(self) -> None:
        try:
            await self._journal.shipped()
        except TimeoutError:
            problem = "the log has not reached the database yet; try again"
            raise Unavailable(problem, code="store_behind", headers={"retry-after": "2"}) from None

    async def _require(self, who: Principal, conversation_id: str) -> StoredConversation:
        return _known(await self._store.get(who.public_id, _checked(conversation_id)), conversation_id)

    def _read(self, raw: Any) -> list[dict[str, Any]]:
        """The items of a request, checked, without secrets, with new ids. Raises BadRequest."""
        reader = Reader(self._media_bytes_max)
        items = read_items(raw, reader, parse_items)
        if reader.dropped and self._strict:
            raise unknown_parameter(reader.dropped[0])
        if (refused := references(items)) or any(item["type"] in PASSED for item in items):
            at = next(iter(refused), None)
            at = next(n for n, item in enumerate(items) if item["type"] in PASSED) if at is None else at
            problem = f"`items[{at}]`: a conversation of Baton's keeps messages, calls of functions and reasoning"
            raise BadRequest(problem, param=f"items[{at}].type", code="unsupported_value")
        scrubbed: list[dict[str, Any]] = self._redactor.scrub(stored_items(items, _hex(self._clock.now_us())))
        return scrubbed


def _check_stored(who: Principal) -> None:
    """Raises BadRequest for a key whose text is not kept as it was sent."""
    if who.log_mode != "full":
        problem = f"this key's log mode is `{who.log_mode}`, which keeps no text as it was sent, so no conversations"
        raise BadRequest(problem, param="conversation", code="store_unavailable")


def _hex(now_us: int) -> str:
    return uuid7(now_us // 1000).replace("-", "")


def _checked(conversation_id: str) -> str:
    if not is_conversation_id(conversation_id):
        raise _no_conversation(conversation_id)
    return conversation_id


def _known(conversation: StoredConversation | None, conversation_id: str) -> StoredConversation:
    if conversation is None:
        raise _no_conversation(conversation_id)
    return conversation


def _no_conversation(conversation_id: str) -> NotFound:
    problem = f"Conversation with id '{conversation_id[:ID_CHARS_MAX]}' not found."
    return NotFound(problem, param="conversation", code="conversation_not_found")


def _no_item(item_id: str) -> NotFound:
    return NotFound(f"Item with id '{item_id[:ID_CHARS_MAX]}' not found.", param="item_id", code="item_not_found")


def _shown(conversation: StoredConversation) -> dict[str, Any]:
    return conversation_json(conversation.id, conversation.created_s, conversation.metadata)
