"""`assistant_only_loss` with a chat template that marks no answers: they are found by the turns of the conversation."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import trl.trainer.sft_trainer as trl_sft_trainer
from datasets import Dataset, Json
from transformers import PreTrainedTokenizerFast

from liger_trainer.compat.private import require
from liger_trainer.compat.trl import SFT_ANSWERS
from liger_trainer.data.response_labels import answer_mask
from liger_trainer.data.turns import is_learnt, without_none

require(SFT_ANSWERS)

_SWAPPED = ("get_training_chat_template", "is_chat_template_stop_token_trained", "has_generation_markers")
_swapping = threading.RLock()


@contextlib.contextmanager
def templates_without_markers(trainer: Any) -> Iterator[None]:
    """While this thread builds `trainer`, TRL takes a chat template that it cannot mark; `by_turns` then says True."""
    owner, names = threading.get_ident(), vars(trl_sft_trainer)
    with _swapping:
        find, is_stop_trained, has_markers = (names[name] for name in _SWAPPED)

        def is_marked(template: Any) -> bool:
            if template is None and threading.get_ident() == owner:
                raise ValueError(
                    "`assistant_only_loss` is true, but the tokenizer has no chat template; name one in "
                    "`chat_template_path`, or set it to false."
                )
            return has_markers(template)

        def template_of(processing_class: Any) -> str | None:
            try:
                return find(processing_class)
            except ValueError:
                if threading.get_ident() != owner or not isinstance(processing_class, PreTrainedTokenizerFast):
                    raise
                trainer.answers_by_turns = True
                return None

        def is_trained(*args: Any, **kwargs: Any) -> bool:
            ours = threading.get_ident() == owner and trainer.answers_by_turns
            return ours or is_stop_trained(*args, **kwargs)

        theirs = {name: names[name] for name in _SWAPPED}
        names.update(zip(_SWAPPED, (template_of, is_trained, is_marked), strict=True))
        try:
            yield
        finally:
            names.update(theirs)


def some_are_not_learnt(rows: Any) -> bool:
    """Whether `rows`, or the first hundred of streamed ones, have answers that are not to be learnt."""
    looked_at = rows if isinstance(rows, Dataset) else rows.take(100)
    features = rows.features or {}
    columns = [name for name in ("messages", "completion") if name in (rows.column_names or ("messages", "completion"))]
    if features and not any(_may_weigh(features[name]) for name in columns):
        return False
    turns = (turn for row in looked_at for name in columns for turn in row.get(name) or ())
    return not all(is_learnt(without_none(turn)) for turn in turns if isinstance(turn, Mapping))


def _may_weigh(feature: Any) -> bool:
    """Whether turns of this type may have the keys that `is_learnt` reads; those of `Json` may have any."""
    turn = getattr(feature, "feature", None)
    return bool({"weight", "train"} & {*turn}) if isinstance(turn, dict) else isinstance(turn, Json)


def with_answer_masks(rows: Any, tokenizer: PreTrainedTokenizerFast, processes: int | None) -> Any:
    """Conversations as `input_ids` and `assistant_masks`, and `completion_mask` where there is a prompt.

    Args:
        rows: A dataset, streamed or not; one that has `input_ids` is returned as it is.
        tokenizer: The tokenizer with the chat template.
        processes: How many processes share the rows.
    """
    names = rows.column_names or list(next(iter(rows)))
    if "input_ids" in names:
        return rows
    more = {"num_proc": processes, "desc": "Finding the answers"} if isinstance(rows, Dataset) else {}
    return rows.map(partial(_tokenized, tokenizer=tokenizer), remove_columns=names, **more)


def _tokenized(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> dict[str, list[int]]:
    tools = row.get("tools")
    options = {
        "tools": json.loads(tools) if isinstance(tools, str) else tools or None,
        **(row.get("chat_template_kwargs") or {}),
    }
    if "prompt" not in row:
        return answer_mask(without_none(row["messages"]), tokenizer, **options)
    prompt, completion = without_none(row["prompt"]), without_none(row["completion"])
    found = answer_mask([*prompt, *completion], tokenizer, **options)
    asked: Any = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, **options)
    pairs = zip(asked["input_ids"], found["input_ids"], strict=False)
    start = next((place for place, (one, other) in enumerate(pairs) if one != other), len(asked["input_ids"]))
    mask = [int(place >= start) for place in range(len(found["input_ids"]))]
    return {**found, "completion_mask": mask}
