"""``--smoke``: any recipe as a few offline steps of a tiny random model of the same family on generated data.

Data and tokenizer need no network: text that ships with Python, a task to align on, and a trained BPE.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from liger_trainer.recipe.families import FAMILIES, family_of
from liger_trainer.recipe.schema import TRAINERS

if TYPE_CHECKING:
    from datasets import Dataset


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


logger = logging.getLogger(__name__)

STEPS = 3
ROWS = 64
VOCAB_SIZE = 512
# Ids 5, 6 and 7 of the smoke tokenizer, right after its own five.
IMAGE_TOKENS = ("<|image|>", "<|image_start|>", "<|image_end|>")


def special_tokens(training: Any) -> list[str]:
    """Special tokens of the smoke tokenizer: image tokens with their fixed ids, then those that the recipe names."""
    named = (getattr(training, "eos_token", None), getattr(training, "pad_token", None))
    return [*IMAGE_TOKENS, *(token for token in named if token)]


ROW_KINDS = ("messages", "completion", "text", "preference", "unpaired", "prompt")


def smoke_data(kind: str) -> Dataset:
    """Generated rows of small sums.

    Args:
        kind: ``"messages"`` (two turns), ``"completion"`` (prompt and completion), ``"text"``, ``"preference"`` (chosen
            and rejected conversations), ``"unpaired"`` (prompt, completion and label) or ``"prompt"`` (prompt, solution
            and answer).
    """
    from datasets import Dataset

    rows: list[dict[str, Any]] = []
    for number in range(ROWS):
        question, right = f"What is {number} plus {number + 1}?", str(2 * number + 1)
        answer, wrong = (f"{number} plus {number + 1} is {total}." for total in (right, number))
        if kind == "messages":
            rows.append({"messages": [_turn("user", question), _turn("assistant", answer)]})
        elif kind == "completion":
            rows.append({"prompt": question, "completion": f" {answer}"})
        elif kind == "preference":
            pair = {"chosen": answer, "rejected": wrong}
            rows.append({name: [_turn("user", question), _turn("assistant", text)] for name, text in pair.items()})
        elif kind == "unpaired":
            completion = [_turn("assistant", answer if number % 2 else wrong)]
            rows.append({"prompt": [_turn("user", question)], "completion": completion, "label": bool(number % 2)})
        elif kind == "prompt":
            rows.append({"prompt": question, "solution": right, "answer": right})
        else:
            rows.append({"text": f"{question} {answer}"})
    return Dataset.from_list(rows)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def smoke_model(folder: str | Path) -> str:
    """Writes a tiny Llama with random weights, and a tokenizer that knows the rows of `smoke_data`, without a network.

    A model in `folder` is overwritten, so processes need a folder each. Returns the folder, as trainers take it for a
    name.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from liger_trainer.recipe.smoke import train_tokenizer

    tokenizer = train_tokenizer(smoke_data("text")["text"], VOCAB_SIZE)
    tokens = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **FAMILIES["llama"], **tokens)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _temporary_folder() -> str:
    """A new folder; the processes of one launch share one, named after their launcher."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return tempfile.mkdtemp(prefix="liger-trainer-smoke-")
    return str(Path(tempfile.gettempdir()) / f"liger-trainer-smoke-{os.getppid()}-{os.environ.get('MASTER_PORT', '0')}")


def mean_token(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """The reward of a smoke run: the mean id of a completion's tokens.

    A random model earns none of a recipe's own rewards. If all completions of a prompt earn the same, their advantages
    and all gradients are 0. This reward differs between completions.
    """
    return [sum(ids) / (max(len(ids), 1) * VOCAB_SIZE) for ids in completion_ids]


def _small_generation(values: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    """A few short completions, rewarded by functions only: a reward model would have to be loaded."""
    if "reward_funcs" not in values:
        return {}
    weights = values["reward_weights"] or [1.0] * len(values["reward_funcs"] or ())
    pairs = [pair for pair in zip(values["reward_funcs"] or (), weights, strict=False) if ":" in pair[0]]
    pairs.append((f"{__name__}:{mean_token.__name__}", 1.0))
    rewards = {"reward_funcs": [name for name, _ in pairs], "reward_weights": [weight for _, weight in pairs]}
    return {
        **({} if given & set(rewards) else rewards),
        "num_generations": 2,
        "num_generations_eval": 2,
        "generation_batch_size": None,
        "steps_per_generation": None,
        "max_completion_length": 8,
        "use_vllm": False,
        "use_transformers_continuous_batching": False,
        "per_device_train_batch_size": 2,
    }


def _quantisation(values: Mapping[str, Any], on_cpu: bool) -> dict[str, Any]:
    """Switches quantisation off, with a warning, if it does not work here.

    On a CPU, bitsandbytes repacks weights for inference when a model is evaluated, and they cannot be trained any more.
    """
    keys = [key for key in ("load_in_4bit", "load_in_8bit") if values.get(key)]
    missing = importlib.util.find_spec("bitsandbytes") is None
    if not keys or not (on_cpu or missing):
        return {}
    reason = "is not installed" if missing else "cannot train on a CPU after an evaluation"
    logger.warning("This smoke run ignores `%s`; its base is not quantised: bitsandbytes %s.", keys[0], reason)
    return dict.fromkeys(keys, False)


def shrink(values: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    """Makes the checked values of a recipe small and offline; values in `given` (the command line) stay."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    on_cpu = accelerator is None or bool(values.get("use_cpu"))
    kind = "completion" if values.get("completion_only_loss") else TRAINERS[values["trainer"]].data
    evaluated = str(getattr(values["eval_strategy"], "value", values["eval_strategy"])) != "no"
    family = family_of(values)
    small: dict[str, Any] = {
        "accelerate_config": None,
        "expert_parallel_size": 1,
        "model_family": family,
        "model_config": {"model_type": family, **FAMILIES[family]},
        "model_name_or_path": None,
        "model_init_kwargs": None,
        "model_revision": "main",
        "trust_remote_code": False,
        **_quantisation({key: value for key, value in values.items() if key not in given}, on_cpu),
        "tokenizer_name_or_path": None,
        "tokenizer_vocab_size": VOCAB_SIZE,
        "chat_template_path": None,
        "dataset_name": f"smoke_{kind}",
        "dataset_config": None,
        "dataset_text_field": "text",
        "data_files": None,
        "eval_data_files": None,
        "datasets": [],
        "dataset_streaming": False,
        "streaming": False,
        "test_split_size": 0.25 if evaluated else None,
        "max_steps": STEPS,
        "warmup_steps": 1,
        "logging_steps": 1,
        "eval_steps": STEPS if evaluated else None,
        "save_steps": STEPS,
        "max_length": 64,
        "per_device_train_batch_size": min(2, values["per_device_train_batch_size"]),
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": min(2, values["gradient_accumulation_steps"]),
        "dataset_num_proc": None,
        "dataloader_num_workers": 0,
        "report_to": "none",
        "push_to_hub": False,
        "load_best_model_at_end": False,
        "sample_prompts": None,
        "sample_steps": None,
        "columns": None,
        "prompt_template": None,
        **_small_generation(values, given),
    }
    implementation = values.get("attn_implementation")
    if on_cpu or (str(implementation).startswith("flash_attention") and not importlib.util.find_spec("flash_attn")):
        small["attn_implementation"] = None
    if on_cpu:
        small.update(use_cpu=True, bf16=False, fp16=False, tf32=None, dtype="float32")
        if values["activation_memory"] == "auto":  # which is for the memory of an accelerator
            small["activation_memory"] = "1GiB"
        if values["cuda_graphs"] in (True, "true"):  # which a CPU has not
            small["cuda_graphs"] = "auto"
    # A model, with its tokenizer, or data that is given takes the place of what is generated.
    if "model_name_or_path" in given:
        small |= {"model_config": None, "tokenizer_vocab_size": None}
    if given & {"data_files", "dataset_name", "datasets"}:  # a tokenizer of it may lack the recipe's tokens
        small |= {"dataset_name": None, "eos_token": None, "pad_token": None}
    if "output_dir" not in given:
        small["output_dir"] = _temporary_folder()
    small = {key: value for key, value in small.items() if key in values and key not in given}
    if values["packed_base"] in (True, "true") and "model_name_or_path" in small:
        logger.warning("This smoke run ignores `packed_base`: its model is new, and its weights are not packed.")
        small["packed_base"] = "auto"
    return {**values, **small}
