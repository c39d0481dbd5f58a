"""What is checked: a case, with the first rows of its data; and what a check finds.

A case is the keys of a recipe, or of a model as if it were one, and the configuration of the model. The rows are those
that its trainer and collator make, without the model's weights.

What a trainer makes of text depends on the tokenizer, the chat template and the arguments, and not on the model. So the
trainer of the recipe is built around a Llama of a few numbers for each token, and gives its batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as AnySequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError

from liger_trainer.callbacks.labelled_share import token_masks
from liger_trainer.recipe.build import chat_template, processing_class
from liger_trainer.recipe.columns import holds_turns
from liger_trainer.recipe.data import BUILT_IN, load_data, load_tokenizer, text_blocks
from liger_trainer.recipe.file import RecipeError, find_recipe, first_line, read_recipe, shipped_recipes
from liger_trainer.recipe.load import Recipe, build_recipe, check_values
from liger_trainer.recipe.model import config_of_values
from liger_trainer.recipe.schema import TRAINERS, TrainerKind
from liger_trainer.recipe.smoke import shrink
from liger_trainer.tools.planning.inputs import build_on_meta

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig


@dataclasses.dataclass(frozen=True)
class Trap:
    """A mistake that training would not report."""

    what: str  # the mistake, and why nothing shows it
    fix: str  # keys of a recipe that correct it

    def __str__(self) -> str:
        return f"{self.what}. Fix: {self.fix}."


class CannotCheckError(Exception):
    """Something could not be looked at; the text says why."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe, or a model that is going to be fine-tuned."""

    source: Path  # the recipe's file, or the model, for messages
    # All keys of the recipe, checked; for a model, those of ``trainer: "sft"`` with that model.
    values: Mapping[str, Any]
    config: PreTrainedConfig  # the configuration of the model
    is_model: bool  # whether a model was given, and no recipe

    @property
    def kind(self) -> TrainerKind:
        """What its trainer is."""
        return TRAINERS[self.values["trainer"]]

    @cached_property
    def model_and_dtype(self) -> tuple[Any, Any]:
        """The model on the meta device, with its adapters, and the dtype of its weights."""
        try:
            return build_on_meta(self.values, self.config)
        except (ValueError, AttributeError, TypeError) as error:
            raise RecipeError(f"{self.source}: {first_line(error)}") from error

    def having(self, **settings: Any) -> Case:
        """The same case with other values."""
        return dataclasses.replace(self, values={**self.values, **settings})


def read_case(name: str, overrides: AnySequence[str] = (), smoke: bool = False) -> Case:
    """Reads a recipe or, by a Hub id, a folder or a ``config.json``, a model's configuration; no weights.

    Options of the command line (`overrides`) win over the file.
    """
    is_model = Path(name).suffix not in (".yaml", ".yml") and (name not in shipped_recipes() or Path(name).exists())
    source = Path(name) if is_model else find_recipe(name)
    written = {"trainer": "sft", "model_name_or_path": name} if is_model else read_recipe(source)
    values, given = check_values(written, overrides, source)
    if smoke:
        values = shrink(values, given)
    return Case(source, values, config_of_values(values, source, packaged=True), is_model)


ROWS = 256
"""Rows of the data that are looked at."""

_NO_LIMIT = 2**20  # tokens; not None, which some trainers replace by a length of their own
_ALONE: dict[str, Any] = {  # how to train, of which rows and labels do not depend, for this process and no GPU
    **{"use_cpu": True, "dtype": "float32", "bf16": False, "fp16": False, "tf32": None},
    **{"use_peft": False, "load_in_4bit": False, "load_in_8bit": False, "model_init_kwargs": None},
    **{"accelerate_config": None, "expert_parallel_size": 1, "parallelism_config": None, "deepspeed": None},
    **{"use_liger_kernel": False, "liger_kernel_config": None, "attn_implementation": None, "torch_compile": False},
    **{"cuda_graphs": False, "packed_base": False, "fp8_base": False},
    **{"gradient_checkpointing": False, "activation_checkpointing": None, "activation_offloading": False},
    **{"activation_memory": 0, "tokens_per_micro_batch": None, "optim": "adamw_torch", "optim_args": None},
    **{"eval_strategy": "no", "eval_on_start": False, "load_best_model_at_end": False, "save_strategy": "no"},
    **{"push_to_hub": False, "report_to": "none", "disable_tqdm": True, "auto_find_batch_size": False},
    **{"dataset_num_proc": None, "dataloader_num_workers": 0, "dataloader_drop_last": False},
    **{"per_device_train_batch_size": 8, "precompute_ref_log_probs": False, "sync_ref_model": False},
    **{"use_vllm": False, "router_z_loss_coef": 0.0, "router_aux_loss_coef": 0.0, "warm_start": None},
    **{"packing": False, "padding_free": None},  # which join rows, and change no label
    **{"train_sampling_strategy": "sequential"},
}


