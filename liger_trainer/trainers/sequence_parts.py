"""Context and sequence parallelism (`cp_size`, `sp_size`) with our attention: parts of a batch, and their plans.

accelerate leaves attention to torch's ring, which knows no documents, no windows and no padding: hooks drop every mask,
and models with windows are refused. Where all attentions of a model are ours, none of this is done. Each process cuts
the batch, which all processes of a group have, and the `Step` says which keys its tokens see
(`parallel/sequence_parts.py`). Positions, and the label of the token behind each, are those of the whole rows.

Under sequence parallelism DeepSpeed would put a function of its own around ours, which drops masks and takes heads of
one size alone. Ours exchanges heads itself, by plans of the whole rows. DeepSpeed cuts the batches where a loss is one
of labels. It takes no other columns, no lists of prompts, and gives the batches of each process to all of a group in
turn, which would tear the completions of a prompt apart. So where a forward cuts batches, DeepSpeed does not: loaders
give all processes of a group the same ones.

Documents are those that masks would show: the tokens of an attention mask, or where there is none, what `position_ids`
tell of a packed row.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from liger_trainer.attention.config_names import NAME
from liger_trainer.attention.interface import NotPackable, attention_forward, has_our_attention
from liger_trainer.attention.masks import cut_row
from liger_trainer.compat.accelerate import CONTEXT_PARALLEL, SEQUENCE_PARALLEL
from liger_trainer.compat.deepspeed import ADDED_PARTS, EXCHANGED_HEADS
from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import CONTEXT_PARALLEL_INPUTS, SEQUENCE_PARALLEL_LOADER
from liger_trainer.head.lm_head import without_adapters
from liger_trainer.head.step import bounds_of, current_step, running
from liger_trainer.kernels.attention.exchanged_heads import check_heads
from liger_trainer.kernels.attention.plan import Ranks
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX
from liger_trainer.parallel.sequence_parts import SequenceHeads, SequenceParts, columns_of

_FILLED = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX}
"""What columns get that make a batch long enough to be cut; 0 for all others."""


class SequencePartsMixin:
    """Gives a process its part of every batch, where our attention runs under context parallelism."""

    _ranks: Ranks | None = None  # the processes that cut the same batches; None where another library cuts them
    _group: Any = None  # of these processes
    _forward_takes_parts = False  # whether the fused forward cuts the batch, and not the trainer
    _exchanges_heads = False  # whether attention is ours on the parts of rows that DeepSpeed cuts

    @property
    def _forward_ranks(self) -> Ranks | None:
        """The processes among which a forward divides its batch; None where it does not."""
        return self._ranks if self._forward_takes_parts else None

    def get_cp_size(self) -> int:
        """How many processes get the same batches, of which each has a part: also those of `sp_size`, if they do."""
        return super().get_cp_size() if self._ranks is None else self._ranks.ranks  # type: ignore[misc]

    def get_sp_size(self) -> int:
        """How many processes DeepSpeed gives parts of each other's batches, by which loaders are longer."""
        return super().get_sp_size() if self._ranks is None else 1  # type: ignore[misc]

    def _takes_gathered_keys(self) -> bool:
        """Whether the trainer will give a model parts of sequences with plans, if its attention is ours."""
        trainer: Any = self
        config = trainer.accelerator.parallelism_config
        return config is not None and (config.cp_enabled or config.sp_enabled) and not trainer.args.torch_compile

    def _split_sequences(self, model: nn.Module) -> None:
        """Takes the cutting of sequences from accelerate, if the attention of `model` is ours.

        Raises:
            ValueError: for prompt learning, whose virtual tokens no process would have in its place, for
                `precompute_ref_log_probs`, whose rows TRL would get from each process, and for heads that `sp_size`
                does not divide.
        """
        trainer: Any = self
        base: Any = without_adapters(model)
        if not self._takes_gathered_keys() or not has_our_attention(base):
            return
        sizes = trainer.accelerator.parallelism_config
        option = "cp_size" if sizes.cp_enabled else "sp_size"
        config: Any = getattr(model, "active_peft_config", None)
        if config is not None and config.is_prompt_learning:
            raise ValueError(
                f"`{option}` is {getattr(sizes, option)}, and {type(config).__name__} puts virtual tokens before each "
                f"sequence, of which every process has a part. Set `{option}=1`, or train another kind of adapter."
            )
        if getattr(trainer.args, "precompute_ref_log_probs", False):
            raise ValueError(
                f"`precompute_ref_log_probs` is true and `{option}` is {getattr(sizes, option)}: TRL would take the "
                f"rows of each process for other ones. Set `precompute_ref_log_probs` to false, or `{option}=1`."
            )
        if sizes.sp_enabled:
            self._exchange_heads(base.config.get_text_config())
            return
        require(CONTEXT_PARALLEL)
        require(CONTEXT_PARALLEL_INPUTS)
        self._cut_batches(trainer.accelerator.torch_device_mesh["cp"], option)
        # It would refuse models with windows, and drop the plans of all others.
        trainer.accelerator._prepare_cp = _as_given

    def _cut_batches(self, mesh: DeviceMesh, option: str) -> None:
        """Has the processes of `mesh`, which get the same batches, cut them."""
        self._group = mesh.get_group()
        self._ranks = Ranks(mesh.get_local_rank(), mesh.size(), self._group.group_name, option)

    def _exchange_heads(self, config: Any) -> None:
        """Takes the exchange of heads from DeepSpeed, for a model with this configuration."""
        trainer: Any = self
        sizes, heads = trainer.accelerator.parallelism_config, config.num_attention_heads
        check_heads(heads, getattr(config, "num_key_value_heads", None) or heads, sizes.sp_size)
        require(SEQUENCE_PARALLEL)
        require(EXCHANGED_HEADS)
        prepare = trainer.accelerator._prepare_deepspeed

        def prepared(*args: Any) -> Any:
            theirs, sizes.sp_handler = sizes.sp_handler, copy.copy(sizes.sp_handler)
            sizes.sp_handler.sp_attn_implementation = NAME  # which it expects in the model's configuration
            try:
                return prepare(*args)
            finally:
                sizes.sp_handler = theirs
                if ALL_ATTENTION_FUNCTIONS[NAME] is not attention_forward:
                    del ALL_ATTENTION_FUNCTIONS[NAME]  # DeepSpeed's own, around ours

        trainer.accelerator._prepare_deepspeed = prepared
        self._exchanges_heads = True
        if not self._forward_takes_parts:
            return
        require(SEQUENCE_PARALLEL_LOADER)
        shape = (trainer.accelerator.num_processes // sizes.sp_size, sizes.sp_size)
        # Under DeepSpeed, loaders give the same batches to the processes of tensor parallelism alone.
        mesh = init_device_mesh(trainer.accelerator.device.type, shape, mesh_dim_names=("dp", "tp"))
        trainer.accelerator._prepare_device_mesh = lambda: mesh
        trainer.accelerator.deepspeed_ulysses_dl_adapter = lambda loader, model: loader
        self._cut_batches(mesh["tp"], "sp_size")

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], contextlib.AbstractContextManager[None]], dict[str, Any]]:
        trainer: Any = self
        if self._exchanges_heads and "shift_labels" in inputs:  # an evaluation has whole rows
            heads, inputs = heads_of_batch(inputs, _ranks_of_deepspeed(), trainer.accelerator.device)
            return functools.partial(attended, heads), inputs
        if self._ranks is None:
            return super()._prepare_context_parallel_inputs(model, inputs)  # type: ignore[misc]
        if self._forward_takes_parts:
            return contextlib.nullcontext, inputs
        parts, inputs = part_of_batch(inputs, self._ranks)
        return functools.partial(attended, parts), inputs


