// The Vercel AI SDK with OpenAI's own provider over chat completions.
import { test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import * as checks from "./ai-sdk.mjs";

const provider = createOpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.KEY });
const model = provider.chat("baton");

test("chat", () => checks.chat(model));
test("stream", () => checks.stream(model));
test("tools there and back", () => checks.there(model));
test("tools streamed", () => checks.thereStreamed(model));
test("structured output", () => checks.structured(model));
test("structured output streamed", () => checks.structuredStreamed(model));
