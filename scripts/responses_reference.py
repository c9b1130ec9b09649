"""Write docs/responses.md: the fate of each property of a Responses request, from the table that decides it."""

from __future__ import annotations

from pathlib import Path

from gateway.core.openai.marks import NATIVE
from gateway.core.openai.responses.items import KINDS
from gateway.core.openai.responses.request import FIELDS, INCLUDABLE, MOVED
from scripts.markdown import code, paragraph, table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "responses.md"

HEAD = """# The Responses API

<!-- Written by scripts/responses_reference.py (`make docs`); change the code, or the sentences in that script. -->

`POST /v1/responses` is OpenAI's Responses API over the same machinery as chat completions: the conductor plans,
workers answer, and budgets, limits, caps, `Idempotency-Key`, headers, errors, log and outcomes are those of a chat
request. A response's `id` is its rollout's id in other words: `GET /v1/rollouts/{id}` and `POST /v1/outcomes` take
it.

```python
first = client.responses.create(model="baton", input="Name a prime above 100.")
second = client.responses.create(model="baton", input="And the next one?", previous_response_id=first.id)
```

| | |
|---|---|
| `POST /v1/responses` | whole, or with `stream: true` as OpenAI's typed events; in the background with `background` |
| `GET /v1/responses/{id}` | a stored response as it was replied |
| `GET /v1/responses/{id}/input_items` | what it was made from, earlier turns included; `limit`, `order`, `after` |
| `DELETE /v1/responses/{id}` | takes its texts out of the log |
| `POST /v1/responses/{id}/cancel` | ends one that is being made in the background; a 400 for any other |
| `POST /v1/responses/input_tokens` | the tokens that the input has, by the worker's tokenizer; it costs nothing |
| `POST /v1/responses/compact` | always a 404 `unsupported_endpoint`: Baton compacts no conversation |

## Conversations

```python
conversation = client.conversations.create(metadata={"topic": "primes"})
client.responses.create(model="baton", input="A prime above 100?", conversation=conversation.id)
client.responses.create(model="baton", input="And the next one?", conversation=conversation.id)
```

| | |
|---|---|
| `POST /v1/conversations` | makes one; `items` (at most 20), `metadata` |
| `GET`, `POST`, `DELETE /v1/conversations/{id}` | reads it, replaces its `metadata`, deletes it with its items |
| `POST /v1/conversations/{id}/items` | adds `items`, at most 20 |
| `GET /v1/conversations/{id}/items` | its items; `limit`, `order`, `after`, `include` |
| `GET`, `DELETE /v1/conversations/{id}/items/{item_id}` | reads an item; deletes it |

- A response with `conversation` is a turn: the worker gets the items before it, and its own input and output are added
  once it has its reply, whole, streamed or in the background, with `store: false` too. One that fails, is cancelled or
  is left by its client adds nothing.
- One turn at a time has a conversation. Another one, and a change of its items, is meanwhile a 409
  `conversation_locked` with `x-should-retry: true`; OpenAI's SDKs try again. Lines of a batch wait for it instead. A
  turn that ended on this gateway is always seen by the next. A gateway that dies in the middle of a turn that is not
  in the background leaves the conversation locked for up to `BATON_CAPS_WALL_S_MAX` and a minute.
- A reply is added once, also where a gateway dies behind it ([decision](adr/0034-a-turn-comes-with-its-rollout.md)).
- A conversation belongs to its key, which must log text (`full`), and holds at most `BATON_BODY_BYTES_MAX` bytes:
  beyond, 413. Secrets are taken out as they are of the log. Items are deleted when the retention of their key is over.
- `conversation` and `previous_response_id` exclude each other. Items are messages, calls, results and reasoning; those
  of hosted tools are a 400. A result whose call was deleted goes to no worker.
- What vendors need back (signatures, encrypted reasoning) stays with the conversation; `include` shows it.

## Stored responses

A response is stored by being logged, so it is there when its reply is, on every gateway over the same database.

- Only for the key that made it. For any other it does not exist: 404, or 400 `previous_response_not_found`.
- Only where the key's log mode is `full`. `redacted` and `metadata` keep no text as it was sent: `store` then counts
  as `false`, and `store: true` is a 400 `store_unavailable`.
- Secrets are taken out of what is logged. A conversation that is continued holds `[secret]` where one stood.
- `store: false` keeps it from being read back, continued and trained on. It does not keep it out of the log; the
  key's log mode does.
- `DELETE` takes every text out of the rollout and its child loops, as if the key logged metadata only, and marks it
  as not for training. Costs, times, workers and outcomes stay. Later turns of the conversation keep what they were
  sent, and a reply kept for its `Idempotency-Key` is kept for its time.
- `previous_response_id` brings the whole conversation before it, without that one's `instructions`. It is read from
  the database: where the log is late it is waited for, then 503 `store_behind`.
- A conversation with all that it continues is bounded as one chat request is, in messages (`BATON_MESSAGES_MAX`) and
  in bytes (`BATON_BODY_BYTES_MAX`): beyond, 400 and 413.
- A response that failed can be read back, and not continued.

- With `background: true` it outlives its connection and its gateway ([how](openai.md#responses-in-the-background)).

## What becomes of each property

`null` counts as absent. What is not in this table is dropped and named in `x-baton-dropped-fields`; with
`BATON_STRICT_FIELDS=true` it is a 400. What is always refused in a chat request is refused here, too. The chat
counterparts and what becomes of them are in the [API reference](api.md#post-v1chatcompletions).

"""

