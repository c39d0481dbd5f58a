"""Which column of the data holds what, and the rows that a trainer of TRL takes, made from them.

TRL takes few shapes: `messages`; `prompt` and `completion`; `prompt`, `chosen` and `rejected`; `prompt`, `completion`
and `label`; `prompt` alone; and text. Data comes in many more: ShareGPT's `conversations` of `from` and `value`,
Alpaca's `instruction`, `input` and `output`, questions and answers, pairs whose prompt is spread over `system` and
`question`. A shape is recognised by the names of its columns and the first row.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from liger_trainer.data.turns import (
    STANDARD_ROLES,
    Turn,
    TurnError,
    as_seen,
    as_turns,
    is_conversation,
    of_cell,
    parsed,
    renamed_roles,
)
from liger_trainer.errors import UserError

PICTURES = ("image", "images")
"""The columns of pictures: one, or a list of them."""

NAMES: dict[str, tuple[str, ...]] = {
    "turns": ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns"),
    "system": ("system", "system_prompt", "system_message"),
    "prompt": ("prompt", "instruction", "question", "query", "problem", "user", "input"),
    "input": ("input", "context"),
    "history": ("history",),
    "answer": ("completion", "output", "response", "solution", "answer", "assistant", "target"),
    "chosen": (
        *("chosen", "chosen_response", "response_chosen", "answer_chosen", "preferred", "accepted", "winner"),
        *("response_j", "positive", "better"),
    ),
    "rejected": (
        *("rejected", "rejected_response", "response_rejected", "answer_rejected", "dispreferred", "non_preferred"),
        *("loser", "response_k", "negative", "worse"),
    ),
    "label": ("label", "kto_tag", "desirable", "is_desirable", "thumbs_up"),
}
"""Parts of a row, and the names of columns that hold them, the first that is there before the others."""

_TEXT = frozenset(name for part, names in NAMES.items() if part != "label" for name in names)


def holds_text(column: str) -> bool:
    """Whether a column of this name holds text or turns, in data of any shape."""
    return _plain(column) in _TEXT


def _plain(column: str) -> str:
    return column.strip().lower().replace(" ", "_").replace("-", "_")


ALPACA = """\
Below is an instruction that describes a task. Write a response that appropriately completes the request.

### Instruction:
{instruction}

### Response:
"""
ALPACA_WITH_INPUT = """\
Below is an instruction that describes a task, paired with an input that provides further context. Write a response \
that appropriately completes the request.

### Instruction:
{instruction}

### Input:
{input}

### Response:
"""
"""The prompt of a model without a chat template: that of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca)."""

_PARTS = {  # what a trainer needs of a row, as alternatives in the order in which they are looked for
    "messages": (("turns",), ("prompt", "answer")),
    "preference": (("chosen", "rejected"),),
    "unpaired": (("chosen", "rejected"), ("turns", "label"), ("prompt", "answer", "label")),
    "prompt": (("prompt",), ("turns",)),
}
_AROUND = ("system", "input", "history")
_MORE: dict[str, tuple[str, ...]] = {  # what it takes where it is there
    **dict.fromkeys(("messages", "prompt"), _AROUND),
    **dict.fromkeys(("preference", "unpaired"), ("turns", "prompt", *_AROUND)),
}
_LABELS = {
    **dict.fromkeys(("true", "1", "1.0", "good", "chosen", "desirable", "yes"), True),
    **dict.fromkeys(("false", "0", "0.0", "bad", "rejected", "undesirable", "no"), False),
}


class ShapeError(UserError):
    """A row that cannot be read as the shape of the first row."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """How the rows of a dataset are read. Called with a row, it returns the row that the trainer takes.

    Args:
        kind: The rows that the trainer takes: "messages", "preference", "unpaired" or "prompt".
        columns: The parts in `NAMES`, each with the column that holds it.
        roles: Further names of roles, each with one of the roles in `turns.ROLES`.
        prompt_template: Text of the prompt, with names of columns in braces, in place of the part "prompt".
        converses: Whether text becomes turns of a conversation, to which the chat template applies.
        plain: Whether prompts of text stay as they are, as in TRL; else they get the words of Alpaca.
        pictures: Whether the data has pictures, so that contents may be lists of parts.
    """

    kind: str
    columns: Mapping[str, str]
    roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prompt_template: str | None = None
    converses: bool = True
    plain: bool = False
    pictures: bool = False

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row as the trainer takes it.

        Raises:
            ShapeError: for a row that cannot be read like the first.
        """
        try:
            made = _READERS[self.kind](self, row)
            return {name: self._seen(value) if isinstance(value, list) else value for name, value in made.items()}
        except TurnError as error:
            raise ShapeError(f"A conversation holds {error}.") from error

    def _seen(self, turns: list[Turn]) -> list[Turn]:
        return [as_seen(turn, self.pictures, own=self.kind == "prompt") for turn in turns]

    def value(self, row: Mapping[str, Any], part: str) -> Any:
        """What the column of `part` holds in `row`; None where there is no such column."""
        name = self.columns.get(part)
        value = None if name is None else row[name]
        column = part if part in ("chosen", "rejected") else name or ""
        in_turns = column in ("chosen", "rejected", "prompt", "completion")
        return of_cell(value, self.roles, column) if in_turns else value  # JSON elsewhere is an answer in JSON

    @property
    def made_from(self) -> tuple[str, ...]:
        """The columns that rows are made from."""
        template = () if self.prompt_template is None else tuple(names_in(self.prompt_template))
        return tuple(dict.fromkeys((*self.columns.values(), *template)))


