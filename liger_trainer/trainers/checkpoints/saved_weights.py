"""What is saved is what was trained: checked before the training, after each save, and where the best is loaded again.

PEFT finds the tensors of an adapter by their names. A name that two of them share, or a weight that is trained without
being an adapter's, is left out of the file without a word. So before training the tensors that PEFT would write are
compared with those that are trained, and after each save the names in the file with those. Nothing is read but names.

Models that several processes hold in parts (FSDP, DeepSpeed, tensor parallelism) are gathered by the library that split
them, under names of its own, and are not checked. Where checkpoints of FSDP are in parts (`SHARDED_STATE_DICT`), the
Trainer saves no model at all; here it is gathered too.

An adapter's own files leave out how the base was quantised that it was trained on; a file beside them says it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import StateDictType
from transformers import Trainer
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from liger_trainer.compat.private import available, require
from liger_trainer.compat.transformers import CONVERTED_CHECKPOINTS, LOADED_WEIGHTS
from liger_trainer.kernels.runtime import is_dtensor
from liger_trainer.packed.loading import decoded_settings, quantization_of
from liger_trainer.patching.codes import is_code
from liger_trainer.patching.moe.quantized_experts import four_bits

logger = logging.getLogger("liger_trainer")

require(CONVERTED_CHECKPOINTS)


class SavedWeightsError(RuntimeError):
    """A saved model lacks weights that were trained; the text names them."""


class SavedWeightsMixin(Trainer):
    """Comes before a Trainer: compares what a save has written with what was trained."""

    model: nn.Module

    @property
    def _holds_whole_model(self) -> bool:
        split = self.is_fsdp_enabled or self.is_deepspeed_enabled or self.is_distributed_loading_by_transformers
        return not split and not any(is_dtensor(parameter) for parameter in self.model.parameters())

    def _check_weights(self) -> None:
        """Before training: refuses adapters that would not be saved, and names weights that nobody trains."""
        if not self._holds_whole_model:
            return
        if isinstance(self.model, PeftModel):
            _check_adapters(self.model, refuse=self.args.save_strategy != "no")
        if self.is_world_process_zero() and available(LOADED_WEIGHTS):
            _warn_of_fresh_weights(self.model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model, whole outside of checkpoints; see [`~transformers.Trainer.save_model`].

        Raises:
            SavedWeightsError: if the files lack a weight that was trained.
        """
        on_other_host = self.args.should_save and self.args.process_index > 0 and self._holds_whole_model
        with contextlib.ExitStack() as around:
            if on_other_host:
                around.enter_context(_written_here(self.accelerator.unwrap_model(self.model)))
            if self.is_fsdp_enabled and not _internal_call:
                around.enter_context(_gathered(self.accelerator.state.fsdp_plugin))
            super().save_model(output_dir, _internal_call)
        folder = Path(output_dir or str(self.args.output_dir))
        if on_other_host and not isinstance(self.model, PeftModel) and not any(_files_of_model(folder)):
            raise SavedWeightsError(
                f"`save_on_each_node` is true, but transformers {transformers.__version__} has written no weights to "
                f"{str(folder)!r} on this host, only on the first. Set `save_on_each_node: false`, and give an "
                "`output_dir` that all hosts share."
            )
        if self.args.should_save and self._holds_whole_model:
            _check_files(self.model, folder)

    def _load_best_model(self) -> None:
        """As the Trainer's, which looks for adapters in the checkpoint's folder alone, where PEFT writes 'default'."""
        model: Any = self.model
        folder = Path(str(self.state.best_model_checkpoint))
        elsewhere = isinstance(model, PeftModel) and model.active_adapters != ["default"]
        if not elsewhere or not self._holds_whole_model:
            super()._load_best_model()
            return
        logger.info("Loading the best adapters from %s (score: %s).", folder, self.state.best_metric)
        for name in model.active_adapters:
            model.load_adapter(str(folder_of(name, folder)), name)


@contextlib.contextmanager
def _written_here(model: Any) -> Iterator[None]:
    """Around a save by the first process of another host (`save_on_each_node`); transformers lets only rank 0 write."""
    if not hasattr(model, "should_save_on_this_rank"):
        yield
        return
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del model.should_save_on_this_rank


@contextlib.contextmanager
def _gathered(plugin: Any) -> Iterator[None]:
    """Around a save under FSDP: of the whole model, whatever way checkpoints are written in."""
    of_checkpoints, plugin.state_dict_type = plugin.state_dict_type, StateDictType.FULL_STATE_DICT
    try:
        yield
    finally:
        plugin.state_dict_type = of_checkpoints


