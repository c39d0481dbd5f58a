"""The columns of the data: renamed, read as the rows that the trainer takes, and checked."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from accelerate import PartialState
from datasets import Dataset, Features, Json, List, Value

from liger_trainer._version import OfThisVersion
from liger_trainer.data.pictures import at_marks, have_marks
from liger_trainer.data.shapes import NAMES, PICTURES, ShapeError, holds_text, in_words, recognised, with_system_prompt
from liger_trainer.data.turns import ROLES, TurnError, as_seen, as_turns, is_conversation, parsed
from liger_trainer.head.warn_once import warn_once
from liger_trainer.recipe.file import RecipeError
from liger_trainer.recipe.load import Recipe
from liger_trainer.recipe.rewards import load_reward_functions
from liger_trainer.recipe.schema import TEXT_FIELD, TRAINERS
from liger_trainer.trainers.checks.trl_arguments import needed_columns

SPOKEN = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""Columns that hold text or turns."""

_TURNS = "a list of turns, each with `role` and `content`"
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {  # what each column holds; other columns that are checked hold text
    **dict.fromkeys(SPOKEN[:2], ((list,), _TURNS)),
    **dict.fromkeys(SPOKEN[2:], ((str, list), f"text or {_TURNS}")),
    "input_ids": ((list,), "a list of token ids"),
    "label": ((bool, int), "true or false"),
}


def prepared(rows: Any, recipe: Recipe, has_template: Callable[[], bool], evaluates: bool = False) -> Any:
    """The rows that the trainer of `recipe` takes, made from `rows` and checked; says what they are made from.

    Args:
        rows: A dataset, streamed or not.
        recipe: The recipe.
        has_template: Says whether there is a chat template, so that plain questions and answers become conversations.
        evaluates: Whether the rows are for evaluation; `columns` is then passed by if they have none of them.

    Raises:
        RecipeError: for columns that are missing, or hold something else.
    """
    if hasattr(rows, "__len__") and len(rows) == 0:
        raise RecipeError("The data has no rows.")
    _check_keys(recipe)
    columns = recipe.recipe.columns or {}
    if evaluates and rows.column_names is not None and not {*columns.values()} & {*rows.column_names}:
        columns = {}
    rows = _reshaped(_with_tools(renamed(rows, columns), recipe), recipe, has_template)
    check_columns(rows, recipe)
    names = rows.column_names or list(next(iter(rows)))
    system = recipe.recipe.system_prompt
    if system is not None:
        if not {*SPOKEN} & {*names}:
            raise RecipeError("`system_prompt` is given, but the data is text or tokens without turns; leave it out.")
        answers = () if recipe.kind.generates else ("completion", "chosen", "rejected")
        rows = _mapped(rows, partial(with_system_prompt, system=system, answers=answers), recipe)
    return _mapped(rows, at_marks, recipe) if have_marks(rows, names) else rows


def _with_tools(rows: Any, recipe: Recipe) -> Any:
    """Rows whose column `functions`, OpenAI's older name, is `tools`; a reward function may read it by its own name."""
    first = list(rows.take(_FIRST))
    found = [functions for row in first if (functions := parsed(row.get("functions")))]
    described = all(isinstance(each, list) and isinstance(each[0], Mapping) for each in found)
    if not found or not described or "tools" in first[0] or recipe.kind.generates:
        return rows
    _say(recipe, "Data: `functions` → `tools`.")
    return rows.rename_column("functions", "tools")


_READ_BY_TRL = ("tools", "images", "image", "chat_template_kwargs")
_UNREAD = ("video", "videos", "audio", "audios")
_FIRST = 100
"""Rows in which names of roles are looked for, to be said."""