def names_in(template: str) -> list[str]:
    """The names of columns in a prompt template.

    Raises:
        ShapeError: for a brace without its pair, or a field without a name.
    """
    try:
        fields = [field for field in string.Formatter().parse(template) if field[1] is not None]
        names = [str(name) for _, name, _, _ in fields]
    except ValueError as error:
        raise ShapeError(f"`prompt_template` is {template!r}: {error}. Write a brace of the text twice.") from error
    if not template or any(form or conversion for _, _, form, conversion in fields):
        raise ShapeError(f"`prompt_template` is {template!r}; write text, with names of columns alone in the braces.")
    if "" in names:
        raise ShapeError(f"`prompt_template` is {template!r}, with {{}}; write the name of a column into the braces.")
    return names


def recognised(
    kind: str,
    names: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    roles: Mapping[str, str],
    prompt_template: str | None,
    text: str | None,
    has_template: Callable[[], bool],
) -> Shape | None:
    """The shape of a dataset; None if the trainer takes the rows as they are, or no shape fits them.

    Args:
        kind: The rows that the trainer takes: "messages", "preference", "unpaired" or "prompt".
        names: The columns of the dataset.
        rows: Its first rows, of which the first decides what the columns hold.
        roles: Further names of roles.
        prompt_template: Text of the prompt with names of columns in braces, or None.
        text: The column of a trainer's plain text, which is taken where there is no conversation; or None.
        has_template: Says whether there is a chat template, so that plain questions and answers become conversations;
            asked where that matters.
    """
    pictures = bool({*PICTURES} & {*names}) or (kind == "prompt" and any(map(_holds_pictures, rows)))
    if prompt_template is None and all(_is_standard(kind, names, row, roles, pictures) for row in rows):
        return None
    row = rows[0]
    by_name = {_plain(name): name for name in reversed(names)}
    found = {part: by_name[name] for part, known in NAMES.items() for name in reversed(known) if name in by_name}
    if "turns" in found and not is_conversation(parsed(row[found["turns"]])):
        del found["turns"]
    if "turns" in found and prompt_template is not None:
        raise ShapeError(f"`prompt_template` is given, but `{found['turns']}` holds conversations; leave it out.")
    if found.get("input") == found.get("prompt"):
        others = (by_name[name] for name in NAMES["input"] if name in by_name and by_name[name] != found.get("prompt"))
        found.update(dict.fromkeys(("input",), next(others, "")))
    if not found.get("input") or ("prompt" in found and prompt_template is not None):
        found.pop("input", None)
    if prompt_template is not None:
        found.pop("prompt", None)
    given = {*found, *(() if prompt_template is None else ("prompt",))}
    if kind == "messages" and text in names and "turns" not in found:
        return None
    parts = next((parts for parts in _PARTS.get(kind, ()) if given.issuperset(parts)), None)
    if parts is None:
        return None
    used = {*parts, *_MORE[kind]}
    if "turns" in parts or ("turns" in found and "turns" in used):  # a conversation has its questions within
        used -= {"prompt", "input", "history"}
    columns = {part: name for part, name in found.items() if part in used}
    shape = Shape(kind, columns, roles, prompt_template, pictures=pictures)
    if not _is_text(shape, row):
        return shape
    as_trl = (found.get("prompt"), found.get("answer")) == ("prompt", "completion") and "system" not in found
    converses = prompt_template is None and not as_trl and has_template()
    columns = {part: name for part, name in shape.columns.items() if converses or part != "history"}
    return dataclasses.replace(shape, columns=columns, converses=converses, plain=as_trl)


