"""The data and the tokenizer of a recipe: loaded, its columns renamed and checked, and cut into blocks of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset, IterableDataset, load_dataset, load_from_disk
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import get_dataset

from liger_trainer.data.files import FileError, load_files
from liger_trainer.data.shapes import ShapeError
from liger_trainer.recipe import smoke
from liger_trainer.recipe.columns import SPOKEN, prepared
from liger_trainer.recipe.file import RecipeError, first_line
from liger_trainer.recipe.hosts import check_same_rows, ending_together
from liger_trainer.recipe.load import Recipe

BUILT_IN: dict[str, Callable[[], Any]] = {
    "pydoc_topics": smoke.pydoc_topics,
    **{f"sorting_{kind}": partial(smoke.sorting, kind) for kind in smoke.SORTING_KINDS},
    **{f"smoke_{kind}": partial(smoke.smoke_data, kind) for kind in smoke.ROW_KINDS},
}
_NUMBERS = ("margin", "ref_chosen_logps", "ref_rejected_logps", "ref_logps", "ref_KL_logps")
"""Columns that TRL reads as numbers."""
_SAVED = ("dataset_dict.json", "dataset_info.json")  # files that `Dataset.save_to_disk` writes


def load_data(recipe: Recipe) -> tuple[Any, Any]:
    """Training and evaluation data of a recipe; evaluation data is None for ``eval_strategy: "no"``.

    Raises:
        RecipeError: if the source cannot be loaded, is empty, lacks a column, or has no rows to evaluate on.
    """
    try:
        return _load_data(recipe)
    except (FileError, ShapeError) as error:
        raise RecipeError(str(error)) from error


def _load_data(recipe: Recipe) -> tuple[Any, Any]:
    evaluated = recipe.training.eval_strategy != "no"
    with ending_together():
        train, evaluation = _load_splits(recipe)
        if recipe.recipe.eval_data_files:
            evaluation = load_files(recipe.recipe.eval_data_files, "eval_data_files", partial(_is_text, recipe))
    check_same_rows("training", train)
    if evaluated:
        check_same_rows("evaluation", evaluation)
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
    has_template = partial(has_chat_template, recipe)
    train = prepared(train, recipe, has_template)
    return train, prepared(evaluation, recipe, has_template, evaluates=True) if evaluated else None


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
        return load_files(recipe.recipe.data_files, "data_files", partial(_is_text, recipe))
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if name and Path(name).is_file():
        raise RecipeError(f"`dataset_name` is {name!r}, which is a file: name it in `data_files`.")
    if name and any((Path(name) / file).is_file() for file in _SAVED):
        return _load_saved(name)
    return _load_from_hub(recipe, chosen[0])


def _is_text(recipe: Recipe, column: str) -> bool:
    """Whether a column of a table holds text: by its name, or by the one that the recipe gives it."""
    given = {old: new for new, old in (recipe.recipe.columns or {}).items()}
    return given.get(column, column) not in _NUMBERS


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


def has_chat_template(recipe: Recipe) -> bool:
    """Whether the trainer of `recipe` has a chat template: that of the tokenizer, or ``chat_template_path``."""
    ours = recipe.recipe
    named = ours.tokenizer_name_or_path or ours.tokenizer_vocab_size or recipe.model.model_name_or_path
    if recipe.get("chat_template_path") is not None or not named:
        return True  # data that is looked at without a model
    if ours.tokenizer_vocab_size and not ours.tokenizer_name_or_path:
        return False
    return load_tokenizer(recipe, (), None).chat_template is not None


def load_tokenizer(recipe: Recipe, train: Any, checkpoint: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer that a recipe names, or one trained on its text; a resumed run uses the one in its checkpoint."""
    ours = recipe.recipe
    if ours.tokenizer_vocab_size and not ours.tokenizer_name_or_path:
        if checkpoint and (Path(checkpoint) / "tokenizer_config.json").is_file():
            return AutoTokenizer.from_pretrained(checkpoint)
        extra = smoke.special_tokens(recipe.training) if str(recipe.data.dataset_name).startswith("smoke_") else ()
        texts = _texts(train, recipe.get("dataset_text_field"))
        try:
            return smoke.train_tokenizer(texts, ours.tokenizer_vocab_size, extra)
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
