"""Turns of a conversation with other names of their keys and roles, as `role` and `content`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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
    if isinstance(rest.get("tool_calls"), list):
        rest["tool_calls"] = [_with_arguments(call) for call in rest["tool_calls"]]
    return {"role": role, "content": "" if content is None else content, **rest}


def _with_arguments(call: Any) -> Any:
    """A tool call whose arguments are a mapping, which a template writes as JSON; OpenAI's are JSON already."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": parsed(function["arguments"])}}


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
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": parsed(call.get("arguments", {}))}}
        for call in calls
    ]
