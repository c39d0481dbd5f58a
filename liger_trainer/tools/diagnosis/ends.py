"""Whether the model learns the token that ends an answer, and generation stops at it."""

from __future__ import annotations

import contextlib
from typing import Any

from jinja2 import TemplateError

from liger_trainer.recipe.file import first_line
from liger_trainer.tools.diagnosis.case import Case
from liger_trainer.tools.diagnosis.sample import Sample
from liger_trainer.tools.diagnosis.trap import CannotCheckError, Trap

LEAST_SHARE = 0.5
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
    return [*_without_label(case, sample, end), *_goes_on(case, sample, end)]


_OF_TOKENIZER = "a tokenizer with an `eos_token`, such as that of the instruct model (`tokenizer_name_or_path`)"


def _template(which: str) -> str:
    return f"`chat_template_path` with a template that {which}"


def end_of_answer(sample: Sample) -> int | None:
    """The first special token after an answer in the chat template; of plain text, the end-of-sequence token.

    Raises:
        CannotCheckError: if the chat template cannot be applied.
    """
    tokenizer = sample.tokenizer
    if not sample.is_chat:
        return tokenizer.eos_token_id
    known = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    ids = tokenizer(_after_answer(sample), add_special_tokens=False)["input_ids"]
    return next((token for token in ids if token in known), None)


def _after_answer(sample: Sample) -> str:
    """What the chat template writes after an answer and before the next question."""
    says = [("user", "What is six times seven?"), ("assistant", _ANSWER), ("user", "Why?")]
    turns: Any = [{"role": role, "content": text} for role, text in says]
    if sample.processor is not sample.tokenizer:
        turns = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in says]
    options = {} if sample.template is None else {"chat_template": sample.template}
    try:
        text = sample.processor.apply_chat_template(turns, tokenize=False, **options)
    except (TemplateError, ValueError, TypeError) as error:
        raise CannotCheckError(f"the chat template cannot be applied: {first_line(error)}") from error
    if _ANSWER not in text:
        raise CannotCheckError("the chat template does not write the answer as it is")
    return str(text.rpartition(_ANSWER)[2])


def _without_label(case: Case, sample: Sample, end: int) -> list[Trap]:
    learnt = sum(bool((one.labelled & (one.ids == end)).any()) for one in sample.whole)
    blocks = case.values["trainer"] == "causal_lm"  # of text, in which few have the end of a document
    if learnt >= (1 if blocks else LEAST_SHARE * len(sample.whole)):
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