@dataclasses.dataclass(frozen=True)
class Sequence:
    """The tokens of one sequence without its padding: ids, and whether each has a label, `(length,)` both.

    `side` is "chosen" or "rejected" in a pair, else empty.
    """

    ids: torch.Tensor
    labelled: torch.Tensor
    side: str = ""


@dataclasses.dataclass(frozen=True)
class Sample:
    """The first rows of the data."""

    processor: Any  # the tokenizer or processor, as the trainer has changed it
    # The chat template that the trainer uses in place of the processor's; None for that one.
    template: str | None = None
    is_chat: bool = False  # whether the rows, or without data the prompts to come, are conversations
    rows: int = 0  # number of rows; 0 without data
    dropped: int = 0  # how many of them the trainer leaves out, with `max_length`
    empty: int = 0  # how many it would leave out without `max_length`, since they have no label
    # Sequences of the rows without `max_length`; a pair has two. Empty if answers are generated.
    whole: tuple[Sequence, ...] = ()
    cut: tuple[Sequence, ...] = ()  # sequences that are trained on, with `max_length`
    first: Any = ()  # the rows themselves, as the trainer takes them

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, which a processor has within."""
        return getattr(self.processor, "tokenizer", self.processor)


def converted_rows(values: Mapping[str, Any], source: Path) -> Any:
    """All rows that the keys `values` name, as the trainer takes them, before they become tokens.

    Raises:
        RecipeError: for data that the trainer would refuse.
    """
    with tempfile.TemporaryDirectory() as folder:
        alone = {key: value for key, value in {**_ALONE, "output_dir": folder}.items() if key in values}
        return load_data(build_recipe({**values, **alone}, source))[0]


def read_sample(case: Case) -> Sample:
    """Reads the first rows of the data that `case` names; for a model without data its tokenizer alone.

    Raises:
        RecipeError: for data, or a chat template, that the trainer would refuse.
        CannotCheckError: if the tokenizer, or data on the Hub, cannot be loaded.
    """
    with tempfile.TemporaryDirectory() as folder, _quietly():
        recipe = _recipe(case, folder)
        named = recipe.recipe.data_files or recipe.mixture.datasets or recipe.data.dataset_name
        if case.is_model and not named:
            tokenizer = _as_trained(recipe, _loaded(load_tokenizer, recipe, (), None))
            return Sample(tokenizer, is_chat=tokenizer.chat_template is not None)
        data = _loaded(load_data, recipe)[0] if _is_on_hub(recipe) else load_data(recipe)[0]
        tokenizer = _loaded(load_tokenizer, recipe, data, None)
        rows = _first_rows(data)
        is_chat = holds_turns(rows[0])
        if recipe.kind.generates:
            return Sample(tokenizer, is_chat=is_chat, rows=len(rows), first=rows)
        if recipe.recipe.trainer == "causal_lm":
            blocks = tuple(_of_rows(_blocks(recipe, tokenizer, rows)))
            return Sample(tokenizer, rows=len(rows), whole=blocks, cut=blocks)
        try:
            return _as_trainer_makes(case, folder, tokenizer, rows, is_chat)
        except RecipeError:
            raise
        except (ValueError, OSError, ImportError, RuntimeError, TemplateError) as error:  # as `build_trainer` does
            raise RecipeError(f"{case.source}: {first_line(error)}") from error


def _as_trainer_makes(case: Case, folder: str, tokenizer: Any, rows: Dataset, is_chat: bool) -> Sample:
    trainer = _trainer(_recipe(case, folder), tokenizer, rows)
    unlimited = _trainer(_recipe(case, folder, max_length=_NO_LIMIT), tokenizer, rows)
    return Sample(
        trainer.processing_class,
        template=getattr(trainer, "chat_template", None),
        is_chat=is_chat,
        rows=len(rows),
        dropped=len(rows) - len(trainer.train_dataset),
        empty=len(rows) - len(unlimited.train_dataset),
        whole=tuple(_sequences(unlimited, case.kind.pairs)),
        cut=tuple(_sequences(trainer, case.kind.pairs)),
        first=rows,
    )


def _recipe(case: Case, folder: str, **changes: Any) -> Recipe:
    alone = {**_ALONE, "output_dir": folder, **changes}
    if _can_stream() and not case.values["data_files"]:
        alone |= {"dataset_streaming": True, "streaming": True}  # the first rows are enough
    values = {**case.values, **{key: value for key, value in alone.items() if key in case.values}}
    return build_recipe(values, case.source)


def _can_stream() -> bool:
    import datasets

    return not datasets.config.HF_HUB_OFFLINE  # what is in the cache is read as it is


def _is_on_hub(recipe: Recipe) -> bool:
    name = recipe.data.dataset_name
    local = name is None or name in BUILT_IN or Path(name).exists()
    return not recipe.recipe.data_files and (bool(recipe.mixture.datasets) or not local)


def _loaded(load: Any, *arguments: Any) -> Any:
    """What `load` gives; what is not at hand, without a network for example, is not the recipe's mistake."""
    try:
        return load(*arguments)
    except RecipeError as error:
        raise CannotCheckError(str(error)) from error