def _as_given(*args: Any) -> tuple[Any, ...]:
    return args


_OF_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What collators of packed rows say of documents besides `position_ids`; DeepSpeed cuts columns of tokens alone."""


def collated_columns(collator: Callable[[list[Any]], Mapping[str, Any]], features: list[Any]) -> dict[str, Any]:
    """The batch of `collator`, without what no process could have a part of and `position_ids` tell as well."""
    return {name: value for name, value in collator(features).items() if name not in _OF_FLASH}


def _ranks_of_deepspeed() -> Ranks:
    """The processes that have parts of the same rows, which DeepSpeed knows once it has prepared a model."""
    from deepspeed.utils import groups

    group = groups._get_sequence_parallel_group()
    return Ranks(group.rank(), group.size(), group.group_name, "sp_size")


def added_parts(trainer: Any) -> int:
    """Of how many processes with parts of the same rows DeepSpeed adds up the gradients; 1 if it takes their mean.

    ZeRO-3 averages over all processes, ZeRO-2 and below over groups of them.

    Raises:
        ValueError: for ZeRO-3 without `reduce_scatter`, which does one for some gradients and the other for the rest.
    """
    sizes = trainer.accelerator.parallelism_config
    if sizes is None or not sizes.sp_enabled:
        return 1
    require(ADDED_PARTS)
    zero = trainer.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    if zero["stage"] != 3:
        return sizes.sp_size
    if not zero.get("reduce_scatter", True):
        raise ValueError(
            f"`sp_size` is {sizes.sp_size} and `reduce_scatter` is false in DeepSpeed's configuration: with ZeRO-3 it "
            "would add up some of the gradients of a sequence's parts, and average the others. Set `reduce_scatter` to "
            "true, or `stage` to 2."
        )
    return 1


class _OfOneRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return grad / ctx.ranks, None


def of_one_rank(result: Any, ranks: int) -> Any:
    """The loss of whole rows that each of the processes with a part of them has, with its gradient divided by R.

    transformers gathers the losses of all parts, and our forwards their log-probabilities, so the gradient of a part's
    own ones is the sum of R equal ones. Where DeepSpeed adds up the gradients of the parts, the step would be R times
    too large.

    Args:
        result: The loss, or the loss and the model's outputs, as `deepspeed_sp_compute_loss` returns them.
        ranks: How many processes have parts of the same rows.
    """
    if isinstance(result, tuple):
        return _OfOneRank.apply(result[0], ranks), *result[1:]
    return _OfOneRank.apply(result, ranks)


def heads_of_batch(
    inputs: Mapping[str, Any], ranks: Ranks, device: torch.device
) -> tuple[SequenceHeads, dict[str, Any]]:
    """The whole rows whose parts a batch has; their positions are read on the host, once a micro-batch.

    Args:
        inputs: The batch, of S / R columns, with `position_ids` of the whole rows.
        ranks: The processes, of which each has a part of the same rows.
        device: Where the model is.

    Returns:
        The rows, and `inputs` with an `attention_mask`, with which no model looks for packing in its positions.

    Raises:
        ValueError: see [`part_of_batch`].
    """
    batch = {name: each.contiguous() if isinstance(each, torch.Tensor) else each for name, each in inputs.items()}
    name = "position_ids" if batch.get("attention_mask") is None else "attention_mask"
    rows, columns = batch["position_ids"].shape
    collectives = torch.ops._c10d_functional
    told = collectives.all_gather_into_tensor(batch[name].to(device), ranks.ranks, ranks.group)
    whole = torch.cat(collectives.wait_tensor(told).chunk(ranks.ranks), 1)
    length = columns * ranks.ranks
    begins = document_begins({name: whole}, rows, length)
    batch.setdefault("attention_mask", torch.ones_like(batch["position_ids"]))
    return SequenceHeads(ranks, begins, length, device), batch


def part_of_batch(inputs: Mapping[str, Any], ranks: Ranks) -> tuple[SequenceParts, dict[str, Any]]:
    """The parts of a batch of S tokens a row, and the columns of this process.

    Args:
        inputs: The batch, the same on all processes of `ranks`. Its tensors of two dimensions with S columns are cut.
        ranks: The processes.

    Returns:
        The parts, and `inputs` with `position_ids`, `attention_mask` and, if there are `labels`, `shift_labels`. If
        2R, twice the number of processes, does not divide S, columns of padding are added first.

    Raises:
        ValueError: for a batch without `input_ids`, and for a mask of another shape, or one that masks a token between
            two that it does not.
    """
    batch = dict(inputs)
    ids = batch.get("input_ids")
    if ids is None:
        has = ", ".join(batch)
        raise ValueError(f"`{ranks.option}` is {ranks.ranks}: a batch needs `input_ids`, and this one has {has}.")
    rows, length = ids.shape
    begins = document_begins(batch, rows, length)
    batch.setdefault("position_ids", torch.arange(length, device=ids.device).expand(rows, -1))
    batch.setdefault("attention_mask", torch.ones_like(ids))  # with which no model looks for packing in its positions
    if "labels" in batch and "shift_labels" not in batch:
        batch["shift_labels"] = F.pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]
    added = -length % (2 * ranks.ranks)
    if added:
        begins = [[*firsts, length] for firsts in begins]
    here = columns_of(ranks, length + added).to(ids.device)
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == length:
            batch[name] = F.pad(value, (0, added), value=_FILLED.get(name, 0))[:, here]
    parts = SequenceHeads if ranks.option == "sp_size" else SequenceParts
    return parts(ranks, begins, length + added, ids.device), batch


def document_begins(batch: Mapping[str, Any], rows: int, length: int) -> list[list[int]]:
    """Where the documents of each row begin, as masks of the batch would show; padding is documents of its own.

    Raises:
        ValueError: see [`part_of_batch`].
    """
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None:
        bounds = bounds_of(mask) if mask.dim() == 2 else None
        if bounds is None:
            raise ValueError(
                f"`attention_mask` of shape {tuple(mask.shape)} masks more than the beginnings and ends of rows; with "
                "`cp_size` or `sp_size` above 1 it must have a 1 for each token and a 0 for padding before or behind "
                "all of them."
            )
        return [[*cut_row(0, length, row, 0)] for row in bounds]
    if positions is None:
        return [[0] for _ in range(rows)]
    starts = F.pad(positions.expand(rows, -1).diff(dim=-1).ne(1), (1, 0), value=True).cpu()
    return [row.nonzero().flatten().tolist() for row in starts]


@contextlib.contextmanager
def attended(parts: SequenceParts) -> Iterator[None]:
    """Around forwards and backwards of a model with our attention: the tokens of this process see those of all.

    Raises:
        ValueError: if the model has a mask that no plan is, or masks of its own.
    """
    refused = f"`{parts.ranks.option}` is {parts.ranks.ranks}, and the model has %s. Set `{parts.ranks.option}=1`."
    try:
        with running(dataclasses.replace(current_step(), plan_of=parts.plan)):
            yield
    except NotPackable as error:
        raise ValueError(refused % error) from error
    if not parts.plans:
        raise ValueError(refused % "masks that are not made by transformers")