def _holds_pictures(row: Mapping[str, Any]) -> bool:
    """Whether the prompt of a row has a part of type "image"."""
    turns = row["prompt"] if is_conversation(row.get("prompt")) else ()
    contents = [
        turn["content"] for turn in turns if isinstance(turn, Mapping) and isinstance(turn.get("content"), list)
    ]
    return any(isinstance(part, Mapping) and part.get("type") == "image" for parts in contents for part in parts)


def _is_standard(
    kind: str, names: Sequence[str], row: Mapping[str, Any], roles: Mapping[str, str], pictures: bool
) -> bool:
    """Whether the trainer takes the rows as they are, and loses nothing by it."""
    if "input_ids" in names:
        return True
    group = next((group for group in _STANDARD.get(kind, ()) if set(group) <= {*names}), None)
    if group == ("messages",) and {"prompt", "completion"} & {*names}:  # which TRL would read instead
        return False
    if group is None or any(name in names for name in NAMES["system"]):
        return False
    if "label" in group and not isinstance(row["label"], (bool, int)):
        return False
    if group == ("chosen", "rejected") and {*NAMES["prompt"], *NAMES["turns"]} & {*names}:
        return False
    spoken = {name: row[name] for name in group if name != "label"}
    values = [*spoken.values()]
    is_text = all(isinstance(value, str) and of_cell(value, roles, name) is value for name, value in spoken.items())
    if group != ("messages",) and is_text:
        return True
    if not all(isinstance(value, list) and is_conversation(value) for value in values):
        return False
    turns = [turn for value in values for turn in value if isinstance(turn, Mapping)]
    if {key for turn in turns for key in turn} != {"role", "content"}:
        return False
    if not pictures and any(isinstance(turn.get("content"), list) for turn in turns):
        return False
    return {turn["role"] for turn in turns} <= STANDARD_ROLES - {*roles}


