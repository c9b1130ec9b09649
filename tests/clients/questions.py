"""What the scripted model makes of the questions that every client asks it; the same words for Python and for Node."""

from __future__ import annotations

from pydantic import BaseModel

from tests.clients.model import TAIL

HELLO = "Say hello."
HELLO_SAID = f"You said: {HELLO} {TAIL}"
ASK_WEATHER = "What is the weather in Tokyo?"
WEATHER_SAID = "The tool said: Tokyo: 5 degrees and frogs"
ASK_BOTH = "What is the weather in Tokyo and in Lima?"
BOTH_SAID = "The tool said: Tokyo: 5 degrees and frogs and Lima: 4 degrees and frogs"
ASK_PLACE = "Which city has 14 million people, Tokyo?"


class Place(BaseModel):
    """A city, as structured output."""

    city: str
    millions: int


TOKYO = Place(city="Tokyo", millions=14)
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
