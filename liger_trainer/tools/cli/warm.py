"""``liger-trainer warm``: compiles a recipe's kernels ahead of its run, into Triton's cache."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, Trainer

    from liger_trainer.recipe import Recipe

_KEPT = (
    *("max_length", "per_device_train_batch_size", "load_in_4bit", "load_in_8bit", "attn_implementation"),
    *("dtype", "bf16", "fp16", "activation_memory", "model_config", "data_files", "dataset_name", "output_dir"),
)
"""What a smoke run would make small, and a warm one leaves as the recipe has it, or sets itself."""
_LENGTH = 1024
"""Tokens of a row, where the recipe has no `max_length`."""
_CHARACTERS = 12
"""Characters of a row for each token of `max_length`: more than a token of the small tokenizer has."""


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "warm",
        help="compile a recipe's kernels ahead of its run",
        description="Builds the recipe's trainer with random weights and a layer of each kind, takes one step of its "
        "batch size and length on generated data, and leaves the compiled kernels in Triton's cache. Neither weights "
        "nor data are downloaded. Needs a GPU. Every key of the recipe is also an option.",
        usage="liger-trainer warm RECIPE [--key value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
    parser.set_defaults(function=warm)


def warm(arguments: Namespace, options: Sequence[str]) -> int:
    """Compiles the kernels of ``arguments.recipe``, with the `options` that win over it.

    Returns:
        0.

    Raises:
        UserError: without a GPU that Triton drives; RecipeError, which is one, for a mistake in the recipe.
    """
    # A process that sees several would run nn.DataParallel; CUDA reads this once, when it is first asked.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    from liger_trainer.recipe.file import find_recipe, read_recipe
    from liger_trainer.recipe.load import check_values
    from liger_trainer.tools.cli.run_recipe import prepare_libraries

    source = find_recipe(arguments.recipe)
    check_values(read_recipe(source), options, source)  # a mistake in it is said on any machine
    _check_device()
    prepare_libraries()
    folder = tempfile.mkdtemp(prefix="liger-trainer-warm-")
    start = time.perf_counter()
    try:
        with counted() as count:
            take_a_step(warm_recipe(arguments.recipe, options, Path(folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.perf_counter() - start
    print(f"{count['compiled']} kernels compiled, {count['found']} found, in {seconds:.0f} s; they are in {_cache()}")
    return 0


def _check_device() -> None:
    import torch

    from liger_trainer.kernels.runtime import HAS_TRITON, INTERPRETED, TRITON_DEVICES

    device = torch.accelerator.current_accelerator(check_available=True)
    if not HAS_TRITON:
        raise UserError("`warm` compiles Triton kernels, and triton is not installed here.")
    if INTERPRETED:
        raise UserError("`warm` compiles Triton kernels, and TRITON_INTERPRET=1 interprets them; unset it.")
    if device is None or device.type not in TRITON_DEVICES:
        raise UserError(
            "`warm` compiles kernels for the GPU that they will run on, and there is none here (`liger-trainer doctor` "
            "says why); run it on a machine with the GPU of the training."
        )


def _cache() -> str:
    import triton

    return str(triton.knobs.cache.dir)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the kernels that are ``"compiled"`` inside, and those ``"found"`` in Triton's cache on disk."""
    import triton

    count: Counter[str] = Counter()
    compilation = triton.knobs.compilation
    before = compilation.listener

    def listener(**known: Any) -> None:
        count["found" if known["cache_hit"] else "compiled"] += 1
        if before is not None:
            before(**known)

    compilation.listener = listener
    try:
        yield count
    finally:
        compilation.listener = before