_STANDARD: dict[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",), ("prompt", "completion")),
    "preference": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "unpaired": (("prompt", "completion", "label"), ("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "prompt": (("prompt",),),
}
"""The rows that each kind of trainer takes, the first that is there before the others."""


def _is_text(shape: Shape, row: Mapping[str, Any]) -> bool:
    """Whether no part of the row is a conversation."""
    parts = ("turns", "prompt", "answer", "chosen", "rejected")
    values = [shape.value(row, part) for part in parts]
    return "turns" not in shape.columns and not any(isinstance(value, list | Mapping) for value in values)


def _prompt(shape: Shape, row: Mapping[str, Any]) -> Any:
    """The prompt of a row: turns, or text where text stays text."""
    asked: Any
    if shape.prompt_template is not None:
        asked = _filled(shape.prompt_template, row)
    elif "turns" in shape.columns:
        asked = as_turns(shape.value(row, "turns"), shape.roles)
    else:
        asked = shape.value(row, "prompt")
        if isinstance(asked, Mapping) or is_conversation(asked):
            asked = as_turns(asked, shape.roles)
        elif isinstance(asked, str):
            asked = _with_input(shape, asked, shape.value(row, "input"))
        else:
            raise ShapeError(f"The column `{shape.columns['prompt']}` holds {type(asked).__name__}, not text.")
    return _with_system(shape, row, asked)


def _with_input(shape: Shape, asked: str, more: Any) -> str:
    """A question and what it is about, in one text; for a model without a chat template in Alpaca's words."""
    more = "" if more is None else str(more).strip()
    if shape.converses or shape.plain:
        return f"{asked}\n{more}" if more else asked
    return (ALPACA_WITH_INPUT if more else ALPACA).format(instruction=asked, input=more)


def _filled(template: str, row: Mapping[str, Any]) -> str:
    return template.format(**{name: "" if row[name] is None else row[name] for name in names_in(template)})


def _with_system(shape: Shape, row: Mapping[str, Any], asked: str | list[Turn]) -> str | list[Turn]:
    """A prompt, text or turns, with what the columns "system" and "history" hold before it."""
    system = shape.value(row, "system")
    if system is not None and not isinstance(system, str):
        raise ShapeError(f"The column `{shape.columns['system']}` holds {type(system).__name__}, not text.")
    if isinstance(asked, str):
        if not shape.converses:
            return f"{system}\n\n{asked}" if system else asked
        asked = [{"role": "user", "content": asked}]
    turns = [*_history(shape, parsed(shape.value(row, "history")) or []), *asked]
    if system and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system})
    return turns


def _history(shape: Shape, history: Any) -> list[Turn]:
    """The turns before a question: turns, or pairs of a question and its answer."""
    if is_conversation(history):
        return as_turns(history, shape.roles)
    pairs = history if isinstance(history, list) else [history]
    turns = []
    for pair in pairs:
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            held = f"The column `{shape.columns['history']}` holds {str(history)[:60]!r}"
            raise ShapeError(f"{held}; it must hold pairs of a question and its answer.")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def _answer(shape: Shape, row: Mapping[str, Any], part: str, prompt: Any) -> Any:
    """An answer as the prompt is: as turns or as text."""
    answer = shape.value(row, part)
    is_turns = isinstance(answer, list | Mapping)
    if answer is None or (isinstance(prompt, str) and not is_turns):
        return answer
    if is_turns and not isinstance(prompt, str):
        return as_turns(answer, shape.roles)
    if is_turns:
        raise ShapeError(f"The column `{shape.columns[part]}` holds turns, and the prompt is text; make both the same.")
    if not isinstance(answer, str):
        raise ShapeError(f"The column `{shape.columns[part]}` holds {type(answer).__name__}, not text or turns.")
    return [{"role": "assistant", "content": answer}]


def with_system_prompt(row: Mapping[str, Any], system: str, answers: Sequence[str]) -> dict[str, Any]:
    """The prompt and the answers of a row as turns of a conversation, with a system turn first.

    Args:
        row: A row as a trainer takes it.
        system: Text of the system turn, for conversations that have none; no turn is added if it is empty.
        answers: The columns of answers to the prompt.
    """
    roles = {"prompt": "user", **dict.fromkeys(answers, "assistant")} if "prompt" in row else {}
    text = {name: role for name, role in roles.items() if isinstance(row.get(name), str)}
    changed = {name: [{"role": role, "content": row[name]}] for name, role in text.items()}
    for name in ("prompt",) if "prompt" in row else ("messages", "chosen", "rejected"):
        turns = changed.get(name, row.get(name))
        if isinstance(turns, list):
            add = system and turns[0]["role"] != "system"
            changed[name] = [{"role": "system", "content": system}, *turns] if add else turns
    return changed


def _messages(shape: Shape, row: Mapping[str, Any]) -> dict[str, Any]:
    prompt = _prompt(shape, row)
    if "turns" in shape.columns:
        return {"messages": prompt}
    return {"prompt": prompt, "completion": _answer(shape, row, "answer", prompt)}