def _reshaped(rows: Any, recipe: Recipe, has_template: Callable[[], bool]) -> Any:
    """Rows of another shape than TRL's, made into those; other rows as they are."""
    ours, kind = recipe.recipe, recipe.kind.data
    first = list(rows.take(_FIRST))
    if not first:
        raise RecipeError("The data has no rows.")
    names = rows.column_names or list(first[0])
    text = recipe.get(TEXT_FIELD)
    shape = recognised(kind, names, first, ours.roles or {}, ours.prompt_template, text, has_template)
    for name in () if kind == "text" else _UNREAD:
        if name in names and any(row[name] for row in (rows.select_columns(name) if hasattr(rows, "data") else first)):
            raise RecipeError(f"The data has `{name}`, which no trainer reads; take these rows, or the column, out.")
    pictures = ", pictures at the marks `<image>`" if have_marks(first, names) else ""
    if shape is None:
        if ours.prompt_template is not None:
            raise RecipeError(
                f"`prompt_template` is given, but none of the columns {', '.join(names)} is an answer to the prompt; "
                "name one with `columns`, or leave the template out."
            )
        others = [f"`{name}`" for name in names if name not in (text, *_READ_BY_TRL)]
        if kind == "messages" and text in names and others and not {"messages", "prompt", "input_ids"} & {*names}:
            _say(recipe, f"Data: `{text}`, as plain text; not used: {', '.join(others)}.")
        if pictures:
            _say(recipe, f"Data: {pictures.removeprefix(', ')}.")
        return rows
    for name in shape.made_from:
        if name not in names:
            raise RecipeError(f"`prompt_template` names {name!r}, but the data has the columns {', '.join(names)}.")
    kept = names if kind == "prompt" else [name for name in _READ_BY_TRL if name in names]
    _made(shape, first[0], 0)  # refuses a row that cannot be read, before what it is read from is said
    _say(recipe, in_words(shape, names, first, kept, pictures))
    return _mapped(rows, shape, recipe, [name for name in names if name not in kept])


def _say(recipe: Recipe, line: str) -> None:
    """Says how data is read, once for training and evaluation data that are alike."""
    if PartialState().is_main_process:
        warn_once(f"{recipe.source}: {line}", line)


def holds_turns(row: Mapping[str, Any]) -> bool:
    """Whether a row, as a trainer takes it, is a conversation or a part of one."""
    return any(isinstance(row.get(name), list) for name in SPOKEN)


def _check_keys(recipe: Recipe) -> None:
    """Refuses keys for other data than that of the trainer, and roles that no chat template has."""
    ours = recipe.recipe
    for key in ("roles", "prompt_template", "system_prompt"):
        if recipe.kind.data == "text" and getattr(ours, key) is not None:
            raise RecipeError(f"`{key}` is given, but `trainer: {ours.trainer}` trains on plain text; leave it out.")
    known = {name for names in NAMES.values() for name in names} | {*SPOKEN, *_READ_BY_TRL, recipe.get(TEXT_FIELD)}
    for name in () if recipe.kind.generates else ours.columns or {}:  # a reward function may read any column
        similar = difflib.get_close_matches(name, [str(each) for each in known], 1, cutoff=0.8)
        if name not in known and similar:
            raise RecipeError(f"`columns` gives the name {name!r}, which nothing reads; write {similar[0]!r}.")
    for name, role in (ours.roles or {}).items():
        if role not in ROLES.values() and role != name:
            roles = ", ".join(sorted({*ROLES.values()}))
            raise RecipeError(
                f"`roles` says that {name!r} is {role!r}; it must be one of {roles}, or {name!r} itself, for a role "
                "that the chat template has."
            )


