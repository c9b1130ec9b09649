// The Vercel AI SDK with its provider for OpenAI-compatible servers.
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as checks from "./ai-sdk.mjs";

const provider = createOpenAICompatible({
  name: "baton", baseURL: process.env.BASE_URL, apiKey: process.env.KEY, includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider("baton");

test("chat", () => checks.chat(model));
test("stream", () => checks.stream(model));
test("tools there and back", () => checks.there(model));
test("tools streamed", () => checks.thereStreamed(model));
test("structured output", () => checks.structured(model));
test("structured output streamed", () => checks.structuredStreamed(model));
test("embeddings", () => checks.embeddings(provider.textEmbeddingModel("embedder")));
test("a refused request is told and not tried again", () => checks.refused(provider("picky")));
