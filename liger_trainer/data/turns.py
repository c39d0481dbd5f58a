"""Turns of a conversation with other names of their keys and roles, as `role` and `content`.

A chat template may leave out a field of them, a turn, or the list of tools.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from liger_trainer.errors import UserError

Turn = dict[str, Any]

ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "customer"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatbot", "model", "ai", "chatgpt", "agent"), "assistant"),
    **dict.fromkeys(("system", "system_prompt"), "system"),
    "developer": "developer",
    **dict.fromkeys(("tool", "function", "observation", "ipython", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
"""Names of roles, in lower case, and the roles of a chat template; the content of "function_call" is JSON."""

STANDARD_ROLES = {*ROLES.values()} - {"function_call"}
"""The roles of chat templates."""

ROLE_KEYS = ("role", "from", "speaker", "author")
CONTENT_KEYS = ("content", "value", "text", "message")


class TurnError(UserError):
    """A conversation that cannot be read; the text begins with what it holds."""


def is_conversation(value: Any) -> bool:
    """Whether `value` is a list of turns; text never is, though it may be JSON."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and _key(value[0], ROLE_KEYS) != ""


def parsed(value: Any) -> Any:
    """`value`, or what it says where it is the JSON text of a list or a mapping, as in the cell of a CSV file."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def of_cell(value: Any, roles: Mapping[str, str], column: str) -> Any:
    """The conversation or the turn that text holds as JSON, as the cell of a table does; anything else as it is.

    An answer ends with a turn of the assistant, and only one of a pair may begin with its prompt. Other conversations
    are what was asked for, and stay text.
    """
    found = parsed(value) if isinstance(value, str) else None
    if not is_conversation([found] if isinstance(found, Mapping) else found):
        return value
    try:
        spoken = [turn["role"] for turn in as_turns(found, roles)]
    except TurnError:  # such as a list of books by their authors
        return value
    asks = column == "completion" and {*spoken} & {"user", "system", "developer"}
    return value if column != "prompt" and (asks or spoken[-1] != "assistant") else found


def as_turns(value: Any, roles: Mapping[str, str]) -> list[Turn]:
    """The turns of a conversation with `role` and `content`.

    Args:
        value: A list of turns, one turn, or JSON text of these. A turn names its speaker in one of `ROLE_KEYS` and its
            text in one of `CONTENT_KEYS`; other keys, such as `tool_calls`, are kept unless they are None.
        roles: Further names of roles, each with the role of the chat template that it stands for, which may be itself.

    Raises:
        TurnError: for a turn that cannot be read, or a role that is not known.
    """
    value = parsed(value)
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, list):
        raise TurnError(f"{type(value).__name__} ({str(value)[:40]!r}), not a list of turns")
    if not turns:
        raise TurnError("no turns")
    return [_turn(turn, roles) for turn in turns]


def renamed_roles(conversations: Iterable[Any], roles: Mapping[str, str]) -> dict[str, str]:
    """The names of roles in `conversations` that `as_turns` replaces, each with the role that it becomes."""
    found: dict[str, str] = {}
    for conversation in conversations:
        turns = parsed(conversation)
        for turn in [turns] if isinstance(turns, Mapping) else turns if isinstance(turns, list) else ():
            name = turn.get(_key(turn, ROLE_KEYS)) if isinstance(turn, Mapping) else None
            role = _role(name, roles) if isinstance(name, str) else None
            if role is not None and role != name:
                found[str(name)] = role
    return found


def _role(name: str, roles: Mapping[str, str]) -> str | None:
    return roles.get(name) or ROLES.get(name.strip().lower())


def _key(turn: Mapping[str, Any], names: Sequence[str]) -> str:
    return next((name for name in names if turn.get(name) is not None), "")


def _turn(turn: Any, roles: Mapping[str, str]) -> Turn:
    if not isinstance(turn, Mapping):
        raise TurnError(f"a list with {type(turn).__name__} ({str(turn)[:40]!r}), not a list of turns")
    role_key, content_key = _key(turn, ROLE_KEYS), _key(turn, CONTENT_KEYS)
    name = turn.get(role_key)
    if not isinstance(name, str):
        raise TurnError(f"a turn without `role` ({str(dict(turn))[:60]})")
    role = _role(name, roles)
    if role is None:
        raise TurnError(
            f"a turn of {name!r}, which names none of the roles {', '.join(dict.fromkeys(ROLES.values()))}; set "
            f'`roles`, such as {{"{name}": "user"}}'
        )
    rest = {key: without_none(value) for key, value in turn.items() if key not in (role_key, content_key)}
    rest = {key: value for key, value in rest.items() if value is not None}
    content = turn.get(content_key)
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _calls(content), **rest}
    if content is None and not rest:
        raise TurnError(f"a turn without `content` ({str(dict(turn))[:60]})")
    if content is not None and not isinstance(content, (str, list)):
        raise TurnError(f"a turn whose `content` is {type(content).__name__} ({str(dict(turn))[:60]})")
    if isinstance(content, list) and not all(isinstance(part, Mapping) for part in content):
        raise TurnError(
            f'a turn whose `content` is a list of other things than parts such as {{"type": "text", "text": "..."}} '
            f"({str(dict(turn))[:60]})"
        )
    if "function_call" in rest and "tool_calls" not in rest:  # OpenAI's older key, which no template reads
        rest["tool_calls"] = _calls(rest.pop("function_call"))
    if isinstance(rest.get("tool_calls"), list):
        rest["tool_calls"] = [_with_arguments(call) for call in rest["tool_calls"]]
    return {"role": role, "content": "" if content is None else content, **rest}


_HOLDERS = ("image_url", "url", "path", "base64", "source", "data")
"""Keys of a part of type "image" that hold a picture where no trainer looks for it; TRL looks in "image"."""


def as_seen(turn: Turn, pictures: bool, own: bool) -> Turn:
    """A turn as the model sees it: in data without pictures, the parts of its content are joined into one text.

    Args:
        turn: A turn with `role` and `content`.
        pictures: Whether the data has pictures, so that contents stay lists of parts.
        own: Whether a part of type "image" may hold its picture, in "image".

    Raises:
        TurnError: for a part that the model would not see.
    """
    content = turn.get("content")
    if not isinstance(content, list):
        return turn
    for part in content:
        kind = part.get("type") or "text"
        if kind == "text" and isinstance(part.get("text"), str):
            continue
        held = any(part.get(key) is not None for key in (*_HOLDERS, *(() if own else ("image",))))
        if kind != "image" or not pictures or held:
            raise TurnError(
                f"a part of type {kind!r}, which the model would not see; give text, or list the pictures of a row in "
                'a column `images`, and leave {"type": "image"} in their places'
            )
    return turn if pictures else {**turn, "content": "".join(part["text"] for part in content)}


def _with_arguments(call: Any) -> Any:
    """A tool call whose arguments are a mapping, which a template writes as JSON; OpenAI's are JSON already."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"])}
    others = {key: value for key, value in call.items() if key not in _ARGUMENTS}
    return {**others, "arguments": _arguments(call)} if "name" in call else call


