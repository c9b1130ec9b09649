// What the scripted model makes of the questions that every client asks it; the same words as in said.py.
import { z } from "zod";

export const MODEL = "baton";
export const HELLO = "Say hello.";
export const HELLO_SAID = "You said: Say hello. Zürich 東京 🎼";
export const ASK_WEATHER = "What is the weather in Tokyo?";
export const WEATHER_SAID = "The tool said: Tokyo: 5 degrees and frogs";
export const ASK_BOTH = "What is the weather in Tokyo and in Lima?";
export const BOTH_SAID = "The tool said: Tokyo: 5 degrees and frogs and Lima: 4 degrees and frogs";
export const ASK_PLACE = "Which city has 14 million people, Tokyo?";
export const Place = z.object({ city: z.string(), millions: z.number() });
export const TOKYO = { city: "Tokyo", millions: 14 };
export const weather = ({ city }) => `${city}: ${city.length} degrees and frogs`;
export const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

export async function all(stream) {
  const found = [];
  for await (const item of stream) found.push(item);
  return found;
}