def _first_rows(data: Any) -> Dataset:
    from datasets import Dataset

    if isinstance(data, Dataset):
        return data.select(range(min(ROWS, len(data))))
    rows = list(islice(data, ROWS))
    if not rows:
        raise RecipeError("The data has no rows.")
    return Dataset.from_list(rows, features=data.features)


def _as_trained(recipe: Recipe, tokenizer: Any) -> Any:
    """`tokenizer` as TRL's trainer changes it, for a model without data, with which no trainer is built."""
    path = chat_template(recipe.get("chat_template_path"))
    if path is not None and Path(path).is_file():
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    if recipe.get("eos_token") is not None:
        tokenizer.eos_token = recipe.get("eos_token")
    return tokenizer


def _blocks(recipe: Recipe, tokenizer: Any, rows: Dataset) -> Dataset:
    try:
        return text_blocks(rows, tokenizer, recipe)
    except RecipeError as error:
        if len(rows) < ROWS:
            raise
        raise CannotCheckError(f"the first {ROWS} rows do not fill a block of `max_length` tokens") from error


def _trainer(recipe: Recipe, tokenizer: Any, rows: Dataset) -> Any:
    args: Any = recipe.training
    if hasattr(args, "chat_template_path"):
        args.chat_template_path = chat_template(args.chat_template_path)
    processor = processing_class(recipe, tokenizer, rows) or _processor(recipe)
    kind = recipe.kind
    reference = {"ref_model": _small_model(tokenizer)} if kind.has_reference else {}
    return kind.trainer_class(
        model=_small_model(tokenizer, kind.scores),
        args=args,
        train_dataset=rows,
        processing_class=processor,
        **reference,
    )


def _processor(recipe: Recipe) -> Any:
    """What TRL loads where it is given no tokenizer."""
    from transformers import AutoProcessor

    name = recipe.model.model_name_or_path
    trusted = recipe.get("trust_remote_code")
    try:
        return AutoProcessor.from_pretrained(name, revision=recipe.model.model_revision, trust_remote_code=trusted)
    except (OSError, ValueError, ImportError) as error:
        raise CannotCheckError(f"the processor of {name!r} cannot be loaded: {first_line(error)}") from error


def _small_model(tokenizer: Any, scores: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_labels": 1,
    }
    config = LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=len(tokenizer))
    return (LlamaForSequenceClassification if scores else LlamaForCausalLM)(config)


def _sequences(trainer: Any, pairs: bool) -> Iterator[Sequence]:
    for batch in trainer.get_train_dataloader():
        yield from _of_batch(batch, pairs)


def _of_rows(rows: Dataset) -> Iterator[Sequence]:
    for row in rows.with_format("torch"):
        yield from _of_batch({name: value[None] for name, value in row.items()})


def _of_batch(batch: Mapping[str, Any], pairs: bool = False) -> Iterator[Sequence]:
    """The sequences of a batch; pairs are in names of their own, or the chosen answers before the rejected ones."""
    names = [name for side in ("", "chosen_", "rejected_") if (name := f"{side}input_ids") in batch]
    for name, (tokens, labelled) in zip(names, token_masks(batch), strict=False):
        if labelled is None:  # a reward model, which scores whole sequences
            continue
        labelled[:, 0] = False  # which no token before it predicts
        side = name.removesuffix("input_ids").rstrip("_")
        for place, (ids, mask, has_label) in enumerate(zip(batch[name], tokens, labelled, strict=True)):
            half = ("chosen" if 2 * place < len(tokens) else "rejected") if pairs else ""
            yield Sequence(ids[mask], has_label[mask], side or half)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Hides progress bars and the warnings of the libraries, which speak of the small model."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    loggers = {name: logging.getLogger(name) for name in ("transformers", "trl", "accelerate", "liger_trainer")}
    levels = {name: logger.level for name, logger in loggers.items()}
    datasets.disable_progress_bars()
    for logger in loggers.values():
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
        for name, logger in loggers.items():
            logger.setLevel(levels[name])
