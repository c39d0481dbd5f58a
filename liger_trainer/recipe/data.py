"""The data and the tokenizer of a recipe: loaded, its columns renamed and checked, and cut into blocks of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset, IterableDataset, Value, load_dataset, load_from_disk
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import get_dataset

from liger_trainer.recipe import quickstart, smoke
from liger_trainer.recipe.file import RecipeError, first_line
from liger_trainer.recipe.load import Recipe
from liger_trainer.recipe.rewards import load_reward_functions
from liger_trainer.recipe.schema import TEXT_FIELD, TRAINERS
from liger_trainer.trainers.checks.reward_functions import needed_columns

BUILT_IN: dict[str, Callable[[], Any]] = {
    "pydoc_topics": quickstart.pydoc_topics,
    **{f"sorting_{kind}": partial(quickstart.sorting, kind) for kind in quickstart.SORTING_KINDS},
    **{f"smoke_{kind}": partial(smoke.smoke_data, kind) for kind in smoke.ROW_KINDS},
}
_SAVED = ("dataset_dict.json", "dataset_info.json")  # files that `Dataset.save_to_disk` writes
_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
SPOKEN = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""Columns that hold text or turns."""

_TURNS = "a list of turns, each with `role` and `content`"
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {  # what each column holds; other columns that are checked hold text
    **dict.fromkeys(SPOKEN[:2], ((list,), _TURNS)),
    **dict.fromkeys(SPOKEN[2:], ((str, list), f"text or {_TURNS}")),
    "input_ids": ((list,), "a list of token ids"),
    "label": ((bool, int), "true or false"),
}


def load_data(recipe: Recipe) -> tuple[Any, Any]:
    """Training and evaluation data of a recipe; evaluation data is None for ``eval_strategy: "no"``."""
    train, evaluation = _load_splits(recipe)
    evaluated = recipe.training.eval_strategy != "no"
    if recipe.recipe.eval_data_files:
        evaluation = _load_files(recipe.recipe.eval_data_files, "eval_data_files")
    size, args = recipe.mixture.test_split_size, recipe.training
    seed = args.seed if args.data_seed is None else args.data_seed
    if evaluated and evaluation is None:
        if not size or not hasattr(train, "train_test_split"):
            raise RecipeError(
                f"{recipe.source}: `eval_strategy` asks for evaluation, but there is no data for it; set "
                "`dataset_test_split`, `eval_data_files` or `test_split_size` (such as 0.05), or "
                '`eval_strategy: "no"`.'
            )
        try:
            parts = train.train_test_split(test_size=size, seed=seed)
        except ValueError as error:
            raise RecipeError(
                f"`test_split_size` is {size}, which cannot be taken from {len(train)} rows: {first_line(error)}"
            ) from error
        train, evaluation = parts["train"], parts["test"]
    return _prepared(train, recipe), _prepared(evaluation, recipe) if evaluated else None


def _load_splits(recipe: Recipe) -> tuple[Any, Any]:
    """Training data and, if the source has any, evaluation data, before columns are renamed and checked."""
    loaded = _load_source(recipe)
    if isinstance(loaded, (Dataset, IterableDataset)):
        return loaded, None
    data = recipe.data
    if data.dataset_train_split not in loaded:
        raise RecipeError(
            f"`dataset_train_split` is {data.dataset_train_split!r}, but the data has the splits {', '.join(loaded)}."
        )
    return loaded[data.dataset_train_split], loaded.get(data.dataset_test_split)


def _load_source(recipe: Recipe) -> Any:
    """The dataset, or its splits by name, of the one source that the recipe names."""
    sources = {
        "data_files": recipe.recipe.data_files,
        "datasets": recipe.mixture.datasets,
        "dataset_name": recipe.data.dataset_name,
    }
    chosen = [key for key, value in sources.items() if value]
    if len(chosen) != 1:
        has = "has " + " and ".join(f"`{key}`" for key in chosen) if chosen else "says nothing about data"
        raise RecipeError(f"{recipe.source} {has}; give exactly one of `dataset_name`, `data_files` and `datasets`.")
    name = recipe.data.dataset_name
    if recipe.recipe.data_files:
        return _load_files(recipe.recipe.data_files, "data_files")
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if name and any((Path(name) / file).is_file() for file in _SAVED):
        return _load_saved(name)
    return _load_from_hub(recipe, chosen[0])


