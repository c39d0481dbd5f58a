"""What of a conversation a chat template leaves out: a field, a turn, or the list of tools."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from liger_trainer.data.turns import Turn, parsed, without_none

_WORDS = 5
"""How many words of a text are looked for: templates change blanks, quotes and ends."""

_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thoughts")
_SILENT = ("role", "name", "tool_call_id", "id", "type", "weight", "train", "index")  # say how a turn is read


def left_out(rows: Sequence[Mapping[str, Any]], render: Callable[[list[Turn], Any], str]) -> list[str]:
    """What the chat template leaves out of `rows`, each as a phrase such as "`tools` (3 of 3)".

    Thoughts count where none of them reaches the text: many templates leave out those of earlier turns, on purpose.

    Args:
        rows: Rows as the trainer takes them.
        render: Writes a conversation, given its turns and its tools, as the chat template does.
    """
    there: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    for row in rows:
        for turns in conversations(row):
            tools = parsed(row.get("tools"))
            text = render(turns, tools or None)
            for field, said in _said(turns, tools):
                there[field] += 1
                missing[field] += not _is_in(said, text)
    return [
        f"{field} ({count} of {there[field]})"
        for field, count in missing.items()
        if count == there[field] or (count and field.strip("`") not in _THOUGHTS)
    ]


def renderer(processor: Any, template: str | None) -> Callable[..., str]:
    """A function that writes a conversation, given its turns and its tools, with the chat template of `processor`.

    Args:
        processor: A tokenizer, or a processor of pictures and text, whose templates take the parts of a content.
        template: The template to use in place of the processor's; None for that one.
    """
    options = {} if template is None else {"chat_template": template}

    def render(turns: Sequence[Turn], tools: Any = None, add_generation_prompt: bool = False) -> str:
        if hasattr(processor, "tokenizer"):
            turns = [{**turn, "content": _parts(turn["content"])} for turn in turns]
        more = {**options, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return str(processor.apply_chat_template(list(turns), tokenize=False, **more))

    return render


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def conversations(row: Mapping[str, Any]) -> list[list[Turn]]:
    """The conversations of a row, each with its prompt; none in a row of text."""
    prompt = row.get("prompt")
    start = prompt if isinstance(prompt, list) else []
    found = [row[name] for name in ("messages", "completion", "chosen", "rejected") if isinstance(row.get(name), list)]
    return [without_none([*start, *turns]) for turns in found] or ([without_none(start)] if start else [])


def _said(turns: Sequence[Turn], tools: Any) -> Iterator[tuple[str, str]]:
    """Each text of a conversation, with the name of what it is."""
    for tool in tools or ():
        if isinstance(tool, Mapping):
            yield "`tools`", str(tool.get("function", tool).get("name", ""))
    for turn in turns:
        for key, value in turn.items():
            if key == "content":
                for text in _texts(value):
                    yield f"the turns of `{turn['role']}`", text.rpartition("</think>")[2]
            elif key == "tool_calls":
                for call in value:
                    yield "`tool_calls`", str(call.get("function", call).get("name", ""))
            elif key not in _SILENT and isinstance(value, str):
                yield f"`{key}`", value


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def _is_in(said: str, text: str) -> bool:
    words = re.findall(r"\w+", said.strip().partition("\n")[0])[:_WORDS]
    return not words or re.search(r"\W+".join(map(re.escape, words)), text) is not None
