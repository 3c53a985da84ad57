"""Chats drawn at random for the tests of chat templates: as data sets have them, and as messages for `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

WORDS = (
    "the cat", "Größe", "猫が好き", "🦜 flies", "12,345.67", "def f(x):\n    return x", "a < b and c > d", "</b>", "<think",
    "[0]", "{{ messages }}", "{% raw %}", '"quoted" \\n', "tab\there", "e\u0301", "ภาษา", "l'été", "https://a.b/c?d=<e>", "$x_1$",
    "  ", "\n", "\n\n", "<tool_response>", "none", "\u2028", "ﬁ",
)  # fmt: skip
NAMES = ("get_weather", "search", "add_2", "größe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a template takes."""

    system: bool = True
    tools: bool = False
    calls_at_once: int = 2
    thoughts: bool = False
    images: bool = False
    audios: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A record's fields, and the number of tokens of each medium in order."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    media_tokens: list[int]


class Chats:
    """Chats that a template with certain abilities takes; the same ones for a seed."""

    def __init__(self, seed: int, abilities: Abilities) -> None:
        self._random = Random(seed)
        self._abilities = abilities

    def draw(self) -> Chat:
        random, abilities = self._random, self._abilities
        media_tokens: list[int] = []
        tools = [self._tool() for _ in range(random.randint(1, 3))] if abilities.tools and random.random() < 0.5 else None
        messages: list[dict[str, Any]] = []
        if abilities.system and random.random() < 0.5:
            messages.append({"role": "system", "content": self._text()})
        for _ in range(random.randint(1, 4)):
            messages.append({"role": "user", "content": self._content(media_tokens)})
            if tools and random.random() < 0.5:
                messages += self._calls()
            messages.append(self._answer({"content": self._text(some=True)}))
        return Chat(messages=messages, tools=tools, media_tokens=media_tokens)

    def _answer(self, fields: dict[str, Any]) -> dict[str, Any]:
        thought = {}
        if self._abilities.thoughts and self._random.random() < 0.4:
            name = self._random.choice(("reasoning_content", "reasoning", "content"))
            if name == "content":
                fields["content"] = f"<think>\n{self._text()}\n</think>\n\n{fields['content']}"
            else:
                thought = {name: self._text(some=True)}
        return {"role": "assistant", **fields, **thought}

    def _calls(self) -> list[dict[str, Any]]:
        random = self._random
        count = random.randint(1, self._abilities.calls_at_once)
        calls = [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": random.choice(NAMES), "arguments": self._arguments()},
            }
            for index in range(count)
        ]
        said = self._answer({"content": random.choice(("", self._text())), "tool_calls": calls})
        results = [{"role": "tool", "tool_call_id": call["id"], "content": self._text(some=True)} for call in calls]
        return [said, *results]

    def _arguments(self) -> dict[str, Any]:
        random = self._random
        values = (self._text(), random.randint(-5, 5), random.random(), None, True, [1, "<2>"], {"deep": self._text()})
        return {random.choice(("city", "x<y", "größe")): random.choice(values) for _ in range(random.randint(0, 2))}

    def _tool(self) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"city": {"type": "string", "description": self._text()}}}
        function = {"name": self._random.choice(NAMES), "description": self._text(), "parameters": parameters}
        return {"type": "function", "function": function}

    def _content(self, media_tokens: list[int]) -> Any:
        kinds = [kind for kind, able in (("image", self._abilities.images), ("audio", self._abilities.audios)) if able]
        if not kinds or self._random.random() < 0.4:
            return self._text(some=True)
        parts: list[dict[str, Any]] = [{"type": "text", "text": self._text(some=True)} for _ in range(self._random.randint(1, 2))]
        for _ in range(self._random.randint(1, 3)):
            parts.insert(self._random.randint(0, len(parts)), {"type": self._random.choice(kinds)})
            media_tokens.append(self._random.randint(1, 40))
        return parts

    def _text(self, *, some: bool = False) -> str:
        text = "".join(self._random.choices(WORDS, k=self._random.randint(0, 6)))
        return text if text.strip() or not some else f"hm {text}"


def spoilt(value: Any, names: Sequence[str], random: Random) -> Any:
    """A value with names of control tokens, and parts of them, in its texts."""
    if isinstance(value, str) and value:  # an empty system prompt is none for some templates
        name = random.choice(names)
        cut = random.randint(1, len(name))
        place = random.randint(0, len(value))
        return value[:place] + random.choice((name, name[:cut], name[cut:])) + value[place:]
    if isinstance(value, list):
        return [spoilt(item, names, random) for item in value]
    if isinstance(value, dict):
        kept = ("role", "type", "id", "tool_call_id", "name")
        return {key: item if key in kept else spoilt(item, names, random) for key, item in value.items()}
    return value