def _load_saved(folder: str) -> Any:
    try:
        return load_from_disk(folder)
    except (OSError, ValueError, TypeError) as error:
        raise RecipeError(
            f"`dataset_name`: the folder {folder!r} cannot be read: {first_line(error)} Save it again."
        ) from error


def _load_from_hub(recipe: Recipe, key: str) -> Any:
    data = recipe.data
    try:
        if data.dataset_name:
            return load_dataset(data.dataset_name, name=data.dataset_config, streaming=data.dataset_streaming)
        return get_dataset(recipe.mixture)
    except (OSError, ValueError, ImportError) as error:
        name = data.dataset_name or recipe.mixture.datasets[0].path
        raise RecipeError(
            f"`{key}`: {name!r} cannot be loaded: {first_line(error)} Built in are {', '.join(BUILT_IN)}; "
            "a name on the Hub needs the network, and `HF_TOKEN` where it is private."
        ) from error


def _load_files(files: list[str], key: str) -> Any:
    missing = [file for file in files if not Path(file).is_file()]
    if missing:
        raise RecipeError(f"`{key}`: there is no file {missing[0]!r} (relative to {Path.cwd()}).")
    empty = [file for file in files if Path(file).stat().st_size == 0]
    if empty:
        raise RecipeError(f"`{key}`: {empty[0]!r} is empty.")
    kinds = {_BUILDERS.get(Path(file).suffix.lower()) for file in files}
    if None in kinds or len(kinds) != 1:
        raise RecipeError(f"`{key}` is {files}; give files of one kind: {', '.join(_BUILDERS)}.")
    try:
        loaded = load_dataset(kinds.pop(), data_files=files, split="train")
        loaded.data.validate(full=True)  # the JSON lines reader accepts text that is not UTF-8
    except Exception as error:  # datasets raises its own errors, chained to those of the file's reader
        reason = first_line(error.__cause__ or error)
        hint = " Save the text as UTF-8." if "utf" in reason.lower() else ""
        raise RecipeError(f"`{key}`: {files} cannot be read: {reason}{hint}") from error
    return loaded


def _prepared(rows: Any, recipe: Recipe) -> Any:
    if hasattr(rows, "__len__") and len(rows) == 0:
        raise RecipeError("The data has no rows.")
    rows = renamed(rows, recipe.recipe.columns or {})
    check_columns(rows, recipe)
    return with_system_prompt(rows, recipe.get("system_prompt"))