def folder_of(adapter: str, folder: Path) -> Path:
    """Where PEFT writes an adapter when it saves a model in `folder`."""
    return folder if adapter == "default" else folder / adapter


def _adapter_tensors(model: Any, adapter: str) -> dict[str, Any]:
    """What PEFT would write of an adapter: the tensors, which share their memory with the model's, by their names."""
    return get_peft_model_state_dict(
        model, adapter_name=adapter, save_embedding_layers=False if _asks_the_hub(model) else "auto"
    )


def _asks_the_hub(model: Any) -> bool:
    """Whether PEFT looks on the Hub if the vocabulary was resized, with which it writes the embeddings too."""
    name = getattr(model.config, "name_or_path", None)
    return bool(name) and not Path(str(name), "config.json").is_file()


def _check_adapters(model: Any, refuse: bool) -> None:
    """Compares what is trained with what PEFT would write; a lack is an error, or a warning if `refuse` is false."""
    if any(writes_other_tensors(config) for config in model.peft_config.values()):
        return
    written: set[int] = set()
    for name in model.peft_config:
        try:
            written.update(tensor.data_ptr() for tensor in _adapter_tensors(model, name).values())
        except KeyError as error:
            message = (
                f"PEFT cannot save the adapter {name!r} beside the others: it looks for its {error.args[0]!r} and "
                "finds none. Give all adapters `trainable_token_indices`, or none, and names that are no module's."
            )
            if refuse:
                raise SavedWeightsError(message) from None
            logger.warning("%s", message)
            return
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    lost = [name for name, parameter in trained.items() if parameter.numel() and parameter.data_ptr() not in written]
    if _asks_the_hub(model):  # when it saves
        ends = {id(weight) for end in _embeddings(model) for weight in end.parameters()}
        lost = [name for name in lost if id(trained[name]) not in ends]
    if not lost:
        return
    named = sorted(model.peft_config.keys() & {part for name in lost for part in name.split(".")[:-3]})
    advice = (
        f"The adapter {named[0]!r} is called as a module of the model, where PEFT therefore leaves out others; give it "
        "another name"
        if named
        else "Train them as part of the adapters (`modules_to_save`), or freeze them"
    )
    message = f"{len(lost)} of {len(trained)} trained tensors would be in no checkpoint, such as {lost[0]!r}. {advice}."
    if refuse:
        raise SavedWeightsError(message)
    logger.warning("%s", message)


def writes_other_tensors(config: Any) -> bool:
    """Whether PEFT writes what it computes from the trained tensors: prompts, choices, ranks that are left."""
    pruned = are_pruned(getattr(config, "rank_pattern", None))
    return config.is_prompt_learning or getattr(config, "save_only_topk_weights", False) or pruned


def are_pruned(ranks: dict[str, Any] | None) -> bool:
    """Whether a `rank_pattern` is one of AdaLoRA's, which says which ranks are left."""
    return any(isinstance(left, list) for left in (ranks or {}).values())


def _check_files(model: nn.Module, folder: Path) -> None:
    """Compares the names in the files of a save with those of the model."""
    if isinstance(model, PeftModel):
        for adapter in model.peft_config:
            file = folder_of(adapter, folder) / ADAPTER_SAFE_WEIGHTS_NAME
            if file.is_file():
                _compare(file, _adapter_tensors(model, adapter).keys(), shapes_in([file]).keys())
        return
    files = list(_files_of_model(folder))
    if not files or getattr(model, "peft_config", None) or quantization_of(getattr(model, "config", None)) is not None:
        return
    shapes = shapes_in(files)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    # A mixture of experts is saved expert by expert, and shared weights under one name: then the numbers must agree.
    saved = sum(map(math.prod, shapes.values()))
    if not trained <= shapes.keys() and saved < sum(parameter.numel() for parameter in model.parameters()):
        _compare(files[0], trained, shapes.keys())


def _compare(file: Path, expected: Any, found: Any) -> None:
    lost = sorted(expected - found)
    if lost:
        raise SavedWeightsError(
            f"{str(file)!r} lacks {len(lost)} of {len(expected)} trained tensors, such as {lost[0]!r}. The model in "
            "memory has them; save it in another way, such as `torch.save(trainer.model.state_dict(), FILE)`."
        )


def _files_of_model(folder: Path) -> Iterator[Path]:
    index, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        yield from (folder / name for name in sorted(set(names)))
    elif single.is_file():
        yield single