def warm_recipe(name: str, options: Sequence[str], folder: Path) -> Recipe:
    """The recipe `name` as one step of a model of the same sizes with few layers, on rows of its length.

    Args:
        name: Its path or name.
        options: Command-line options, which win over the file.
        folder: Takes the data and what the step writes.
    """
    from liger_trainer.recipe.file import find_recipe, read_recipe
    from liger_trainer.recipe.load import build_recipe, check_values
    from liger_trainer.recipe.model import config_of_values
    from liger_trainer.recipe.schema import TRAINERS
    from liger_trainer.recipe.smoke import shrink

    source = find_recipe(name)
    values, _ = check_values(read_recipe(source), options, source)
    config = config_of_values(values, source, packaged=True)
    values |= {"model_config": _few_layers(config), "output_dir": str(folder / "run")}
    if values["dtype"] in (None, "auto") and config.dtype is not None:
        values["dtype"] = str(config.dtype).removeprefix("torch.")
    values |= {"warm_start": None, "eval_strategy": "no", "resume_from_checkpoint": None}
    small = shrink(values, {*_KEPT}) | {"max_steps": 1, "save_strategy": "no", "dataset_name": None}
    if "max_length" in small:
        small["max_length"] = small["max_length"] or _LENGTH
    if TRAINERS[small["trainer"]].generates:  # the two completions of a prompt then fill any batch
        small["gradient_accumulation_steps"] = 2
    rows = _long_rows(small, small.get("max_length", _LENGTH))
    small["tokenizer_vocab_size"] = min(small["tokenizer_vocab_size"], config.get_text_config().vocab_size)
    small["data_files"] = [str(_written(rows, folder / "rows.jsonl"))]
    return build_recipe(small, source)


def take_a_step(recipe: Recipe) -> Trainer:
    """Builds the trainer of `recipe` and trains; nothing is saved."""
    from transformers import set_seed

    from liger_trainer.recipe.build import build_trainer
    from liger_trainer.recipe.data import load_data, load_tokenizer
    from liger_trainer.recipe.run import check_before_loading

    check_before_loading(recipe)
    Path(str(recipe.training.output_dir)).mkdir(parents=True)
    train, _ = load_data(recipe)
    set_seed(recipe.training.seed)
    tokenizer = load_tokenizer(recipe, train, None)
    if recipe.kind.scores:
        train = _cut(train, tokenizer, recipe.get("max_length"))
    trainer = build_trainer(recipe, tokenizer, train, None, resumed=False)
    trainer.train()
    return trainer


def _few_layers(config: Any) -> dict[str, Any]:
    """The settings of a configuration with a layer of each kind; as JSON has them, which a recipe's are."""
    from liger_trainer.packing.proof import fewer_layers

    return json.loads(fewer_layers(config).to_json_string(use_diff=True))


def _long_rows(values: Mapping[str, Any], length: int) -> list[dict[str, Any]]:
    """Rows for a step of the recipe's kind that are cut to `length` tokens; prompts, to be answered, stay short."""
    from liger_trainer.recipe.schema import TRAINERS
    from liger_trainer.recipe.smoke import smoke_data

    kind = "completion" if values.get("completion_only_loss") else TRAINERS[values["trainer"]].data
    needed = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    rows = list(itertools.islice(itertools.cycle(smoke_data(kind)), max(4, needed)))
    return rows if kind == "prompt" else [_longer(row, _CHARACTERS * length) for row in rows]


def _longer(row: dict[str, Any], characters: int) -> dict[str, Any]:
    """`row` with its last turns or texts repeated."""
    spoken = [name for name in ("chosen", "rejected", "completion", "messages", "text") if name in row]

    def repeated(value: Any) -> Any:
        if isinstance(value, str):
            return value * (characters // len(value) + 1)
        return [*value[:-1], {**value[-1], "content": repeated(value[-1]["content"])}]

    return {**row, **{name: repeated(row[name]) for name in spoken}}


def _cut(pairs: Iterable[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
    """The first `length` tokens of each answer of `pairs`: TRL's reward trainer leaves out what is longer."""
    from datasets import Dataset

    def tokens(turns: Any) -> list[int]:
        rendered: Any = tokenizer.apply_chat_template(turns, return_dict=True)
        return rendered["input_ids"][:length]

    return Dataset.from_dict({f"{name}_ids": [tokens(pair[name]) for pair in pairs] for name in ("chosen", "rejected")})


def _written(rows: list[dict[str, Any]], file: Path) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
