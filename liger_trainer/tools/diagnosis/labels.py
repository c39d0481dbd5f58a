"""Checks of the labels of the first rows: which rows have any, how many, and of what tokens."""

from __future__ import annotations

import re

import torch

from liger_trainer.tools.diagnosis.case import Case
from liger_trainer.tools.diagnosis.sample import Sample
from liger_trainer.tools.diagnosis.trap import Trap

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
