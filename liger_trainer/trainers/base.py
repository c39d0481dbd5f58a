"""What every Liger trainer adds to the Hugging Face trainer that it extends.

A trainer is a class such as ``LigerTrainer(LigerTrainerMixin, Trainer)``; those over TRL add `trl_mixin.py`. The order
of this file: the construction, with its checks and kernels; the training; its batches; a step and its loss; saving.
Checkpoints (`checkpoints/`) and evaluation (`evaluating.py`) are mixins of their own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec

import torch
from accelerate import DistributedType
from accelerate.utils import DynamoBackend
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from liger_trainer.callbacks.kernel_report import KernelReportCallback
from liger_trainer.callbacks.labelled_share import LabelledShareCallback
from liger_trainer.callbacks.memory import MemoryCallback
from liger_trainer.callbacks.non_finite import NonFiniteGuardCallback
from liger_trainer.callbacks.rounded_updates import RoundedUpdatesCallback
from liger_trainer.callbacks.router_z_loss import RouterZLossCallback
from liger_trainer.callbacks.run_report import RunReportCallback
from liger_trainer.callbacks.throughput import ThroughputCallback
from liger_trainer.compat.deepspeed import PARTITIONED_PARAMETERS
from liger_trainer.compat.private import available, require
from liger_trainer.compat.transformers import (
    BATCH_CHECKS,
    GRADIENT_NORM,
    LOGGED_LOSS,
    META_WEIGHTS,
    NON_FINITE_GUARD,
    PROMPT_TOKENS,
)
from liger_trainer.configs.caller_warnings import warnings_of_the_caller
from liger_trainer.configs.flags import KernelFlags, kernel_mapping_of
from liger_trainer.configs.liger_adamw import LIGER_ADAMW, liger_adamw_options
from liger_trainer.head.step import Step, current_step, running
from liger_trainer.kernels.head.head_chunks import rescale_
from liger_trainer.optim.adamw import LigerAdamW
from liger_trainer.patching.apply import apply_kernels
from liger_trainer.patching.binding import bound_modules
from liger_trainer.patching.indexer import freeze_indexers
from liger_trainer.patching.report import KernelReport, KernelReportRow
from liger_trainer.stock_trainer import in_charge
from liger_trainer.trainers.activation_memory import step_offloading
from liger_trainer.trainers.adapter_methods import AdapterMethodsMixin, added_terms
from liger_trainer.trainers.checkpoints.converted import ConvertedCheckpointsMixin
from liger_trainer.trainers.checkpoints.saved_weights import write_base_quantization
from liger_trainer.trainers.checkpoints.whole import WholeCheckpointsMixin
from liger_trainer.trainers.checks.first_step import UsersLoss, defines_in_subclass
from liger_trainer.trainers.checks.launch import (
    check_fsdp1_adapters,
    check_fsdp2_tied_head,
    check_launch,
    check_masks_of_ulysses,
    check_saves_on_each_host,
    warn_of_fp32_weights,
    warn_of_tied_adapters,
)
from liger_trainer.trainers.checks.low_bit import check_low_bit_weights, first_step_checked, store_base
from liger_trainer.trainers.checks.out_of_memory import memory_advice
from liger_trainer.trainers.checks.packed_base import check_packed_base
from liger_trainer.trainers.checks.shared_keys import check_shared_keys
from liger_trainer.trainers.compile_ahead import compile_ahead
from liger_trainer.trainers.cuda_graphs import CudaGraphsMixin
from liger_trainer.trainers.deferred_metrics import DeferredMetrics, DeferredNumber
from liger_trainer.trainers.evaluating import EvaluatingMixin
from liger_trainer.trainers.filling import filling_collator, take_filled, without_filling
from liger_trainer.trainers.label_smoothing import FusedLabelSmoother
from liger_trainer.trainers.module_tree import ModuleTree
from liger_trainer.trainers.moe import (
    check_adapted_experts,
    check_experts_in_4_bits,
    check_router_losses,
    mean_z_loss,
    with_term,
)
from liger_trainer.trainers.sequence_parts import SequencePartsMixin, added_parts, collated_columns, of_one_rank
from liger_trainer.trainers.step import (
    KnownBatches,
    checked_collator,
    discard_facts,
    loss_divisor,
    process_scale,
    warn_of_unlabelled_end,
)

logger = logging.getLogger("liger_trainer")
_Parameters = ParamSpec("_Parameters")

require(NON_FINITE_GUARD)

CARD_TAG = "liger-trainer"
"""The tag of model cards, beside those of TRL and the Trainer."""

# In these, every process has all gradients, so the norms that it computes are those of the model.
WHOLE_GRADIENTS = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.MULTI_XPU)


def wants_kernels(args: TrainingArguments) -> bool:
    """Whether a Liger trainer with these arguments uses the kernels.

    Our argument classes have `use_liger_kernel` on by default, so it decides. In Hugging Face's it is off by default;
    there, choosing a Liger trainer is enough to ask for the kernels.
    """
    return args.use_liger_kernel if isinstance(args, KernelFlags) else True


def own_arguments(args: TrainingArguments) -> TrainingArguments:
    """`args`, or a copy of Hugging Face's own, whose `use_liger_kernel` a Liger trainer may set.

    Without the copy, a stock trainer that is given the same object next would run kernels that nobody asked for.
    """
    return args if isinstance(args, KernelFlags) else copy.copy(args)


def extended_config(config_class: type[TrainingArguments]) -> type[TrainingArguments]:
    """The configuration of TRL or transformers that ours extends."""
    return next(base for base in config_class.__bases__ if issubclass(base, TrainingArguments))


def parameters_of(
    stock: Callable[_Parameters, None], config_class: type[TrainingArguments]
) -> Callable[[Callable[..., None]], Callable[_Parameters, None]]:
    """Decorates a constructor that takes what `stock` takes: editors, `help` and the API pages show its parameters.

    Args:
        stock: `__init__` of the trainer that is extended.
        config_class: Our configuration; `args` may be of its class or of the class that it extends.
    """
    signature = inspect.signature(stock)
    own = signature.parameters["args"].replace(annotation=config_class | extended_config(config_class) | None)
    shown = signature.replace(parameters=[*{**signature.parameters, "args": own}.values()])

    def decorate(init: Any) -> Any:
        init.__signature__ = shown
        return init

    return decorate


class LigerTrainerMixin(
    CudaGraphsMixin,
    EvaluatingMixin,
    AdapterMethodsMixin,
    SequencePartsMixin,
    ConvertedCheckpointsMixin,
    WholeCheckpointsMixin,
):
    """Puts the kernels into the model at construction, adds the callbacks, and checks what the trainer is given.

    Attributes:
        kernel_report (`KernelReport`): Modules that were patched or left alone; None with the kernels off.
    """

    model: nn.Module
    kernel_report: KernelReport | None = None
    _deferred: DeferredMetrics | None = None  # of a trainer of TRL whose metrics may be read later
    _shifts_labels: bool | None = None  # as the trainer's own loss does; None to ask the model
    _counts_labels = True  # whether the labels of a batch are those of its forwards
    _takes_parts_of_sequences = True  # whether the loss is right where a process has a part of each sequence
    _patched: weakref.ref[nn.Module] | None = None
    _fp8_base_rows: Sequence[KernelReportRow] = ()
    _operations_per_token: int | None = None  # of a forward and a backward; None before the first micro-batch
    _step_shape: tuple[int, int] | None = None  # rows and tokens of the last micro-batch; None if it has no ids
    _tree: ModuleTree | None = None  # of the model that is trained; None while none is

    def _finish_init(self) -> None:
        """Checks and prepares the trainer; the last call of each trainer's `__init__`."""
        # We override methods that these features name. If the Trainer no longer has one, ours is never called: warn.
        available(META_WEIGHTS)
        available(BATCH_CHECKS)
        available(PROMPT_TOKENS)
        available(GRADIENT_NORM)
        if self.is_deepspeed_enabled:
            require(PARTITIONED_PARAMETERS)
        check_launch(self, self._takes_parts_of_sequences or self._forward_ranks is not None)
        check_saves_on_each_host(self)
        warn_of_fp32_weights(self)
        check_fsdp1_adapters(self)
        check_fsdp2_tied_head(self)
        check_experts_in_4_bits(self)
        check_low_bit_weights(self.model)
        check_packed_base(self)
        check_shared_keys(self)
        self._store_base_in_fp8(self.model)  # of a model that was on the device already
        self._prepare_activation_memory()
        self.args.use_liger_kernel = wants_kernels(self.args)
        self._throughput = self._own_callback(ThroughputCallback)
        self._labelled_share = self._own_callback(LabelledShareCallback)
        self._own_callback(MemoryCallback)
        self._own_callback(RoundedUpdatesCallback)
        guard = getattr(self.args, "non_finite", "stop")
        self._guard = None if guard == "off" else self._own_callback(NonFiniteGuardCallback, guard)
        self._show_report = self._own_callback(KernelReportCallback)
        self._run_report = self._own_callback(RunReportCallback)
        self._throughput.measure(self.model)
        self._throughput.replicas_per_batch = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()
        if self._fp8_base_rows and not self.args.use_liger_kernel:
            raise ValueError(
                "`fp8_base` is true, but `use_liger_kernel` is false. Set it to true, or `fp8_base` to false."
            )
        if self.label_smoother is not None:
            self.label_smoother = FusedLabelSmoother.of(self.label_smoother, self._shifts_labels)
        if self.args.use_liger_kernel:
            self._apply_kernels(self.model)
        elif any(bound_modules(self.model)):
            logger.warning(
                "`use_liger_kernel` is off, but the model already has kernels, which stay and run; "
                "`liger_trainer.revert_liger_kernel(model)` removes them."
            )
        check_masks_of_ulysses(self)
        check_adapted_experts(self.model)
        freeze_indexers(self.model)
        z_loss_coef = getattr(self.args, "router_z_loss_coef", 0.0)
        check_router_losses(self, z_loss_coef)
        self._z_loss = self._own_callback(RouterZLossCallback) if z_loss_coef else None
        self._announce_kernels()
        self._prepare_cuda_graphs()
        warn_of_tied_adapters(self.model)
        self._check_weights()
        self._prepare_adapter_methods()
        add_tags: Any = getattr(self.model, "add_model_tags", None)
        if add_tags is not None:  # PEFT puts them on the cards of adapters
            add_tags([CARD_TAG])
        self._offloading = step_offloading(self)
        self._known_batches = KnownBatches()
        self._added_parts = added_parts(self)
        self._has_whole_rows = self.get_cp_size() * self.get_sp_size() == 1  # no sequence is split over processes
        self._users_loss, self._has_users_loss = UsersLoss(), defines_in_subclass(self, "_compute_loss")
        if self.is_world_process_zero():
            warn_of_unlabelled_end(self.data_collator)

    def _own_callback(self, cls: type, *args: Any) -> Any:
        """The user's callback of this class, or a new one; put first, so that what it logs reaches every reporter."""
        callbacks: list[TrainerCallback] = self.callback_handler.callbacks
        own = next((callback for callback in callbacks if isinstance(callback, cls)), None)
        if own is not None:
            callbacks.remove(own)
        else:
            own = cls(*args)
        callbacks.insert(0, own)
        return own

    def create_accelerator_and_postprocess(self) -> None:
        """Builds the accelerator; see [`~transformers.Trainer.create_accelerator_and_postprocess`].

        Under FSDP2 it would have what a model returns rounded to 16 bits: losses, and the log-probabilities of which
        DPO compares sums. Here they have the dtype that they have in one process.

        A launch that compiles the model (`accelerate launch --dynamo_backend`) turns `torch_compile` on.
        """
        super().create_accelerator_and_postprocess()
        if self.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
            self.args.torch_compile = True
        plugin: Any = getattr(self.accelerator.state, "fsdp_plugin", None)
        policy = None if plugin is None or plugin.fsdp_version != 2 else plugin.mixed_precision_policy
        if policy is not None and policy.output_dtype == policy.param_dtype:  # nobody else has chosen it
            plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)

    def _apply_kernels(self, model: nn.Module) -> None:
        if self._patched is not None and self._patched() is model:
            return
        strict = getattr(self.args, "strict_kernels", False)
        mapping = kernel_mapping_of(self.args)
        self.kernel_report = apply_kernels(model, mapping, strict, gathers=self._takes_gathered_keys())
        compile_ahead(self, model)
        self._split_sequences(model)
        self._patched = weakref.ref(model)

    def _store_base_in_fp8(self, model: nn.Module) -> None:
        if getattr(self.args, "fp8_base", False):
            self._fp8_base_rows = store_base(self, model)

    def _announce_kernels(self) -> None:
        if self.kernel_report is not None:
            rows = (*self.kernel_report.rows, *self._fp8_base_rows)
            self.kernel_report = dataclasses.replace(self.kernel_report, rows=rows)
        self._show_report.report = self._run_report.kernels = self.kernel_report
        if getattr(self.args, "kernel_report", True):
            self._show_report.show(self.is_world_process_zero())
        else:
            self.callback_handler.callbacks.remove(self._show_report)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Builds the model, at construction and before each training; each has the kernels."""
        model = super().call_model_init(trial)
        # At construction they come later, as for a model that is given: on the device, and with the data.
        if wants_kernels(self.args) and hasattr(self, "train_dataset"):
            self._apply_kernels(model)
        freeze_indexers(model)
        return model

    def _move_model_to_device(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        name = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
        if name is not None and getattr(model, "hf_device_map", None) is None:  # which offloaded weights have
            raise ValueError(
                f"`model` has parameters on the meta device, such as {name!r}, which hold no data to train. Load the "
                "weights (`from_pretrained`), or call `model.to_empty(device=...)` and load a state dict."
            )
        self._store_base_in_fp8(model)  # layer by layer: the device never holds more than one of them in 16 bits
        super()._move_model_to_device(model, *args, **kwargs)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        """The optimizer's class and options; see [`~transformers.Trainer.get_optimizer_cls_and_kwargs`]."""
        if args.optim != LIGER_ADAMW:
            return Trainer.get_optimizer_cls_and_kwargs(args, model)
        rates = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        return LigerAdamW, {**rates, **liger_adamw_options(args)}

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; see [`~transformers.Trainer.train`]."""
        self._operations_per_token = None
        # Without `in_charge` the Trainer would apply the liger-kernel package, or fail because it is not installed.
        try:
            with memory_advice(self), in_charge(self):
                return super().train(*args, **kwargs)
        except BaseException as error:  # Ctrl-C too
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            ended = f"at step {self.state.global_step} by {reason}"
            if self._reports:
                self._run_report.write_again(self.args, self.state, self.model, ended)
            raise
        finally:
            if self._tree is not None:
                self._tree.forget()
                self._tree = None

    def _tree_of(self, model: nn.Module) -> ModuleTree:
        """The modules and parameters of the model that is trained, with its wrappers."""
        if self._tree is None or self._tree.model is not model:
            self._tree = ModuleTree(model)
        return self._tree

    @property
    def _reports(self) -> bool:
        """Whether the user has left us the callback that writes the report."""
        return self._run_report in self.callback_handler.callbacks

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        # The data loader moves its batches to the device; the collator is the last place where ids are on the CPU.
        collator = self.data_collator
        # Only a training takes what is read out again. A loader that dispatches batches can split nothing but tensors.
        streamed = isinstance(dataset, torch.utils.data.IterableDataset)
        dispatched = streamed if self.accelerator.dispatch_batches is None else self.accelerator.dispatch_batches
        trains, model = kwargs.get("is_training", False), self.accelerator.unwrap_model(self.model)
        reads = trains and self.is_in_train and not dispatched and self._has_whole_rows
        if reads and self._graphs is not None:
            if self.args.dataloader_num_workers > 0:  # other processes, which have to see it change
                self._graphs.gains.busy_from.share_memory_()
            self.data_collator = filling_collator(collator, model, self._graphs.gains.busy_from, self.processing_class)
        self.data_collator = checked_collator(self.data_collator, model, reads)
        if trains and self._exchanges_heads and self._ranks is None:  # by DeepSpeed
            self.data_collator = functools.partial(collated_columns, self.data_collator)
        try:
            return super()._get_dataloader(dataset, *args, **kwargs)
        finally:
            self.data_collator = collator

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of one step; their tokens are counted."""
        batches, num_items_in_batch = super().get_batch_samples(*args, **kwargs)
        filled = [take_filled(batch) for batch in batches]
        self._leave_out(sum(filled))
        num_items_in_batch = self._before_step(batches, num_items_in_batch)
        self._known_batches.take(batches)
        self._count([without_filling(*each) for each in zip(batches, filled)] if any(filled) else batches)
        return batches, num_items_in_batch

    def _leave_out(self, tokens: int) -> None:
        """For a trainer that counts tokens itself: so many of those of the next step are only there to fill up."""

    def _before_step(self, batches: Sequence[Any], num_items_in_batch: Any) -> Any:
        """For a trainer that changes the `batches` of a step, in place: returns the number of labels they have then."""
        return num_items_in_batch

    def _prepare_inputs(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        discard_facts(inputs)  # of a batch that did not come through `get_batch_samples`
        take_filled(inputs)
        prepared = super()._prepare_inputs(inputs, *args, **kwargs)
        if self.model.training and not isinstance(inputs, Mapping):  # the policy has just answered these prompts
            self._count([prepared])
        return prepared

    def _count(self, batches: Sequence[Any]) -> None:
        self._throughput.count(batches)
        self._labelled_share.count(batches, self.state.global_step + 1)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Trains on one micro-batch; the guard looks at its loss."""
        ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        self._step_shape = None if ids is None else (ids.shape[0], ids.shape[-1])
        with self._offloading, first_step_checked(self), self._tree_of(model).mode_is_kept():
            loss = super().training_step(model, inputs, *args, **kwargs)
        if self._guard is not None:
            self._guard.observe_loss(loss)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The trainer's own loss; a zero with a gradient if all labels of the step are ignored.

        Training adds two terms: the mean of what PEFT puts into the loss of the model's outputs, and the z-loss of the
        routers if `router_z_loss_coef` is above 0.
        """
        items = num_items_in_batch
        if items is not None:  # the stock Trainer divides 0 by 0 in a step without labels
            items = items.clamp(min=1) if isinstance(items, torch.Tensor) else max(items, 1)
        training = self.model.training and torch.is_grad_enabled()
        if training and self._kept is not None:
            self._let_layers_keep(self._kept)
        step, terms = self._step_of(inputs, items), []
        with contextlib.ExitStack() as around:
            if isinstance(self.label_smoother, FusedLabelSmoother):
                around.enter_context(self.label_smoother.of_batch(model, inputs))
            if callable(self.compute_loss_func):
                around.enter_context(self._users_loss.looked_at(self, items))
            if self._tuner_of_terms is not None and self.model.training:
                without_labels = self.label_smoother is not None
                terms = around.enter_context(added_terms(self._tuner_of_terms, without_labels))
            if return_outputs:  # TRL's trainers warn about it
                around.enter_context(warnings_of_the_caller())
            graphs = self._graphs if training else None
            fills_below = 0 if graphs is None else int(graphs.gains.busy_from)
            around.enter_context(running(replace(step, fills_below=fills_below)))
            if graphs is not None:
                around.enter_context(self._from_graphs(graphs))
            if self._deferred is not None and self.model.training:
                around.enter_context(self._deferred.noted())
                inputs = self._on_host(model, inputs)
            result = super().compute_loss(model, inputs, return_outputs, items)
        if isinstance(result, DeferredNumber):  # that of KTO, where nothing has a gradient
            result = result.as_subclass(torch.Tensor)
        if training and self._kept is not None:
            self._kept.attach(self.model_wrapped)  # again: in DPO and KTO the reference runs after the policy
        if terms:
            result = with_term(result, torch.stack(terms).mean() / loss_divisor(self, items))
        if training and self._z_loss is not None:
            z_loss = mean_z_loss(step.z_losses or ())
            self._z_loss.observe(z_loss)
            args: Any = self.args
            result = with_term(result, args.router_z_loss_coef / loss_divisor(self, items) * z_loss)
        if training and self._added_parts > 1:  # the terms too, which each process has
            result = of_one_rank(result, self._added_parts)
        return result

    def _on_host(self, model: nn.Module, inputs: Any) -> Any:
        """The `inputs` of a loss whose metrics are noted, for a trainer that asks for their values."""
        return inputs

    def _step_of(self, inputs: Any, num_items: torch.Tensor | int | None) -> Step:
        """What is known of a micro-batch before its loss."""
        trains = self.model.training and self.args.use_liger_kernel
        # A loss of the user's may score any tokens, and where sequences are split no process has all labels.
        users = self._has_users_loss or callable(self.compute_loss_func)
        counts = trains and self._counts_labels and self._has_whole_rows and not users
        step = replace(current_step(), labelled=None, labels=None, z_losses=[])
        step = self._known_batches.added_to(step, inputs, counts)
        if not trains:
            return step
        # The derivative of the step's loss by the sum of the label losses of one micro-batch.
        gradient: Any = 1.0 / getattr(self, "current_gradient_accumulation_steps", 1)
        if num_items is not None:
            gradient = process_scale(self, num_items) / num_items
        if self.accelerator.scaler is not None:  # of fp16; it multiplies the loss that `backward` is called on
            gradient = gradient * self.accelerator.scaler.scale(torch.ones((), device=self.args.device))
        return replace(step, expected_gradient=gradient)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        trained, total_norm = self._observed_gradients(model)
        if total_norm is None:
            return super()._clip_grad_norm(model)
        # Clips as `clip_grad_norm_` does, without a second walk over the modules or a second computation of the norms.
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        if len({gradient.dtype for gradient in gradients}) < 2:
            torch.nn.utils.clip_grads_with_norm_(trained, self.args.max_grad_norm, total_norm)
            return total_norm
        # With some weights in fp32, such as routers, torch scales those in bf16 one by one, at a quarter of the speed.
        factor = (self.args.max_grad_norm / (total_norm + 1e-6)).clamp(max=1.0)
        one = torch.ones_like(factor)
        for gradient in gradients:
            if gradient.is_contiguous():
                rescale_(gradient, factor, one)
            else:
                gradient.mul_(factor)
        return total_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None:  # gradients are not clipped
            _, grad_norm = self._observed_gradients(model)
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._tree_of(model).gradients_are_removed()  # after the optimizer's step, by the Trainer
        return norm

    def _observed_gradients(self, model: nn.Module) -> tuple[list[nn.Parameter], torch.Tensor | None]:
        """The parameters with a gradient, at which the guard has looked, and their norm; None if it is not known."""
        # Clipping by a norm that is NaN makes every gradient NaN, so the guard looks before that.
        if self._guard is None or getattr(self.optimizer, "scaler", None) is not None:
            return [], None
        trained = self._tree_of(model).with_gradients()
        norm = self._guard.observe_gradients(trained)
        return [*trained.values()], norm if self.accelerator.distributed_type in WHOLE_GRADIENTS else None

    def floating_point_ops(self, inputs: Any) -> int:
        """Those of a micro-batch; see [`~transformers.Trainer.floating_point_ops`].

        The parameters are counted at the first micro-batch of a training alone: to count them walks over all modules.
        """
        name = getattr(self.model, "main_input_name", "input_ids")
        tokens = inputs.get(name) if isinstance(inputs, Mapping) else None
        if not isinstance(tokens, torch.Tensor) or not tokens.numel():
            return super().floating_point_ops(inputs)
        if self._operations_per_token is None:
            self._operations_per_token = super().floating_point_ops(inputs) // tokens.numel()
        return self._operations_per_token * tokens.numel()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs; see [`~transformers.Trainer.log`]."""
        super().log(logs, *args, **kwargs)
        loss = logs.get("loss")
        not_finite = isinstance(loss, float) and not math.isfinite(loss)
        if not_finite and self.is_in_train and available(LOGGED_LOSS):
            # The Trainer resets its sum of losses by subtracting it from itself, and NaN - NaN is NaN.
            self._tr_loss.zero_()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model; see [`~transformers.Trainer.save_model`].

        Raises:
            NonFiniteError: before anything is written, if a parameter is not finite; not with `non_finite="off"`.
        """
        if self._guard is not None:
            # All processes take part in saving a checkpoint or a split model. A whole model is the same on each.
            split = self.is_fsdp_enabled or self.is_deepspeed_enabled or self.is_distributed_loading_by_transformers
            self._guard.check_before_save(self.model, self.args, self.state, alike=self._saving or split)
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            write_base_quantization(self.model, Path(str(output_dir or self.args.output_dir)))
        if self._reports and not _internal_call and output_dir in (None, self.args.output_dir):
            self._run_report.write(self.args, self.state, self.model)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes a draft of a model card; see [`~transformers.Trainer.create_model_card`]. Its tags have ours too."""
        given = inspect.signature(super().create_model_card).bind(*args, **kwargs)
        folder = Path(str(self.args.output_dir)).resolve()
        given.arguments["model_name"] = given.arguments.get("model_name") or folder.name
        tags = given.arguments.get("tags") or []
        given.arguments["tags"] = [*([tags] if isinstance(tags, str) else tags), CARD_TAG]
        super().create_model_card(*given.args, **given.kwargs)
