"""Checks of the first rows: whether all that they say reaches the text, whether answers differ, and their labels."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from jinja2 import TemplateError

from liger_trainer.data.turns import Turn, conversations, renderer
from liger_trainer.data.turns import left_out as left_out_by
from liger_trainer.recipe.file import first_line
from liger_trainer.recipe.model import positions_of
from liger_trainer.tools.diagnosis.sample import CannotCheckError, Case, Sample, Trap
from liger_trainer.tools.diagnosis.settings import beyond, too_long
from liger_trainer.trainers.sft_trainer import some_are_not_learnt


def not_in_text(case: Case, sample: Sample) -> list[Trap]:
    """Turns, fields of turns, and tools that the chat template leaves out."""
    if not sample.is_chat:
        return []
    try:
        missing = left_out_by(sample.first, renderer(sample.processor, sample.template))
    except (TemplateError, ValueError, TypeError) as error:
        raise CannotCheckError(f"the chat template cannot be applied: {first_line(error)}") from error
    if not missing:
        return []
    what = (
        f"The chat template leaves out {', '.join(missing)} of the first {sample.rows} rows: none of it is trained on"
    )
    return [Trap(what, "`chat_template_path` with a template that writes it, or data without it")]


def weights_without_effect(case: Case, sample: Sample) -> list[Trap]:
    """Answers that are not to be learnt, where every token has a label."""
    alone = case.values.get("assistant_only_loss", True)  # which other trainers do not have
    if alone or not some_are_not_learnt(sample.first):
        return []
    what = f"Some of the first {sample.rows} rows have an answer with `weight: 0` or `train: false`, learnt too"
    return [Trap(what, "`assistant_only_loss: true`, or data without these answers")]


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


LEAST_SHARE = 0.01
"""A smaller share of tokens with a label is a trap."""

MOST_CUT = 0.05
"""A larger share of answers that are cut off is a trap."""

_PLACEHOLDER = re.compile(r"(image|video|audio|boi|eoi|boa|eoa|vision_start|vision_end)_token_(id|index)")


def left_out(case: Case, sample: Sample) -> list[Trap]:
    """Rows that the trainer drops without a word, as too long."""
    dropped = sample.dropped - sample.empty
    if not dropped:
        return []
    limit = case.values.get("max_length")
    what = f"{dropped} of {sample.rows} rows are left out of the training: at `max_length: {limit}` nothing to learn is"
    return [Trap(f"{what} left of them, or they are too long", _longer(sample, limit))]


def without_label(case: Case, sample: Sample) -> list[Trap]:
    """Rows without a label, which teach nothing."""
    cut = sum(not one.labelled.any() for one in sample.cut)
    whole = sum(not one.labelled.any() for one in sample.whole)
    found = []
    if sample.empty or whole:
        count = f"{sample.empty} of {sample.rows} rows" if sample.empty else f"{whole} of {len(sample.whole)} sequences"
        what = f"{count} have no label: they train nothing, while the loss looks healthy"
        found.append(Trap(what, "leave them out, or give them an answer"))
    if cut > whole:
        what = f"{cut - whole} of {len(sample.cut)} sequences have no label left: their prompts fill `max_length`"
        found.append(Trap(what, _longer(sample, case.values.get("max_length"))))
    return found


def few_labels(case: Case, sample: Sample) -> list[Trap]:
    """Hardly any token with a label, in rows that have some."""
    tokens = sum(len(one.ids) for one in sample.cut)
    labels = sum(int(one.labelled.sum()) for one in sample.cut)
    if not labels or labels >= LEAST_SHARE * tokens:
        return []
    return [
        Trap(
            f"{100 * labels / tokens:.2f} % of the tokens have a label ({labels} of {tokens}): nearly all of the time "
            "goes into prompts, while the loss looks healthy",
            "shorter prompts, or labels on them too with `completion_only_loss: false` (`assistant_only_loss: false`)",
        )
    ]


def cut_answers(case: Case, sample: Sample) -> list[Trap]:
    """Answers whose end `max_length` takes away, and with it the token that ends them."""
    limit = case.values.get("max_length")
    goes_on = case.values.get("packing") and case.values.get("packing_strategy") != "bfd"
    if not limit or not sample.whole or goes_on or case.values.get("truncation_mode", "keep_start") != "keep_start":
        return []
    cut = sum(bool(one.labelled[limit:].any() and one.labelled[:limit].any()) for one in sample.whole)
    if cut <= MOST_CUT * len(sample.whole):
        return []
    return [
        Trap(
            f"`max_length: {limit}` cuts the end off {cut} of {len(sample.whole)} sequences: answers without an end "
            "are learnt, while the loss looks healthy",
            f"{_longer(sample, limit)}, or leave these rows out",
        )
    ]


def placeholders(case: Case, sample: Sample) -> list[Trap]:
    """Tokens that stand for an image as labels: the model learns to write them."""
    owners = (case.config, case.config.get_text_config(), sample.processor)
    named = {name: value for owner in owners for name, value in vars(owner).items() if _PLACEHOLDER.fullmatch(name)}
    ids = torch.tensor(sorted({value for value in named.values() if isinstance(value, int)}), dtype=torch.long)
    found = sum(int(torch.isin(one.ids[one.labelled], ids).sum()) for one in sample.cut)
    if not found:
        return []
    labels = sum(int(one.labelled.sum()) for one in sample.cut)
    return [
        Trap(
            f"{found} of {labels} labels are tokens that stand for an image: the model learns to write them, and they "
            "hide the loss of the text",
            "data with the columns `prompt` and `completion`, and `completion_only_loss: true`; or conversations with "
            "`assistant_only_loss: true`",
        )
    ]


def two_beginnings(case: Case, sample: Sample) -> list[Trap]:
    """Rows that begin with two beginning-of-sequence tokens: one of the text, one of the tokenizer."""
    begin = sample.tokenizer.bos_token_id
    twice = sum(one.ids[:2].tolist() == [begin, begin] for one in sample.cut)
    if begin is None or 2 * twice <= len(sample.cut):
        return []
    return [
        Trap(
            f"{twice} of {len(sample.cut)} sequences begin with {sample.tokenizer.bos_token!r} twice, which no prompt "
            "at inference does",
            "remove it from the text or the chat template, or take a tokenizer with `add_bos_token: false`",
        )
    ]


def _longer(sample: Sample, limit: int | None) -> str:
    """The fix of a `max_length` that is too small; no lengths are known where the trainer gives no labels."""
    longest = max((len(one.ids) for one in sample.whole), default=0)
    return f"`max_length: {longest}`" if longest > (limit or 0) else "a larger `max_length`"


LEAST_ENDS = 0.5
"""A smaller share of sequences with a label on the end is a trap; of blocks of text, none at all."""

_ANSWER = "forty-two"


def no_end(case: Case, sample: Sample) -> list[Trap]:
    """A chat template without a token after an answer, a token that has no label, or one that ends no generation."""
    end = end_of_answer(sample)
    if end is None:
        if not sample.is_chat:
            return [Trap("The tokenizer has no end-of-sequence token, so no answer has an end to learn", _OF_TOKENIZER)]
        what = "The chat template writes no token of its own after an answer, so the model does not learn to stop"
        return [Trap(what, _template("ends an answer with `eos_token`"))]
    return [*_end_without_label(case, sample, end), *_goes_on(case, sample, end)]


_OF_TOKENIZER = "a tokenizer with an `eos_token`, such as that of the instruct model (`tokenizer_name_or_path`)"


def _template(which: str) -> str:
    return f"`chat_template_path` with a template that {which}"


def end_of_answer(sample: Sample) -> int | None:
    """The first special token after an answer in the chat template; of plain text, the end-of-sequence token."""
    tokenizer = sample.tokenizer
    if not sample.is_chat:
        return tokenizer.eos_token_id
    known = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    for more in (False, True):  # GPT-OSS ends the last answer, at which generation stops, in a way of its own
        ids = tokenizer(_after_answer(sample, more), add_special_tokens=False)["input_ids"]
        if (end := next((token for token in ids if token in known), None)) is not None:
            return end
    return None


def _after_answer(sample: Sample, more: bool) -> str:
    """What the chat template writes after an answer, the last one or one before another question (`more`)."""
    says = [("user", "What is six times seven?"), ("assistant", _ANSWER), *([("user", "Why?")] if more else [])]
    turns: list[Turn] = [{"role": role, "content": text} for role, text in says]
    try:
        text = renderer(sample.processor, sample.template)(turns)
    except (TemplateError, ValueError, TypeError) as error:
        raise CannotCheckError(f"the chat template cannot be applied: {first_line(error)}") from error
    if _ANSWER not in text:
        raise CannotCheckError("the chat template does not write the answer as it is")
    return text.rpartition(_ANSWER)[2]


def _end_without_label(case: Case, sample: Sample, end: int) -> list[Trap]:
    learnt = sum(bool((one.labelled & (one.ids == end)).any()) for one in sample.whole)
    blocks = case.values["trainer"] == "causal_lm"  # of text, in which few have the end of a document
    if learnt >= (1 if blocks else LEAST_ENDS * len(sample.whole)):
        return []
    token, alone = sample.tokenizer.convert_ids_to_tokens(end), case.values.get("assistant_only_loss")
    fix = "data in which every answer ends with it"
    if alone:
        fix = f"`assistant_only_loss: false`, or {_template('has it between its generation markers')}"
    return [
        Trap(
            f"{token!r}, which ends an answer, is a label in {learnt} of {len(sample.whole)} sequences: the model does "
            "not learn to stop, while the loss looks healthy",
            fix,
        )
    ]


def _goes_on(case: Case, sample: Sample, end: int) -> list[Trap]:
    stops = {sample.tokenizer.eos_token_id}
    name = case.values["model_name_or_path"]
    if name is not None:
        stops |= _stops(case, name)
    if end in stops:
        return []
    token, own = sample.tokenizer.convert_ids_to_tokens(end), sample.tokenizer.eos_token
    fix = f"`eos_token: {token!r}`" if "eos_token" in case.values else f"a tokenizer whose `eos_token` is {token!r}"
    return [Trap(f"An answer ends with {token!r}, but generation stops at {own!r} and goes on after the answer", fix)]


def _stops(case: Case, name: str) -> set[int]:
    """The ids at which the model's own configurations stop a generation."""
    from transformers import GenerationConfig

    found = [getattr(config, "eos_token_id", None) for config in (case.config, case.config.get_text_config())]
    with contextlib.suppress(OSError, ValueError):  # a model need not have one
        found.append(GenerationConfig.from_pretrained(name, revision=case.values["model_revision"]).eos_token_id)
    return {token for each in found for token in (each if isinstance(each, list) else [each]) if token is not None}
