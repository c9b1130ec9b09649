// What the Vercel AI SDK must do with any of its providers. It checks every reply with zod.
import assert from "node:assert/strict";
import { APICallError, embedMany, generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";
import * as said from "./said.mjs";

const tools = {
  get_weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: said.weather,
  }),
};
const place = Output.object({ schema: said.Place });

function onError({ error }) {
  throw error;
}

export async function chat(model) {
  const { text, finishReason, usage } = await generateText({ model, prompt: said.HELLO });
  assert.deepEqual([text, finishReason], [said.HELLO_SAID, "stop"]);
  assert.ok(usage.totalTokens > 0);
}

export async function stream(model) {
  const result = streamText({ model, prompt: said.HELLO, onError });
  const parts = await said.all(result.textStream);
  assert.equal(parts.join(""), said.HELLO_SAID);
  assert.ok(parts.length > 1);
  assert.ok((await result.usage).totalTokens > 0);
}

async function twoCallsThenText(result) {
  assert.equal(await result.text, said.BOTH_SAID);
  const steps = await result.steps;
  assert.deepEqual(steps.map((step) => step.toolCalls.length), [2, 0]);
}

const withTools = { tools, prompt: said.ASK_BOTH, stopWhen: isStepCount(3) };

export async function there(model) {
  await twoCallsThenText(await generateText({ model, ...withTools }));
}

export async function thereStreamed(model) {
  await twoCallsThenText(streamText({ model, ...withTools, onError }));
}

export async function structured(model) {
  const { output } = await generateText({ model, prompt: said.ASK_PLACE, output: place });
  assert.deepEqual(output, said.TOKYO);
}

export async function structuredStreamed(model) {
  const result = streamText({ model, prompt: said.ASK_PLACE, output: place, onError });
  const parts = await said.all(result.partialOutputStream);
  assert.deepEqual(parts.at(-1), said.TOKYO);
}

export async function embeddings(model) {
  const { embeddings } = await embedMany({ model, values: ["a", "abc"] });
  assert.deepEqual(embeddings.map((vector) => vector[0]), [1, 3]);
}

export async function refused(model) {
  await assert.rejects(generateText({ model, prompt: said.HELLO }), (error) => {
    assert.ok(APICallError.isInstance(error), error.message);
    assert.deepEqual([error.statusCode, error.isRetryable], [400, false]);
    return true;
  });
}