_ARGUMENTS = ("arguments", "parameters")


def _arguments(call: Mapping[str, Any]) -> Any:
    """The arguments of a call, where they are JSON parsed; none where the call has a name alone.

    Raises:
        TurnError: for a call that holds them under a name that is not known.
    """
    found = [parsed(call[key]) for key in _ARGUMENTS if call.get(key) is not None]
    others = [
        key for key, value in call.items() if key not in ("name", "id", "type", *_ARGUMENTS) and value is not None
    ]
    if not found and others:
        raise TurnError(f"a function call without `arguments` ({str(dict(call))[:60]})")
    return found[0] if found else {}


def is_learnt(turn: Mapping[str, Any]) -> bool:
    """Whether an answer is to be learnt: not with ``weight: 0`` (OpenAI's key) or ``train: false`` (axolotl's).

    Raises:
        TurnError: for a weight other than 0 and 1.
    """
    weight = turn.get("weight", 1)
    if weight not in (0, 1):
        raise TurnError(f"a turn with `weight: {weight}`; 0 and 1 are known")
    return bool(weight) and bool(turn.get("train", True))


def without_none(value: Any) -> Any:
    """`value` without the keys that Arrow has added to its mappings, which hold None, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


def _calls(content: Any) -> list[dict[str, Any]]:
    calls = parsed(content)
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise TurnError(f"a function call that is not JSON with `name` and `arguments` ({str(content)[:60]})")
    return [{"type": "function", "function": {"name": call["name"], "arguments": _arguments(call)}} for call in calls]


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
