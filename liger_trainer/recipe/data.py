"""The data and the tokenizer of a recipe, with the checks that can be made before anything is trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.recipe import Recipe, quickstart, smoke
from liger_trainer.recipe.columns import SPOKEN, check_columns, renamed, with_system_prompt
from liger_trainer.recipe.file import RecipeError, first_line

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

BUILT_IN: dict[str, Callable[[], Any]] = {
    "pydoc_topics": quickstart.pydoc_topics,
    **{f"sorting_{kind}": partial(quickstart.sorting, kind) for kind in quickstart.SORTING_KINDS},
    **{f"smoke_{kind}": partial(smoke.smoke_data, kind) for kind in smoke.ROW_KINDS},
}
_SAVED = ("dataset_dict.json", "dataset_info.json")  # what `Dataset.save_to_disk` leaves
_BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}


def _load_files(files: list[str], key: str) -> Any:
    from datasets import load_dataset

    missing = [file for file in files if not Path(file).is_file()]
    if missing:
        raise RecipeError(f"`{key}`: there is no file {missing[0]!r} (looked from {Path.cwd()}).")
    empty = [file for file in files if Path(file).stat().st_size == 0]
    if empty:
        raise RecipeError(f"`{key}`: {empty[0]!r} is empty.")
    kinds = {_BUILDERS.get(Path(file).suffix.lower()) for file in files}
    if None in kinds or len(kinds) != 1:
        raise RecipeError(f"`{key}` is {files}; give files of one kind out of {', '.join(_BUILDERS)}.")
    try:
        loaded = load_dataset(kinds.pop(), data_files=files, split="train")
        loaded.data.validate(full=True)  # the reader of JSON lines takes text that is no UTF-8
    except Exception as error:  # datasets raises its own kinds, chained to what the file's reader says
        reason = first_line(error.__cause__ or error)
        hint = " Save the text as UTF-8." if "utf" in reason.lower() else ""
        raise RecipeError(f"`{key}`: {files} cannot be read: {reason}{hint}") from error
    return loaded


def _load_splits(recipe: Recipe) -> tuple[Any, Any]:
    """Training and (where the source has one) evaluation data, as they come."""
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset, load_from_disk
    from trl import get_dataset

    data, ours = recipe.data, recipe.recipe
    sources = {
        "data_files": ours.data_files,
        "datasets": recipe.mixture.datasets,
        "dataset_name": data.dataset_name,
    }
    chosen = [name for name, value in sources.items() if value]
    if len(chosen) != 1:
        has = "has " + " and ".join(f"`{name}`" for name in chosen) if chosen else "says nothing about data"
        raise RecipeError(f"{recipe.source} {has}; give exactly one of `dataset_name`, `data_files` and `datasets`.")
    if ours.data_files:
        loaded = _load_files(ours.data_files, "data_files")
    elif data.dataset_name in BUILT_IN:
        loaded = BUILT_IN[data.dataset_name]()
    elif data.dataset_name and any((Path(data.dataset_name) / file).is_file() for file in _SAVED):
        try:
            loaded = load_from_disk(data.dataset_name)
        except (OSError, ValueError, TypeError) as error:
            folder = f"the folder {data.dataset_name!r}"
            raise RecipeError(f"`dataset_name`: {folder} cannot be read: {first_line(error)} Save it again.") from error
    else:
        name = data.dataset_name or recipe.mixture.datasets[0].path
        try:
            if data.dataset_name:
                loaded = load_dataset(name, name=data.dataset_config, streaming=data.dataset_streaming)
            else:
                loaded = get_dataset(recipe.mixture)
        except (OSError, ValueError, ImportError) as error:
            raise RecipeError(
                f"`{chosen[0]}`: {name!r} cannot be loaded: {first_line(error)} Built in are {', '.join(BUILT_IN)}; "
                "a name on the Hub needs the network, and `HF_TOKEN` where it is private."
            ) from error
    if isinstance(loaded, (Dataset, IterableDataset)):
        return loaded, None
    assert isinstance(loaded, (DatasetDict, IterableDatasetDict))
    if data.dataset_train_split not in loaded:
        raise RecipeError(
            f"`dataset_train_split` is {data.dataset_train_split!r}, but the data has the splits {', '.join(loaded)}."
        )
    return loaded[data.dataset_train_split], loaded.get(data.dataset_test_split)


def load_data(recipe: Recipe) -> tuple[Any, Any]:
    """Training and evaluation data of a recipe; evaluation data is None for ``eval_strategy: "no"``.

    Raises:
        RecipeError: if the source cannot be loaded, is empty, lacks a column, or has nothing to evaluate on.
    """
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
                f"`test_split_size` is {size}, which cannot be taken of {len(train)} rows: {first_line(error)}"
            ) from error
        train, evaluation = parts["train"], parts["test"]
    return _prepared(train, recipe), _prepared(evaluation, recipe) if evaluated else None


def _prepared(rows: Any, recipe: Recipe) -> Any:
    if hasattr(rows, "__len__") and len(rows) == 0:
        raise RecipeError("The data has no rows.")
    rows = renamed(rows, recipe.recipe.columns or {})
    check_columns(rows, recipe)
    return with_system_prompt(rows, recipe.get("system_prompt"))


def _texts(rows: Iterable[dict[str, Any]], field: str | None) -> Iterable[str]:
    for row in rows:
        for name in (field,) if field in row else SPOKEN:
            value = row.get(name) or ()
            said = (value,) if isinstance(value, str) else (turn.get("content", turn.get("value")) for turn in value)
            yield from (text for text in said if isinstance(text, str))


def load_tokenizer(recipe: Recipe, train: Any, checkpoint: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer a recipe names, or one trained on its text; a resumed run takes the one in its checkpoint.

    Raises:
        RecipeError: if there is no such tokenizer, or the recipe names none.
    """
    from transformers import AutoTokenizer

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


def text_blocks(rows: Any, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> Dataset:
    """Documents joined with the end-of-sequence token and cut into blocks of ``max_length`` tokens; a rest is dropped.

    Returns:
        A dataset with the columns ``input_ids`` and ``labels``, which are the same: every token is a target.

    Raises:
        RecipeError: if the text does not fill one block.
    """
    from accelerate import PartialState

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
