"""The columns of a recipe's data: renamed, checked against what its trainer needs, and prompts made conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from liger_trainer.recipe import Recipe
from liger_trainer.recipe.file import RecipeError
from liger_trainer.recipe.trainers import TEXT_FIELD, TRAINERS

if TYPE_CHECKING:
    from datasets import Dataset

SPOKEN = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""Columns that hold text or turns."""

_TURNS = "a list of turns, each with `role` and `content`"
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {  # what a column holds; any other that is looked at holds text
    **dict.fromkeys(SPOKEN[:2], ((list,), _TURNS)),
    **dict.fromkeys(SPOKEN[2:], ((str, list), f"text or {_TURNS}")),
    "input_ids": ((list,), "a list of token ids"),
    "label": ((bool, int), "true or false"),
}


def renamed(rows: Any, columns: Mapping[str, str]) -> Any:
    """`rows` with `columns`, new names with the names they have now; a column in the way of a new name is left out.

    Raises:
        RecipeError: if there is no such column.
    """
    if not columns:
        return rows
    found = rows.column_names
    if found is not None:  # a streamed dataset may not know them yet
        missing = [old for old in columns.values() if old not in found]
        if missing:
            raise RecipeError(f"`columns` names {missing[0]!r}, but the data has the columns {', '.join(found)}.")
        rows = rows.remove_columns([new for new in columns if new in found and new not in columns.values()])
    return rows.rename_columns({old: new for new, old in columns.items() if old != new})


def check_columns(rows: Any, recipe: Recipe) -> None:
    """Checks that `rows` have what the trainer and its reward functions need.

    Raises:
        RecipeError: naming the columns that are needed and those that are there.
    """
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
            f"{_advice(columns, wanted[0], text)}"
        )
    needed = [name for name in _reward_columns(recipe) if name not in columns]
    if needed:
        raise RecipeError(
            f"The data has the columns {', '.join(columns)}; a function in `reward_funcs` needs `{needed[0]}`. Rename "
            f'one with `columns`, such as {{"{needed[0]}": "{columns[0]}"}}.'
        )
    if hasattr(rows, "data"):  # not streamed
        if "prompt" in columns and "prompt" not in found and found[0] in SPOKEN[2:]:
            found = ("prompt", *found)
        for name in found:
            _check_column(rows, name, recipe.recipe.trainer)
        _check_alike(rows, [name for name in found if name in SPOKEN])


def _advice(columns: Sequence[str], wanted: Sequence[str], text: str | None) -> str:
    others = [name for name in columns if name not in (*wanted, *SPOKEN)]
    fitting = [
        kind
        for kind, known in TRAINERS.items()
        if any(TEXT_FIELD not in names and set(names) == set(columns) for names in known.columns)
    ]
    if fitting:
        return f"These are the columns of `trainer: {fitting[0]}`: take other data, or that trainer."
    if not others:
        return "Take other data, or add what is missing."
    missing = next(name for name in wanted if name not in columns)
    start = "Set `dataset_text_field` to the column that holds the text, or rename" if text else "Rename"
    return f'{start} one with `columns`, such as {{"{missing}": "{others[0]}"}}.'


def _reward_columns(recipe: Recipe) -> list[str]:
    from liger_trainer.recipe.rewards import load_reward_functions
    from liger_trainer.trainers.checks.reward_functions import needed_columns

    functions = [function for function in load_reward_functions(recipe.more) if callable(function)]
    return sorted({name for function in functions for name in needed_columns(function)})


def _check_column(rows: Dataset, name: str, trainer: str) -> None:
    nulls = rows.data.column(name).null_count
    if nulls:
        raise RecipeError(f"The column `{name}` holds nothing (null) in {nulls} rows; remove or fill them.")
    wanted, words = _KINDS.get(name, ((str,), "text"))
    first = rows[0][name]
    for number, value in enumerate(_values(rows, name)):
        if not isinstance(value, wanted):
            raise RecipeError(
                f"The column `{name}` holds {type(value).__name__}, such as {str(value)[:40]!r} in row {number}, not "
                f"{words}."
            )
        if type(value) is not type(first):
            held = f"{type(first).__name__} in row 0 and {type(value).__name__} in row {number}"
            raise RecipeError(f"The column `{name}` holds {held}; all rows must hold text, or all of them turns.")
        problem = _turns_problem(value, trainer) if name in SPOKEN and isinstance(value, list) else None
        if problem is not None:
            raise RecipeError(f"The column `{name}` holds {problem} in row {number}; it must hold {words}.")
    if name == "label" and not set(rows.unique(name)) <= {0, 1}:
        raise RecipeError(f"The column `label` holds {rows.unique(name)[:5]}; it must hold {words}.")


def _values(rows: Dataset, name: str) -> Iterator[Any]:
    """The values of a column: the first alone where Arrow gives all of them its type."""
    from datasets import Value

    one_type = name == "input_ids" or isinstance(rows.features[name], Value)
    for batch in (rows.select(range(1)) if one_type else rows).select_columns(name).iter(1000):
        yield from batch[name]


def _turns_problem(turns: list[Any], trainer: str) -> str | None:
    """What is wrong with a conversation; None where nothing is."""
    roles = ("role", "from") if trainer == "sft" else ("role",)  # TRL reads the other name there
    if not turns:
        return "no turns"
    for turn in turns:
        if not isinstance(turn, dict):
            return f"a list with {type(turn).__name__} ({str(turn)[:40]!r})"
        if not any(isinstance(turn.get(role), str) for role in roles):
            return f"a turn without `role` ({str(turn)[:60]})"
        said = {key: value for key, value in turn.items() if key not in roles and value is not None}
        if not said:  # a call of a tool may be all there is
            return f"a turn without `content` ({str(turn)[:60]})"
        if not isinstance(said.get("content", ""), (str, list)):
            return f"a turn whose `content` is {type(said['content']).__name__} ({str(turn)[:60]})"
    return None


def _check_alike(rows: Dataset, names: list[str]) -> None:
    """TRL takes text with text and turns with turns."""
    text = [name for name in names if isinstance(rows[0][name], str)]
    turns = [name for name in names if name not in text]
    if text and turns:
        raise RecipeError(
            f"The column `{text[0]}` holds text and `{turns[0]}` turns; both must be of one kind. Where the turns "
            "begin with the prompt, remove the column `prompt`."
        )


def with_system_prompt(rows: Any, system_prompt: str | None) -> Any:
    """`rows` whose prompts are conversations that begin with `system_prompt`; as they are where that is None."""
    from accelerate import PartialState

    if system_prompt is None:
        return rows
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def converse(row: dict[str, Any]) -> dict[str, Any]:
        prompt = row["prompt"]
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"prompt": turns if turns and turns[0]["role"] == "system" else [*system, *turns]}

    with PartialState().local_main_process_first():
        return rows.map(converse)