def shapes_in(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, from the headers."""
    found = {}
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                found[name] = tuple(file.get_slice(name).get_shape())
    return found


def _warn_of_fresh_weights(model: Any) -> None:
    """Names weights that no checkpoint held, and that are frozen, as the head of a reward model without `task_type`."""
    parameters = dict(model.named_parameters())
    if not any(getattr(parameter, "_is_hf_initialized", False) for parameter in parameters.values()):
        return  # built from a configuration
    kept: set[int] = set()
    if isinstance(model, PeftModel):
        kept = {tensor.data_ptr() for name in model.peft_config for tensor in _adapter_tensors(model, name).values()}
    # A resized embedding is a new tensor too, with old values.
    ends = {id(weight) for end in _embeddings(model) for weight in end.parameters()}
    coded = [module for module in model.modules() if any(map(is_code, module._parameters.values()))]
    scales = {id(each) for module in coded for each in module.parameters(recurse=False)}  # are made with the codes
    fresh = [
        name
        for name, parameter in parameters.items()
        if not parameter.requires_grad
        and not getattr(parameter, "_is_hf_initialized", False)
        and parameter.dtype.is_floating_point
        and parameter.dtype.itemsize > 1  # quantised weights are new tensors
        and parameter.data_ptr() not in kept
        and id(parameter) not in ends
        and id(parameter) not in scales
        and "original_module" not in name.split(".")  # PEFT trains a copy
        and not {*getattr(model, "peft_config", ())} & {*name.split(".")}  # PEFT has made and frozen it
    ]
    if fresh:
        module = fresh[0].split(".")[-2]
        unsaved = ", and no adapter's file will hold them" if isinstance(model, PeftModel) else ""
        logger.warning(
            "The model's checkpoint had no %s. They are frozen, so they keep their random values%s. To train them "
            "beside adapters, add `modules_to_save=[%r]` to their configuration; for the head of a reward model "
            "`task_type='SEQ_CLS'` does that.",
            *(", ".join(fresh[:3]) + (", ..." if len(fresh) > 3 else ""), unsaved, module),
        )


def _embeddings(model: Any) -> Iterator[nn.Module]:
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found = getattr(model, name)()
        except (AttributeError, NotImplementedError):
            continue
        if found is not None:
            yield found


FILE = "base_quantization.json"
"""Beside ``adapter_config.json``."""


@dataclasses.dataclass(frozen=True)
class BaseQuantization:
    """How a base model was quantised."""

    # The keys of transformers' ``quantization_config``; None if only experts were quantised.
    config: dict[str, Any] | None
    dtype: str  # the dtype that the model was loaded in, such as ``"bfloat16"``
    # ``quant_type`` and ``double_quant`` of `quantize_experts`; None if experts were not quantised so.
    experts: dict[str, Any] | None = None
    decoded: bool = False  # whether transformers decoded it while it loaded it; training computed with what that gave


def write_base_quantization(model: nn.Module, folder: Path) -> None:
    """Writes `FILE` into a folder with the adapters of `model`, if its base is quantised; else removes an earlier one.

    The Trainer makes no folder of adapters in a checkpoint that FSDP saves in shards.
    """
    (folder / FILE).unlink(missing_ok=True)
    found = base_quantization(model) if isinstance(model, PeftModel) and folder.is_dir() else None
    if found is not None:
        text = json.dumps(dataclasses.asdict(found), indent=2, default=str)
        (folder / FILE).write_text(text + "\n", encoding="utf-8")


def base_quantization(model: PeftModel) -> BaseQuantization | None:
    """How the base of `model` is quantised; None if it is not."""
    base: Any = model.get_base_model()
    revision = next((one.revision for one in model.peft_config.values()), None)
    config, decoded = quantization_of(base.config), decoded_settings(base, revision)
    weight = next((one for module in base.modules() for one in four_bits(module).values()), None)
    if config is None and weight is None and decoded is None:
        return None
    experts = None
    if weight is not None:
        experts = {"quant_type": weight.quant_type, "double_quant": weight.nested_blocksize > 0}
    return BaseQuantization(
        config=config.to_dict() if hasattr(config, "to_dict") else config or decoded,
        dtype=str(base.config.dtype).removeprefix("torch."),
        experts=experts,
        decoded=decoded is not None,
    )


def read_base_quantization(folder: Path) -> BaseQuantization | None:
    """What `write_base_quantization` has written into `folder`; None if it has written nothing."""
    path = folder / FILE
    return BaseQuantization(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