def _pair(shape: Shape, row: Mapping[str, Any]) -> dict[str, Any]:
    answers = {part: shape.value(row, part) for part in ("chosen", "rejected")}
    whole = [_begins_with_prompt(shape, answer) for answer in answers.values()]
    if all(whole) and shape.prompt_template is not None:
        raise ShapeError("`prompt_template` is given, but the answers begin with their prompt; leave it out.")
    if all(whole):
        return {part: _with_system(shape, row, as_turns(answer, shape.roles)) for part, answer in answers.items()}
    if any(whole):
        raise ShapeError("One of `chosen` and `rejected` is a conversation, and the other an answer alone.")
    if not {"turns", "prompt"} & {*shape.columns} and shape.prompt_template is None:
        raise ShapeError("A row has answers without a prompt, in a column or as their first turns.")
    prompt = _prompt(shape, row)
    return {"prompt": prompt, **{part: _answer(shape, row, part, prompt) for part in answers}}


def _begins_with_prompt(shape: Shape, answer: Any) -> bool:
    """Whether an answer is a whole conversation, which begins with its prompt."""
    return is_conversation(answer) and len(answer) > 1 and as_turns(answer, shape.roles)[0]["role"] != "assistant"


def _labelled(shape: Shape, row: Mapping[str, Any]) -> dict[str, Any]:
    if "chosen" in shape.columns:
        return _pair(shape, row)
    label = shape.value(row, "label")
    good = label if isinstance(label, bool) else _LABELS.get(str(label).strip().lower())
    if good is None:
        name = shape.columns["label"]
        raise ShapeError(f"The column `{name}` holds {label!r}; it must hold true or false.")
    prompt = _prompt(shape, row)
    if "turns" not in shape.columns:
        return {"prompt": prompt, "completion": _answer(shape, row, "answer", prompt), "label": good}
    *asked, last = prompt
    if last["role"] != "assistant" or not asked:
        raise ShapeError(f"A conversation ends with a turn of {last['role']!r}; its last turn must be the answer.")
    return {"prompt": asked, "completion": [last], "label": good}


def _question(shape: Shape, row: Mapping[str, Any]) -> dict[str, Any]:
    prompt = _prompt(shape, row)
    while isinstance(prompt, list) and prompt and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    if not prompt:
        raise ShapeError("A row has no prompt: its conversation is an answer alone.")
    return {"prompt": prompt}


_READERS: dict[str, Callable[[Shape, Mapping[str, Any]], dict[str, Any]]] = {
    "messages": _messages,
    "preference": _pair,
    "unpaired": _labelled,
    "prompt": _question,
}


def in_words(
    shape: Shape, names: Sequence[str], rows: Sequence[Mapping[str, Any]], kept: Sequence[str] = (), pictures: str = ""
) -> str:
    """A line that says what rows are made from, and which columns are not used.

    Args:
        shape: The shape of the data.
        names: Its columns.
        rows: The first rows; the names of roles in them are in the line.
        kept: Columns that something else reads, such as a reward function.
        pictures: Words on where pictures go, which follow those on the roles.
    """
    talks = [parsed(row[shape.columns["turns"]]) for row in rows if "turns" in shape.columns]
    talks += [shape.value(row, part) for part in shape.columns for row in rows]
    roles = ", ".join(f"{name} → {role}" for name, role in renamed_roles(talks, shape.roles).items())
    made = shape(rows[0])
    begins = "chosen" in made and "prompt" not in made  # so that no other column is asked for the prompt
    unread = [shape.columns.get(part) for part in ("turns", "prompt", "input") if begins]
    used = [name for name in shape.made_from if name not in unread]
    line = f"Data: {', '.join(f'`{name}`' for name in used)} → {', '.join(f'`{name}`' for name in made)}"
    line += f" ({roles})" if roles else ""
    if _is_text(shape, rows[0]):
        text = "in Alpaca's words: there is no chat template"
        text = "with `prompt_template`" if shape.prompt_template else "" if shape.plain else text
        line += ", as a conversation" if shape.converses else f", as plain text {text}".rstrip()
    line += pictures
    unused = [f"`{name}`" for name in names if name not in (*used, *kept)]
    return f"{line}; not used: {', '.join(unused)}." if unused else f"{line}."
