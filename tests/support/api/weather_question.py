"""The question and the tool that the tests of clients send to the default model."""

from __future__ import annotations

from typing import Any

from chairlift.engine.config import DEFAULT_MODEL

MODEL = DEFAULT_MODEL
QUESTION = "What is the weather in Zürich and in Basel? Use the functions."
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Zürich", "Basel"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": WEATHER,
        "strict": True,
    },
}
