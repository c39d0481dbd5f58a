"""What every trainer over TRL adds: our fused LM head (`fused_forward.py`), and names in its model card.

The head is put where a trainer of TRL installs its own in its `__init__`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from liger_trainer.attention.interface import has_our_attention
from liger_trainer.compat.private import require
from liger_trainer.compat.trl import EQUAL_BATCHES, GENERATION_COUNTERS, LOGGED_SINCE, TRAINER_NAME
from liger_trainer.configs.caller_warnings import hidden_warnings, warnings_of_the_caller
from liger_trainer.configs.flags import kernel_config_of, retained_bytes_of
from liger_trainer.configs.loss_types import check_loss_type
from liger_trainer.configs.trl_configs import PackingFlags, SharingFlags
from liger_trainer.head.forward import CAN_DEFER_COMPILED, uncompiled
from liger_trainer.head.lm_head import without_adapters
from liger_trainer.kernels.attention.plan import Ranks
from liger_trainer.packing.packing import Packing
from liger_trainer.patching.apply import apply_kernels
from liger_trainer.patching.as_written import is_ours
from liger_trainer.patching.head import patch_head
from liger_trainer.patching.model_forward import forward_layers, is_patched_model, native_forward
from liger_trainer.patching.report import KernelReportRow
from liger_trainer.trainers.activation_memory import check_offloading, check_selective
from liger_trainer.trainers.base import LigerTrainerMixin, extended_config, own_arguments, wants_kernels
from liger_trainer.trainers.checkpoints.converted import split_models_resume
from liger_trainer.trainers.checks import packed_base
from liger_trainer.trainers.checks.trl_arguments import check_reference, check_rows
from liger_trainer.trainers.choose_packing import PADDING_FREE, check_packing, choose_packing, packing_of_reference
from liger_trainer.trainers.exact_sync import keep_base_bits
from liger_trainer.trainers.fused_forward import StatisticsOptions, fused_forward

_SWAPPED: tuple[str, ...] = ("add_fused_lm_head", "BaseTunerLayer")
_swapping = threading.RLock()
_BUILT = "initial_model"  # the folder of a model that a recipe has built from its configuration
_fused_over: weakref.WeakKeyDictionary[Callable, tuple[Callable, Callable]] = weakref.WeakKeyDictionary()


class _AdapterGuard(type):
    """The metaclass of a class that answers ``isinstance`` in place of PEFT's `BaseTunerLayer`.

    TRL uses that class to refuse an adapter on the head, which our head can train. So, while a thread builds a Liger
    trainer, nothing is an instance in that thread; other threads get PEFT's answer.
    """

    owner: int
    theirs: type | tuple[()]

    def __instancecheck__(cls, instance: Any) -> bool:
        return threading.get_ident() != cls.owner and isinstance(instance, cls.theirs)


@contextlib.contextmanager
def own_fused_head(module: ModuleType, add_fused_lm_head: Callable[..., None]) -> Iterator[None]:
    """While this thread builds a trainer of TRL's `module`, that trainer installs our head instead of TRL's.

    Args:
        module: Such as `trl.trainer.sft_trainer`.
        add_fused_lm_head: Called in place of TRL's function of that name; other threads keep TRL's.
    """
    owner = threading.get_ident()
    names: dict[str, Any] = vars(module)
    with _swapping:
        replaced: dict[str, Any] = {name: names[name] for name in _SWAPPED if name in names}

        def dispatch(*args: Any, **kwargs: Any) -> None:
            ours = threading.get_ident() == owner
            (add_fused_lm_head if ours else replaced["add_fused_lm_head"])(*args, **kwargs)

        guard = _AdapterGuard("BaseTunerLayer", (), {"owner": owner, "theirs": replaced.get("BaseTunerLayer", ())})
        own: dict[str, Any] = {"add_fused_lm_head": dispatch, "BaseTunerLayer": guard}
        names.update((name, own[name]) for name in replaced)
        try:
            yield
        finally:
            names.update(replaced)


def install_fused_forward(
    model: nn.Module, options: StatisticsOptions, packing: Packing | None = None, ranks: Ranks | None = None
) -> None:
    """Gives `model` a forward that understands `fused_lm_head=True`; any other call runs the forward that it had.

    Args:
        model: A causal language model (not its PEFT wrapper), with the kernels applied.
        options: Statistics that the trainer asks of the head.
        packing: How batches are packed, for a model that is proved for it; None leaves them padded.
        ranks: The processes that compute parts of the same batches, for a model with our attention; None for whole
            ones.
    """
    inner, native = _forwards_of(model)
    run_uncompiled = None
    # The forward of another library builds its logits, compiled or not.
    if CAN_DEFER_COMPILED and (native is type(model).forward or is_ours(native)):
        run_uncompiled = torch.compiler.disable(fused_forward(inner, uncompiled(native), options), recursive=False)
    # `generate` and the Trainer look at the signature, the patching at what is inside.
    forward = functools.wraps(inner)(fused_forward(inner, native, options, packing, run_uncompiled, ranks))
    _fused_over[forward] = inner, native
    model.forward = types.MethodType(forward, model)


def _forwards_of(model: nn.Module) -> tuple[Callable, Callable]:
    """The forward for a call without the flag, and the model's own forward for one with it.

    Both take the model as their first argument.
    """
    for layer in forward_layers(model):
        if layer in _fused_over:  # installed by an earlier trainer of this model; accelerate may have wrapped it
            return _fused_over[layer]
    inner = getattr(model.forward, "__func__", None)
    if inner is None:
        raise ValueError(
            f"The forward of {type(model).__name__} was replaced by {model.forward!r}, which is not a method; the "
            "fused head cannot wrap it. Give the trainer the model as it was loaded."
        )
    # Where our head took the model's forward, the fused forward tells the head about the call itself.
    return inner, native_forward(model) if is_patched_model(model) else inner


require(TRAINER_NAME)
require(GENERATION_COUNTERS)  # of `checkpoints/run_state.py`
require(LOGGED_SINCE)

# TRL uses older names of transformers' checkpointing arguments, which users cannot avoid.
_older_names = functools.partial(hidden_warnings, "`(is_)?gradient_checkpointing", FutureWarning)


def wants_fused_head(args: TrainingArguments) -> bool:
    """Whether a Liger trainer with these arguments uses the fused head."""
    return wants_kernels(args) and kernel_config_of(args).linear_cross_entropy


class LigerTRLMixin(LigerTrainerMixin):
    """Comes before a TRL trainer in the bases of a class, which says where that trainer comes from.

    Attributes:
        trl_module: TRL's module of the trainer, whose `add_fused_lm_head` is ours during the construction; None if TRL
            has no fused head there.
        config_class: The Liger configuration, built if `args` is None.
    """

    trl_module: ModuleType | None = None
    _shifts_labels = True
    _has_own_loss = True
    _takes_parts_of_sequences = False  # only TRL's SFT loss takes `shift_labels`
    config_class: type[TrainingArguments]
    _name: str  # TRL's, such as "DPO"
    _tp_size: int  # that of DPO and KTO, which divides counts by it: the number of processes with equal batches
    _statistics: StatisticsOptions | None = None  # what TRL asks of the policy's head; None if the head is TRL's
    _packing: Packing | None = None  # how the policy's batches are packed; None if they stay padded
    _packing_rows: Sequence[KernelReportRow] = ()

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(model, *args, **kwargs)
        config = given.arguments["args"] = own_arguments(self._configured(given.arguments.get("args"), model))
        check_loss_type(config)
        check_offloading(config)  # TRL would raise an AttributeError
        check_selective(config)  # TRL takes it out of the arguments
        self._check_given(given, config)
        head = self._own_fused_head(config)
        resume, warned = split_models_resume(config, model), warnings_of_the_caller()
        packed = packed_base.loading(config, model, given.arguments.get("peft_config"))
        with head, self._hidden_from_trl(config), resume, _older_names(), warned, packed:
            super().__init__(*given.args, **given.kwargs)
        if self._forward_ranks is not None and hasattr(self, "_tp_size"):
            require(EQUAL_BATCHES)
            self._tp_size *= self._forward_ranks.ranks
        check_rows(self.train_dataset)
        keep_base_bits(self)
        if self.args.fp16:
            _widen_adapters(self.model)
        self._finish_init()

    def _check_given(self, given: inspect.BoundArguments, config: TrainingArguments) -> None:
        """Checks the arguments of TRL's `__init__` before it is called."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; see [`~transformers.Trainer.train`]."""
        with _older_names():
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluates; see [`~transformers.Trainer.evaluate`]."""
        with _older_names():
            return super().evaluate(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes a draft of a model card; see [`~transformers.Trainer.create_model_card`]. Its tags have ours too.

        Where TRL's says `None` in the place of a model without a name on the Hub, it gets the name of the folder.
        """
        super().create_model_card(*args, **kwargs)
        if not self.is_world_process_zero():
            return
        folder = Path(str(self.args.output_dir)).resolve()
        base = Path(getattr(getattr(self.model, "config", None), "name_or_path", None) or "").name
        origins = {"": "trained from a model without a name", _BUILT: "trained from scratch"}
        origin = origins.get(base, f"a fine-tuned version of `{base}`")
        text = (folder / "README.md").read_text(encoding="utf-8")
        text = text.replace("a fine-tuned version of [None](https://huggingface.co/None)", origin)
        (folder / "README.md").write_text(text.replace('model="None"', f'model="{folder.name}"'), encoding="utf-8")

    def _own_fused_head(self, config: TrainingArguments) -> contextlib.AbstractContextManager[None]:
        """The context for TRL's `__init__`: ours in the place of TRL's fused head, if wanted and if TRL has one."""
        if self.trl_module is None or not wants_fused_head(config):
            return contextlib.nullcontext()
        return own_fused_head(self.trl_module, self._add_fused_lm_head)

    @classmethod
    def _configured(cls, args: TrainingArguments | None, model: Any) -> Any:
        """`args`, or the configuration that TRL's trainer would build for itself."""
        if args is None:
            name = model if isinstance(model, str) else model.config.name_or_path or type(model).__name__
            return cls.config_class(f"{name.rstrip('/').split('/')[-1]}-{cls._name}")
        theirs = extended_config(cls.config_class)
        if not isinstance(args, theirs):
            raise TypeError(
                f"`args` is a {type(args).__name__}; {cls.__name__} takes a {cls.config_class.__name__}, or TRL's "
                f"{theirs.__name__}."
            )
        return args

    def _add_fused_lm_head(
        self,
        model: nn.Module,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        """Replaces TRL's function of that name, which its `__init__` calls for the policy and for a reference model."""
        is_policy = without_adapters(self.model) is model
        config = kernel_config_of(self.args)
        options = StatisticsOptions(outputs, temperature, self._weighs_labels_alike(), retained_bytes_of(self.args))
        if cast_lm_head_to_fp32:
            _check_whole_head(model)
            _release_fp32_head(self.model if is_policy else model, model)
        if is_policy:
            self._statistics = options
            self._apply_kernels(self.model)
            self._choose_packing()
            packing, ranks = self._packing, self._forward_ranks
        else:  # a reference model, which must compute log-probabilities as the policy does
            check_reference(self.model, model, self.processing_class)
            apply_kernels(model, config, gathers=self._takes_gathered_keys())
            base: Any = model
            ranks = self._forward_ranks if has_our_attention(base) else None
            packing, self._packing_rows = packing_of_reference(model, self._packing, self._packing_rows)
        if cast_lm_head_to_fp32:
            patch_head(model, fused=True, logits_memory=int(config.logits_memory), in_fp32=True)
        install_fused_forward(model, options, packing, ranks)

    @classmethod
    @contextlib.contextmanager
    def _hidden_from_trl(cls, config: Any) -> Iterator[None]:
        """Hides flags of which TRL would warn: `use_liger_kernel`, for want of liger-kernel, and our `padding_free`."""
        ours = {"use_liger_kernel": wants_kernels(config)}
        packs = issubclass(cls.config_class, PackingFlags) and wants_fused_head(config)
        if packs and getattr(config, PADDING_FREE, None):
            ours[PADDING_FREE], config.padding_free = True, None
        config.use_liger_kernel = False  # with which TRL would also switch its fused head off
        try:
            yield
        finally:
            vars(config).update(ours)

    def _choose_packing(self) -> None:
        if issubclass(self.config_class, PackingFlags):
            may_share = issubclass(self.config_class, SharingFlags)
            self._packing, self._packing_rows = choose_packing(self.args, self.model, may_share, self._forward_ranks)

    def _announce_kernels(self) -> None:
        packing = self._packing
        if packing is not None:
            self._throughput.executed_share = lambda: packing.executed_share
            self._throughput.shared_levels = lambda: packing.levels
        check_packing(self.args, self._packing_rows, getattr(self, "aux_loss_enabled", False))
        if self.kernel_report is not None:
            rows = (*self.kernel_report.rows, *self._packing_rows)
            self.kernel_report = dataclasses.replace(self.kernel_report, rows=rows)
        super()._announce_kernels()

    def _weighs_labels_alike(self) -> bool:
        """Whether the gradient of the loss with respect to the log-probabilities is the same for all labels."""
        return False


def _widen_adapters(model: Any) -> None:
    """Makes the adapters of a quantised base fp32: TRL has made them bf16, which fp16's scaler does not take on CUDA.

    torch's scaler fails on their gradients in the first step (pytorch/pytorch#127176).
    """
    for parameter in model.parameters() if getattr(model, "is_quantized", False) else ():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()


def _check_whole_head(model: Any) -> None:
    """Raises ValueError for a head in fp32 that tensor parallelism splits, since TRL replaces the head's forward."""
    size = getattr(model, "tp_size", None) or 1
    if size > 1:
        raise ValueError(
            f"`cast_lm_head_to_fp32` is true and the model is split by tensor parallelism (`tp_size` is {size}), whose "
            "forward of the head TRL replaces. Set `cast_lm_head_to_fp32=False`: the log-probabilities are computed in "
            "fp32 from the head's products either way."
        )


def _release_fp32_head(model: Any, base: Any) -> None:
    """Removes the forward that TRL has given to a head in fp32; ours computes the same, and supports adapters.

    If `model` is PEFT's wrapper of `base`, TRL has registered the head on the wrapper as well.
    """
    base.lm_head.__dict__.pop("forward", None)
    if model is not base:
        model._modules.pop("lm_head", None)