ITEMS = """
## Input and tools

{kinds}
`reasoning` items are accepted; of them only Baton's own `encrypted_content` is sent on, to the vendor that needs it. A
message's content is text, `input_text`, `input_image` (`image_url`) and `input_file` (`file_data` or `file_url`), an
assistant's `output_text` and `refusal`; `file_id` is refused, as no files are kept. A file is PDF, text of any kind or
an office document. By URL it goes to workers of this API that [fetch](pool.md) themselves; for others it is
fetched here as images are. Every `function_call` needs its `function_call_output` and the other way round. An
`item_reference` finds items of stored responses of the same key.

{passed}
They go on as they came, at their place, to workers that are
[asked by this API](pool.md#workers-behind-the-responses-api), those of hosted tools only where the worker has some.
Elsewhere they are left out, and `x-baton-left-out` names their types; so it does with `phase`, `reasoning.summary`,
`truncation: auto` and `context_management`, which chat requests do not have. Only the vendor that made a `compaction`
can read it.

Tools are functions, custom tools, and namespaces of both. Declarations of hosted ones (`web_search`, `file_search`,
`computer`, `code_interpreter`, `mcp`, `image_generation`, shells) go to the worker that answers where its pool entry
lists them as [`hosted`](pool.md#workers-behind-the-responses-api), and are left out and named in `x-baton-left-out`
where it does not. What such a tool did is an item of the output, with the worker's fields.
`tool_choice` may be `none`, `auto`, `required`, one function or custom tool, one of the declared hosted tools, which
goes the way of its declaration, or `allowed_tools`: then only those are sent on. Where all `tools` are hosted ones,
the choice among them is their worker's.

`include` goes to workers of this API. Two names have an effect with every worker:
`message.output_text.logprobs`, and `reasoning.encrypted_content`. With the latter the first reasoning item has, as
`encrypted_content`, what the worker's vendor needs back: thinking with its signature, the state of tool calls. It is
opaque, and goes to workers of that vendor and model family alone.

These belong to chat completions and are a 400 that says where they went:
{moved}.

## Output

The items of a worker that is asked by this API come in its order, each by itself: messages with their `phase` and
their annotations of every type, reasoning with its summary and its text, calls, hosted tools. A message without a
phase has none. Other workers reply with a chat message: reasoning, then text, then calls, and the phase is Baton's.
Promised structure is checked on the last message. What such a worker says of the request in its Response object
(`reasoning`, `text`, `temperature`, `tools`, `billing`, …) is told to the client; ids, times and names of models are
Baton's. Items of hosted tools keep the id that their worker gave, but for those that a conversation holds.

## Streaming

`response.created` and `response.in_progress` come with the first piece of the reply, or after `BATON_KEEPALIVE_S`
without one; until then an error has its own status. Items, content parts, text, refusals, citations, reasoning and its
summary (where a worker shows it), function arguments and the progress of hosted tools have OpenAI's events with
`sequence_number`. The last event is `response.completed`,
`response.incomplete` or `response.failed`; there is no `[DONE]`. After `response.failed` comes one `error` event, on
which OpenAI's SDKs raise. A comment with the rollout's headers stands before the last event.

`stream_options.include_obfuscation: true` pads deltas; without it none is sent.
"""

FATES = {
    "read": "Baton acts on it",
    "chat": "goes the way of its chat counterpart",
    "native": "goes to workers that are asked by this API",
    "refused": "anything else is a 400 `unsupported_parameter`",
}


def render() -> str:
    """Return the page."""
    good = {name: good for name, (_, _, good) in FIELDS.items()} | {"include": "a list of the names below"}
    rows = [(code(name), good[name], FATES[fate]) for name, (fate, _, _) in FIELDS.items()]
    kinds = paragraph(f"`input` is a string or a list of items: {', '.join(map(code, KINDS))}.")
    native = f"{', '.join(map(code, NATIVE))} and hosted tools' (`web_search_call`, …)"
    passed = paragraph(f"Other items have no place in a chat message: {native}.")
    moved = ", ".join(f"`{name}` (`{new}`)" for name, new in MOVED.items())
    properties = table(("property", "a good value", "what becomes of it"), rows)
    included = paragraph(f"`include` may name {', '.join(map(code, INCLUDABLE))}.")
    return f"{HEAD}{properties}\n{included}\n{ITEMS.format(kinds=kinds, passed=passed, moved=paragraph(moved))}"
