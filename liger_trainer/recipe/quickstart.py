"""Data and a tokenizer that need no network: text that ships with Python, a task to align on, and a trained BPE."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import permutations
from pydoc_data.topics import topics

from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"

# ChatML, in which an answer ends with the token at which generation stops; the generation marks let
# `assistant_only_loss` find the assistant's tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def pydoc_topics() -> Dataset:
    """The topics of Python's own ``help()``, about 465,000 characters of English and code, one topic a row.

    Returns:
        A dataset with the columns ``topic`` and ``text``, in the order of the topics' names.
    """
    return Dataset.from_list([{"topic": name, "text": topics[name].strip()} for name in sorted(topics)])


SORTING_KINDS = ("demonstrations", "preferences", "prompts")


def sorting(kind: str) -> DatasetDict:
    """Digits to sort, a task that is learned in seconds: ``"7391<"`` asks for 1379, and ``"7391>"`` for 9731.

    Half of the demonstrations sort in the wrong direction. A model that imitates them sorts, but ignores the direction,
    which alignment then teaches.

    Args:
        kind: ``"demonstrations"`` (prompt and completion), ``"preferences"`` (prompt, chosen and rejected) or
            ``"prompts"`` (prompt and solution).

    Returns:
        The splits ``train`` and ``test``, nine tenths and one tenth of 3,024 rows: four different digits from 1 to 9 in
        every order. All kinds have the same rows.
    """
    rows: list[dict[str, str]] = []
    chance = random.Random(0)
    for digits in permutations("123456789", 4):
        falling = chance.random() < 0.5
        right, wrong = ("".join(sorted(digits, reverse=reverse)) for reverse in (falling, not falling))
        prompt = "".join(digits) + (">" if falling else "<")
        shown = chance.choice((right, wrong))
        columns = {
            "demonstrations": {"completion": shown},
            "preferences": {"chosen": right, "rejected": wrong},
            "prompts": {"solution": right},
        }
        rows.append({"prompt": prompt, **columns[kind]})
    chance.shuffle(rows)
    size = len(rows) // 10
    return DatasetDict(train=Dataset.from_list(rows[size:]), test=Dataset.from_list(rows[:size]))


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, extra_special_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template, trained on `texts`; the same texts give the same tokenizer.

    Args:
        texts: Training text.
        vocab_size: Size of the vocabulary, including the 256 bytes and the special tokens.
        extra_special_tokens: Further tokens with one id each, directly after our own five.

    Raises:
        ValueError: if `vocab_size` is too small for the bytes and the special tokens.
    """
    special = list(dict.fromkeys([PAD, BOS, EOS, TURN_START, TURN_END, *extra_special_tokens]))
    smallest = 256 + len(special)
    if vocab_size < smallest:
        raise ValueError(f"`tokenizer_vocab_size` is {vocab_size}; it must be at least {smallest}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=special[3:],
        chat_template=CHAT_TEMPLATE,
    )
