"""Checks of the first rows: whether all that they say reaches the text, and whether answers differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateError

from liger_trainer.data.reach import conversations, left_out, renderer
from liger_trainer.recipe.file import first_line
from liger_trainer.recipe.model import positions_of
from liger_trainer.tools.diagnosis.case import CannotCheckError, Case, Trap
from liger_trainer.tools.diagnosis.sample import Sample
from liger_trainer.tools.diagnosis.settings import beyond, too_long


def not_in_text(case: Case, sample: Sample) -> list[Trap]:
    """Turns, fields of turns, and tools that the chat template leaves out."""
    if not sample.is_chat:
        return []
    try:
        missing = left_out(sample.first, renderer(sample.processor, sample.template))
    except (TemplateError, ValueError, TypeError) as error:
        raise CannotCheckError(f"the chat template cannot be applied: {first_line(error)}") from error
    if not missing:
        return []
    what = (
        f"The chat template leaves out {', '.join(missing)} of the first {sample.rows} rows: none of it is trained on"
    )
    return [Trap(what, "`chat_template_path` with a template that writes it, or data without it")]


def same_answers(case: Case, sample: Sample) -> list[Trap]:
    """Pairs whose answers are the same: nothing is preferred."""
    if not case.kind.pairs:
        return []
    same = sum(row["chosen"] == row["rejected"] for row in sample.first)
    if not same:
        return []
    what = f"In {same} of {sample.rows} rows `chosen` and `rejected` are the same: they teach nothing"
    return [Trap(what, "leave these rows out")]


def one_label(case: Case, sample: Sample) -> list[Trap]:
    """Answers with a label that are all good, or all bad."""
    labels = {row["label"] for row in sample.first if "label" in row}
    if case.kind.data != "unpaired" or len(labels) != 1:
        return []
    word = "true" if labels.pop() else "false"
    what = f"`label` is {word} in all of the first {sample.rows} rows: there is nothing to tell apart"
    return [Trap(what, "data with answers of both kinds, in any order")]


def prompt_alone(case: Case, sample: Sample) -> list[Trap]:
    """Prompts that the chat template writes in another way when their answer follows."""
    if not sample.is_chat:
        return []
    render = renderer(sample.processor, sample.template)
    asked = [row for row in sample.first if isinstance(row.get("prompt"), list) and len(conversations(row)[0]) > 1]
    try:
        differ = sum(not _begins(render, row) for row in asked)
    except (TemplateError, ValueError, TypeError) as error:
        raise CannotCheckError(f"the chat template cannot be applied: {first_line(error)}") from error
    if case.kind.generates or not differ:
        return []
    what = (
        f"In {differ} of {len(asked)} rows the chat template writes the prompt in another way when its answer follows: "
        "the answer is learnt after a prompt that inference never shows"
    )
    return [Trap(what, "`chat_template_path` with a template whose prompts stay the same")]


def behind_positions(case: Case, sample: Sample) -> list[Trap]:
    """Rows, or prompts with their answers, of more tokens than the model has positions."""
    most, generates = positions_of(case.config), case.kind.generates
    answer = case.values["max_completion_length"] or 0 if generates else 0
    if not most or too_long(case):  # which says it of any row
        return []
    try:
        longest = max(_prompt_tokens(sample) if generates else [len(one.ids) for one in sample.cut], default=0)
    except (TemplateError, ValueError, TypeError) as error:
        raise CannotCheckError(f"the chat template cannot be applied: {first_line(error)}") from error
    if longest + answer <= most:
        return []
    what = f"A prompt of {longest} tokens and `max_completion_length: {answer}`" if generates else f"{longest} tokens"
    fix = f"`max_completion_length: {most - longest}`, or shorter prompts" if longest < most else "shorter prompts"
    return [Trap(f"{what} in a row, but {beyond(case, most)}", fix if generates else f"`max_length: {most}`")]


def _prompt_tokens(sample: Sample) -> Iterator[int]:
    """The number of tokens of each prompt."""
    render = renderer(sample.processor, sample.template)
    for row in sample.first:
        text = row["prompt"]
        if not isinstance(text, str):
            text = render(conversations({"prompt": text})[0], None, add_generation_prompt=True)
        yield len(sample.tokenizer(text, add_special_tokens=False)["input_ids"])


def _begins(render: Any, row: Any) -> bool:
    whole = render(conversations(row)[0], None)
    return whole.startswith(render(conversations({"prompt": row["prompt"]})[0], None, add_generation_prompt=True))