def renamed(rows: Any, columns: Mapping[str, str]) -> Any:
    """Renames columns of `rows`; a column that already has one of the new names is dropped.

    `columns` has the new names, each with the present one.
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
            f"{_advice(columns, wanted[0], text)}"
        )
    functions = [function for function in load_reward_functions(recipe.more) if callable(function)]
    needed = sorted({name for function in functions for name in needed_columns(function)} - {*columns})
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
        return f"These are the columns of `trainer: {fitting[0]}`: use other data, or that trainer."
    if not others:
        return "Use other data, or add the missing columns."
    missing = next(name for name in wanted if name not in columns)
    start = "Set `dataset_text_field` to the column that holds the text, or rename" if text else "Rename"
    return f'{start} one with `columns`, such as {{"{missing}": "{others[0]}"}}.'


def _check_column(rows: Dataset, name: str, trainer: str) -> None:
    nulls = rows.data.column(name).null_count
    if nulls:
        raise RecipeError(f"The column `{name}` is null in {nulls} rows; remove or fill them.")
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
    """The values of a column; only the first if Arrow gives all of them the same type."""
    one_type = name == "input_ids" or isinstance(rows.features[name], Value)
    for batch in (rows.select(range(1)) if one_type else rows).select_columns(name).iter(1000):
        yield from batch[name]


def _turns_problem(turns: list[Any], trainer: str) -> str | None:
    """What is wrong with a conversation; None if nothing is."""
    roles = ("role", "from") if trainer == "sft" else ("role",)  # where TRL accepts either name
    if not turns:
        return "no turns"
    for turn in turns:
        if not isinstance(turn, dict):
            return f"a list with {type(turn).__name__} ({str(turn)[:40]!r})"
        if not any(isinstance(turn.get(role), str) for role in roles):
            return f"a turn without `role` ({str(turn)[:60]})"
        said = {key: value for key, value in turn.items() if key not in roles and value is not None}
        if not said:  # a turn may hold nothing but a tool call
            return f"a turn without `content` ({str(turn)[:60]})"
        if not isinstance(said.get("content", ""), (str, list)):
            return f"a turn whose `content` is {type(said['content']).__name__} ({str(turn)[:60]})"
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


def with_system_prompt(rows: Any, system_prompt: str | None) -> Any:
    """Makes conversations of prompts, each with `system_prompt` first; leaves `rows` alone if it is None."""
    if system_prompt is None:
        return rows
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def converse(row: dict[str, Any]) -> dict[str, Any]:
        prompt = row["prompt"]
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"prompt": turns if turns and turns[0]["role"] == "system" else [*system, *turns]}

    with PartialState().local_main_process_first():
        return rows.map(converse)


def load_tokenizer(recipe: Recipe, train: Any, checkpoint: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer that a recipe names, or one trained on its text; a resumed run uses the one in its checkpoint."""
    ours = recipe.recipe
    if ours.tokenizer_vocab_size and not ours.tokenizer_name_or_path:
        if checkpoint and (Path(checkpoint) / "tokenizer_config.json").is_file():
            return AutoTokenizer.from_pretrained(checkpoint)
        extra = smoke.special_tokens(recipe.training) if str(recipe.data.dataset_name).startswith("smoke_") else ()
        texts = _texts(train, recipe.get("dataset_text_field"))
        try:
            return quickstart.train_tokenizer(texts, ours.tokenizer_vocab_size, extra)
        except ValueError as error:
            raise RecipeError(f"{recipe.source}: {error}") from error
    name = ours.tokenizer_name_or_path or recipe.model.model_name_or_path
    if name is None:
        raise RecipeError(
            f"{recipe.source} names no tokenizer; set `tokenizer_name_or_path`, or `tokenizer_vocab_size` to train one."
        )
    try:
        return AutoTokenizer.from_pretrained(
            name,
            revision=recipe.model.model_revision if ours.tokenizer_name_or_path is None else "main",
            trust_remote_code=recipe.get("trust_remote_code"),
        )
    except (OSError, ValueError) as error:
        raise RecipeError(f"The tokenizer {name!r} cannot be loaded: {first_line(error)}") from error


def _texts(rows: Iterable[dict[str, Any]], field: str | None) -> Iterable[str]:
    for row in rows:
        for name in (field,) if field in row else SPOKEN:
            value = row.get(name) or ()
            said = (value,) if isinstance(value, str) else (turn.get("content", turn.get("value")) for turn in value)
            yield from (text for text in said if isinstance(text, str))


def text_blocks(rows: Any, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> Dataset:
    """Joins documents by the end-of-sequence token and cuts them into blocks of ``max_length``; drops the remainder.

    Returns:
        A dataset with the columns ``input_ids`` and ``labels``, which are the same: every token is a target.
    """
    length, field = recipe.get("max_length"), recipe.get("dataset_text_field")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def cut(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        ids = [token for text in tokenizer(batch[field])["input_ids"] for token in (*text, *end)]
        blocks = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        return {"input_ids": blocks, "labels": blocks}

    with PartialState().local_main_process_first():
        blocks = rows.map(cut, batched=True, remove_columns=rows.column_names)
    if hasattr(blocks, "__len__") and len(blocks) == 0:
        raise RecipeError(f"The text is shorter than one block of `max_length` {length} tokens; lower `max_length`.")
    return blocks
