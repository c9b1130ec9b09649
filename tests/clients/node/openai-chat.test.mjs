// `openai` for Node: chat completions and its helpers, models, embeddings, errors and retries.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as said from "./said.mjs";

const { MODEL, HELLO, HELLO_SAID, all } = said;
const baseURL = process.env.BASE_URL;
const client = new OpenAI({ baseURL, apiKey: process.env.KEY });
const user = (content) => [{ role: "user", content }];
const tools = [{ type: "function", function: { name: "get_weather", parameters: said.parameters, strict: true } }];

function counted(settings = {}) {
  let requests = 0;
  const fetched = (...given) => (requests++, fetch(...given));
  const sdk = new OpenAI({ baseURL, apiKey: process.env.KEY, fetch: fetched, ...settings });
  return { sdk, count: () => requests };
}

test("chat behind a plan of two steps", async () => {
  const asked = client.chat.completions.create({ model: MODEL, messages: user(HELLO) });
  const { data, response } = await asked.withResponse();
  assert.equal(data.choices[0].message.content, HELLO_SAID);
  assert.equal(response.headers.get("x-baton-steps"), "2");
  assert.equal(data._request_id, response.headers.get("x-request-id"));
});

test("stream", async () => {
  const stream = await client.chat.completions.create({
    model: MODEL, messages: user(HELLO), stream: true, stream_options: { include_usage: true },
  });
  const chunks = await all(stream);
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), HELLO_SAID);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.ok(chunks.at(-1).usage.total_tokens > 0);
});

test("the stream helper", async () => {
  const stream = client.chat.completions.stream({ model: MODEL, messages: user(HELLO) });
  const deltas = [];
  stream.on("content", (delta) => deltas.push(delta));
  assert.equal(await stream.finalContent(), HELLO_SAID);
  assert.ok(deltas.length > 1);
});

test("parse", async () => {
  const reply = await client.chat.completions.parse({
    model: MODEL, messages: user(said.ASK_PLACE), response_format: zodResponseFormat(said.Place, "place"),
  });
  assert.deepEqual(reply.choices[0].message.parsed, said.TOKYO);
});

test("parse a stream", async () => {
  const stream = client.chat.completions.stream({
    model: MODEL, messages: user(said.ASK_PLACE), response_format: zodResponseFormat(said.Place, "place"),
  });
  assert.deepEqual((await stream.finalChatCompletion()).choices[0].message.parsed, said.TOKYO);
});

test("tools there and back", async () => {
  const messages = user(said.ASK_BOTH);
  const asked = (await client.chat.completions.create({ model: MODEL, messages, tools })).choices[0];
  assert.equal(asked.finish_reason, "tool_calls");
  messages.push(asked.message);
  for (const call of asked.message.tool_calls) {
    const content = said.weather(JSON.parse(call.function.arguments));
    messages.push({ role: "tool", tool_call_id: call.id, content });
  }
  const final = await client.chat.completions.create({ model: MODEL, messages, tools });
  assert.equal(final.choices[0].message.content, said.BOTH_SAID);
});

test("runTools", async () => {
  const tool = zodFunction({ name: "get_weather", parameters: z.object({ city: z.string() }), function: said.weather });
  const runner = client.chat.completions.runTools({ model: MODEL, messages: user(said.ASK_BOTH), tools: [tool] });
  assert.equal(await runner.finalContent(), said.BOTH_SAID);
});

test("runTools streamed", async () => {
  const tool = zodFunction({ name: "get_weather", parameters: z.object({ city: z.string() }), function: said.weather });
  const runner = client.chat.completions.runTools({
    model: MODEL, messages: user(said.ASK_BOTH), tools: [tool], stream: true,
  });
  assert.equal(await runner.finalContent(), said.BOTH_SAID);
});

test("models", async () => {
  const names = (await all(client.models.list())).map((model) => model.id);
  assert.ok(names.includes("baton") && names.includes("scribe"));
  assert.equal((await client.models.retrieve("scribe")).id, "scribe");
});

test("embeddings", async () => {
  const reply = await client.embeddings.create({ model: "embedder", input: ["a", "abc"] });
  assert.deepEqual(reply.data.map((item) => item.embedding[0]), [1, 3]);
});

test("legacy completions", async () => {
  const reply = await client.completions.create({ model: "scribe", prompt: "Once", max_tokens: 16 });
  assert.equal(reply.choices[0].text, " and so on: Once");
});

test("a wrong key is not tried again", async () => {
  const { sdk, count } = counted({ apiKey: "sk-wrong" });
  await assert.rejects(sdk.chat.completions.create({ model: MODEL, messages: user(HELLO) }), (error) => {
    assert.ok(error instanceof OpenAI.AuthenticationError);
    assert.equal(error.code, "invalid_api_key");
    return true;
  });
  assert.equal(count(), 1);
});

test("no money is not tried again", async () => {
  const { sdk, count } = counted({ apiKey: process.env.BROKE_KEY });
  await assert.rejects(sdk.chat.completions.create({ model: MODEL, messages: user(HELLO) }), (error) => {
    assert.ok(error instanceof OpenAI.RateLimitError);
    assert.equal(error.code, "insufficient_quota");
    return true;
  });
  assert.equal(count(), 1);
});

test("a busy worker is tried again when it said", async () => {
  const { sdk, count } = counted({ maxRetries: 1 });
  await assert.rejects(sdk.chat.completions.create({ model: "limited", messages: user(HELLO) }), (error) => {
    assert.ok(error instanceof OpenAI.RateLimitError);
    assert.ok(Number(error.headers.get("retry-after-ms")) <= 1000);
    return true;
  });
  assert.equal(count(), 2);
});

test("a bad request names the field", async () => {
  await assert.rejects(client.chat.completions.create({ model: "picky", messages: user(HELLO) }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.deepEqual([error.param, error.code], ["temperature", "unsupported_value"]);
    return true;
  });
});

test("an unknown model", async () => {
  await assert.rejects(client.models.retrieve("no-such"), OpenAI.NotFoundError);
});

test("a stream that dies raises in the loop", async () => {
  const stream = await client.chat.completions.create({ model: "cutter", messages: user(HELLO), stream: true });
  await assert.rejects(all(stream), (error) => error instanceof OpenAI.APIError && error.type === "upstream_error");
});