@dataclasses.dataclass(frozen=True)
class _Change:
    """A change of rows that gives every row the columns and the types of the first, or says which row is not alike.

    Args:
        change: Makes a row of a row.
        kinds: The columns that it makes, each with the type of its values.
    """

    change: Callable[[Mapping[str, Any]], dict[str, Any]]
    kinds: Mapping[str, type]

    def __call__(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        made = _made(self.change, row, index)
        if {*made} != {*self.kinds}:
            columns, of_first = (", ".join(f"`{name}`" for name in names) for names in (made, self.kinds))
            raise RecipeError(f"Row {index + 1} of the data becomes {columns}, and the rows before it {of_first}.")
        for name, kind in self.kinds.items():
            if made[name] is not None and not isinstance(made[name], kind):
                held = f"{kind.__name__} in row 1 and {type(made[name]).__name__} in row {index + 1}"
                raise RecipeError(f"The column `{name}` holds {held}; all rows must hold text, or all of them turns.")
        return made


def _made(change: Callable[[Mapping[str, Any]], dict[str, Any]], row: Mapping[str, Any], index: int) -> dict[str, Any]:
    try:
        return change(row)
    except ShapeError as error:
        raise RecipeError(f"Row {index + 1} of the data: {error}") from error


def _mapped(rows: Any, change: Any, recipe: Recipe, dropped: Sequence[str] = ()) -> Any:
    """`rows` with the columns that `change` makes of each row, and without those in `dropped` that it does not."""
    found = [_made(change, row, index) for index, row in enumerate(rows.take(_FIRST))]
    made = next((made for made in found if None not in made.values()), found[0])
    numbered = _Change(change, {name: type(value) for name, value in made.items()})
    if not isinstance(rows, Dataset):
        return rows.map(numbered, with_indices=True, remove_columns=list(dropped))
    dropped = [name for name in dropped if name in rows.column_names and name not in made]
    features = {name: feature for name, feature in rows.features.items() if name not in dropped}
    for name, value in made.items():
        kind = "bool" if isinstance(value, bool) else "string"
        features[name] = List(Json()) if isinstance(value, list) else Value(kind)
    processes = getattr(recipe.training, "dataset_num_proc", None)
    with PartialState().local_main_process_first():
        return rows.map(
            OfThisVersion(numbered),
            with_indices=True,
            remove_columns=dropped,
            features=Features(features),
            num_proc=processes,
            desc="Reading the data",
        )


def renamed(rows: Any, columns: Mapping[str, str]) -> Any:
    """Renames columns of `rows`; a column that already has one of the new names is dropped.

    Args:
        rows: A dataset.
        columns: New names, each with the present name.
    """
    if not columns:
        return rows
    twice = [old for old in columns.values() if [*columns.values()].count(old) > 1]
    if twice:
        raise RecipeError(f"`columns` takes {twice[0]!r} for several columns; one column becomes one.")
    found = rows.column_names
    if found is not None:  # a streamed dataset may not know them yet
        missing = [old for old in columns.values() if old not in found]
        if missing:
            raise RecipeError(f"`columns` names {missing[0]!r}, but the data has the columns {', '.join(found)}.")
        rows = rows.remove_columns([new for new in columns if new in found and new not in columns.values()])
    return rows.rename_columns({old: new for new, old in columns.items() if old != new})


def check_columns(rows: Any, recipe: Recipe) -> None:
    """Checks that `rows` have the columns that the trainer and its reward functions need, with valid values."""
    columns = rows.column_names
    if columns is None:
        return
    text = recipe.get(TEXT_FIELD)
    wanted = [tuple(text if name == TEXT_FIELD else name for name in names) for names in recipe.kind.columns]
    found = next((names for names in wanted if set(names) <= set(columns)), None)
    if found is None:
        choices = " or ".join(" and ".join(f"`{name}`" for name in names) for names in wanted)
        raise RecipeError(
            f"The data has the columns {', '.join(columns)}; `trainer: {recipe.recipe.trainer}` needs {choices}. "
            f"{_advice(next(iter(rows)), wanted[0], text)}"
        )
    functions = [function for function in load_reward_functions(recipe.more) if callable(function)]
    needed = sorted({name for function in functions for name in needed_columns(function)} - {*columns})
    if needed:
        free = [name for name in columns if name not in (*found, *SPOKEN)]
        pair = f"{{{json.dumps(needed[0])}: {json.dumps(free[0])}}}" if free else ""
        fix = f"Rename one with `columns`, such as {pair}." if free else "Add it to the data."
        raise RecipeError(
            f"The data has the columns {', '.join(columns)}; a function in `reward_funcs` needs `{needed[0]}`. {fix}"
        )
    if hasattr(rows, "data"):  # not streamed
        if "prompt" in columns and "prompt" not in found and found[0] in SPOKEN[2:]:
            found = ("prompt", *found)
        for name in found:
            pictures = bool({*PICTURES} & {*columns}) or recipe.kind.generates
            _check_column(rows, name, recipe.recipe.roles or {}, pictures, own=recipe.kind.generates)
        _check_alike(rows, [name for name in found if name in SPOKEN])
        if found == ("chosen", "rejected") and not recipe.kind.scores:
            _check_common_prompt(rows)
        if "tools" in columns:
            _check_tools(rows)
        if "images" in columns and isinstance(rows[0]["images"], str):
            raise RecipeError("The column `images` holds text, not lists of pictures; one picture a row is `image`.")


def _advice(row: Mapping[str, Any], wanted: Sequence[str], text: str | None) -> str:
    """What to do about columns such as those of `row`, of which none has a name that is wanted."""
    columns = list(row)
    talk = next((name for name, value in row.items() if is_conversation(parsed(value))), None)
    if talk is not None and "messages" in wanted:
        return f"Say which holds conversations with `columns`: {json.dumps({'messages': talk})}."
    if len(columns) == 1 and (signs := [sign for sign in (";", "|", "\t") if sign in columns[0]]):
        return f"Its columns are separated by {signs[0]!r}; save the table with commas, or with tabs as .tsv."
    others = [name for name, value in row.items() if isinstance(value, str) and name not in (*wanted, *SPOKEN)]
    others = others if text else [name for name in others if not holds_text(name)]
    fitting = [
        kind
        for kind, known in TRAINERS.items()
        if any(TEXT_FIELD not in names and set(names) == set(columns) for names in known.columns)
    ]
    if fitting:
        return f"These are the columns of `trainer: {fitting[0]}`: use other data, or that trainer."
    if not others or (len(others) == 1 and holds_text(others[0])):
        return "Use other data, or add the missing columns."
    if text and len(others) > 1:  # supervised: a question and its answer, or text
        pair = json.dumps({"prompt": others[0], "completion": others[1]})
        return f"Say which is what with `columns`, such as {pair}, or set `dataset_text_field` to the column of text."
    if text:
        return f"Set `dataset_text_field` to the column that holds the text, such as {others[0]!r}."
    missing = next(name for name in wanted if name not in columns)
    return f"Rename one with `columns`, such as {json.dumps({missing: others[0]})}."


def _check_column(rows: Dataset, name: str, roles: Mapping[str, str], pictures: bool, own: bool) -> None:
    nulls = rows.data.column(name).null_count
    if nulls:
        raise RecipeError(f"The column `{name}` is null in {nulls} rows; remove or fill them.")
    wanted, words = _KINDS.get(name, ((str,), "text"))
    first, roles = rows[0][name], {role: role for role in roles.values()}
    for number, value in enumerate(_values(rows, name), 1):
        if not isinstance(value, wanted):
            held = f"{type(value).__name__}, such as {str(value)[:40]!r} in row {number}"
            raise RecipeError(f"The column `{name}` holds {held}, not {words}.")
        if type(value) is not type(first):
            held = f"{type(first).__name__} in row 1 and {type(value).__name__} in row {number}"
            raise RecipeError(f"The column `{name}` holds {held}; all rows must hold text, or all of them turns.")
        problem = _turns_problem(value, roles) if name in SPOKEN and isinstance(value, list) else None
        if problem is not None:
            raise RecipeError(f"The column `{name}` holds {problem} in row {number}; it must hold {words}.")
        if name in SPOKEN and isinstance(value, list):
            _check_seen(value, name, number, pictures, own)
    if name == "label" and not set(rows.unique(name)) <= {0, 1}:
        raise RecipeError(f"The column `label` holds {rows.unique(name)[:5]}; it must hold {words}.")


def _check_seen(turns: list[Any], name: str, number: int, pictures: bool, own: bool) -> None:
    """Refuses parts that the model would not see, of which TRL would pass on the text alone, or none."""
    for turn in turns:
        try:
            same = as_seen(turn, pictures, own) is turn
        except TurnError as error:
            raise RecipeError(f"Row {number} of the data: the column `{name}` holds {error}.") from error
        if not same:
            raise RecipeError(
                f"Row {number} of the data: the column `{name}` holds a turn whose `content` is a list of parts, and "
                "the first rows hold text; give all rows text."
            )


def _check_tools(rows: Dataset) -> None:
    for number, tools in enumerate(rows["tools"], 1):
        if tools and not isinstance(parsed(tools), list):
            held = f"{str(tools)[:40]!r} in row {number}"
            raise RecipeError(
                f"The column `tools` holds {held}; it must hold a list of JSON schemas, or its JSON text."
            )


def _values(rows: Dataset, name: str) -> Iterator[Any]:
    """The values of a column; only the first if Arrow gives all of them the same type."""
    one_type = name == "input_ids" or isinstance(rows.features[name], Value)
    for batch in (rows.select(range(1)) if one_type else rows).select_columns(name).iter(1000):
        yield from batch[name]


def _turns_problem(turns: list[Any], roles: Mapping[str, str]) -> str | None:
    """What is wrong with a conversation; None if nothing is."""
    try:
        read = as_turns(turns, roles)
    except TurnError as error:
        return str(error)
    for turn, same in zip(turns, read, strict=True):
        if turn.get("role") != same["role"]:
            return f"a turn that names its role in another way than the first rows do ({str(turn)[:60]})"
    return None


def _check_alike(rows: Dataset, names: list[str]) -> None:
    """Checks that all columns hold text, or all of them turns; TRL does not accept a mixture."""
    text = [name for name in names if isinstance(rows[0][name], str)]
    turns = [name for name in names if name not in text]
    if text and turns:
        raise RecipeError(
            f"The column `{text[0]}` holds text and `{turns[0]}` turns; both must hold the same kind. If the turns "
            "begin with the prompt, remove the column `prompt`."
        )


def _check_common_prompt(rows: Dataset) -> None:
    """Checks that pairs of conversations begin alike: TRL takes what they have in common for the prompt."""
    for number, (chosen, rejected) in enumerate(zip(rows["chosen"], rows["rejected"], strict=True), 1):
        if isinstance(chosen, list) and chosen[0] != rejected[0]:
            raise RecipeError(
                f"Row {number} of the data: `chosen` and `rejected` begin with different turns, so they answer no "
                "common prompt; give both the same first turns, or the prompt in a column `prompt`."
            )
