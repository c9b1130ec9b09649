// `openai` for Node: the Responses API.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { ResponsesToolRunner } from "openai/helpers/responses-tool-runner";
import { zodTextFormat } from "openai/helpers/zod";
import * as said from "./said.mjs";

const { MODEL, HELLO, HELLO_SAID, all } = said;
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.KEY });
const tool = { type: "function", name: "get_weather", parameters: said.parameters, strict: true };

test("create", async () => {
  const reply = await client.responses.create({ model: MODEL, input: HELLO });
  assert.deepEqual([reply.output_text, reply.status], [HELLO_SAID, "completed"]);
});

test("stream", async () => {
  const events = await all(await client.responses.create({ model: MODEL, input: HELLO, stream: true }));
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), HELLO_SAID);
  assert.deepEqual([events[0].type, events.at(-1).type], ["response.created", "response.completed"]);
});

test("the stream helper parses", async () => {
  const text = { format: zodTextFormat(said.Place, "place") };
  const stream = client.responses.stream({ model: MODEL, input: said.ASK_PLACE, text });
  assert.deepEqual((await stream.finalResponse()).output_parsed, said.TOKYO);
});

test("parse", async () => {
  const text = { format: zodTextFormat(said.Place, "place") };
  const reply = await client.responses.parse({ model: MODEL, input: said.ASK_PLACE, text });
  assert.deepEqual(reply.output_parsed, said.TOKYO);
});

test("tools there and back by previous_response_id", async () => {
  const asked = await client.responses.create({ model: MODEL, input: said.ASK_BOTH, tools: [tool] });
  const input = asked.output.filter((item) => item.type === "function_call").map((call) => ({
    type: "function_call_output", call_id: call.call_id, output: said.weather(JSON.parse(call.arguments)),
  }));
  assert.equal(input.length, 2);
  const final = await client.responses.create({
    model: MODEL, input, tools: [tool], previous_response_id: asked.id,
  });
  assert.equal(final.output_text, said.BOTH_SAID);
});

test("the tool runner", async () => {
  const runner = new ResponsesToolRunner({ functions: [{ tool, execute: said.weather }] });
  const final = await runner.run(client, { model: MODEL, input: said.ASK_WEATHER });
  assert.equal(final.output_text, said.WEATHER_SAID);
});

test("the tool runner streamed", async () => {
  const runner = new ResponsesToolRunner({ functions: [{ tool, execute: said.weather }] });
  const final = await runner.run(client, { model: MODEL, input: said.ASK_WEATHER }, { stream: true });
  assert.equal(final.output_text, said.WEATHER_SAID);
});

test("read and delete", async () => {
  const made = await client.responses.create({ model: MODEL, input: HELLO });
  assert.equal((await client.responses.retrieve(made.id)).output_text, HELLO_SAID);
  await client.responses.delete(made.id);
  await assert.rejects(client.responses.retrieve(made.id), OpenAI.NotFoundError);
});
