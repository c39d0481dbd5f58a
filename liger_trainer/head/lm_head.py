"""The language-model head: which module it is, one call of it, and its weight when the loss needs it.

What deferred logits hold is here too: the hidden states, the call, and the operations on the logits since.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.compat.deepspeed import PARTITIONED_HEAD
from liger_trainer.compat.peft import HEAD_COPIES, TIED_ADAPTERS
from liger_trainer.compat.private import available, require
from liger_trainer.compat.torch import CHANGED_IN_PLACE, FSDP_HEAD
from liger_trainer.head.recorded import RecordedChain
from liger_trainer.kernels.runtime import is_dtensor

require(CHANGED_IN_PLACE)

RECORDABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that deferred logits may have."""

_RECORDABLE = frozenset(RECORDABLE_DTYPES)
PLAIN = (torch.Tensor, nn.Parameter)


@dataclasses.dataclass(eq=False)
class HeadCall:
    """One call of the head whose logits are deferred.

    Args:
        head: The module; sharded parameters are read from it again when they are needed.
        weight: The weight during the call, `(V, H)`.
        bias: Likewise, `(V,)` or None.
        dtype: The dtype of the product: autocast's if it was on, otherwise that of the weight.
        fused: Whether cross entropy runs fused with the head, or on logits that are built for it.
        logits_memory: Bytes the fused operator may spend on a chunk of logits.
    """

    head: nn.Linear
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    fused: bool
    logits_memory: int

    def __post_init__(self) -> None:
        self.has_loss = False  # whether a loss with a gradient was computed without the logits
        self.parameters = (self.weight, self.bias)  # which get the gradients
        self.vocab_size: int = getattr(self.weight, "ds_shape", self.weight.shape)[0]  # ds_shape: split by ZeRO-3
        self.sharded = bool(sharding_of(self.head))  # then `weight` and `bias` are gathered for the call
        self.watched = () if self.sharded else self.parameters  # which must not change until the backward
        self.versions = [*map(version_of, self.watched)]

    def local_product(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits `(..., V)` of `hidden` `(..., H)`, as a function of `parameters`."""
        return linear(hidden, self.weight, self.bias, self.dtype)

    def gathered_product(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """As `local_product`, with the current weight; a sharded one is gathered once for all uses.

        The result of all uses together has to pass [`through_owner`].
        """
        weight, bias = self.gathered()
        return lambda hidden: linear(hidden, weight, bias, self.dtype)

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The whole weight `(V, H)` and bias `(V,)`, connected to the gradients of their parameters.

        Raises:
            RuntimeError: as `whole_parameter`.
        """
        if not self.sharded:  # also those of a `torch.func.functional_call`, which the module no longer has
            return self.weight, self.bias
        head = self.head
        if sharding_of(head) != "ZeRO-3":
            bias = None if self.bias is None else whole_parameter(head.bias, self.bias)
            return whole_parameter(head.weight, self.weight), bias
        import deepspeed

        # To read a parameter in a forward tells ZeRO-3 to gather it for the backward of the module that runs, too.
        _ = head.weight, head.bias
        # Parameters that are whole already are in use by ZeRO-3; they must not be gathered and released again.
        parameters: list[Any] = list(head.parameters())
        absent = [parameter for parameter in parameters if parameter.ds_status.name != "AVAILABLE"]
        with deepspeed.zero.GatheredParameters(absent, enabled=bool(absent)):
            # Copies: the parameters are emptied when the context ends, and the backward may still need them.
            return head.weight.clone(), None if head.bias is None else head.bias.clone()


@dataclasses.dataclass(eq=False, slots=True)
class Recorded:
    """The value of a `DeferredLogits`, ``chain(head(hidden))``; operations in place replace the chain.

    Args:
        call: The call of the head, a `HeadCall` or the `ModuleCall` of a head that is no plain linear layer.
        hidden: `(..., H)`.
        chain: The operations on the logits since.
        version: How often `hidden` had been changed in place at the call; None where torch does not count.
    """

    call: Any
    hidden: torch.Tensor
    chain: RecordedChain
    version: int | None

    def check(self) -> None:
        """Raises RuntimeError if hidden states or parameters have been changed in place since the call."""
        changed = "the hidden states" if version_of(self.hidden) != self.version else ""
        same = [*map(version_of, self.call.watched)] == self.call.versions
        changed = changed if same else "the head's parameters"
        if changed:
            raise RuntimeError(
                f"The logits of a training forward are needed only now, but {changed} have since been changed in place "
                "(by an optimizer step, say), so they would be other logits. Read what you need of `outputs.logits` "
                "before the change, or train with `liger_kernel_config={'linear_cross_entropy': false, "
                "'cross_entropy': false}`, which builds them in the forward."
            )


def version_of(tensor: torch.Tensor | None) -> int | None:
    """How often `tensor` has been changed in place; None for inference tensors, where torch does not count."""
    return None if tensor is None or tensor.is_inference() else tensor._version


def linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """``nn.Linear``'s product in `dtype`, with autocast off."""
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def product_dtype(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, in_fp32: bool
) -> torch.dtype | None:
    """The dtype in which ``nn.Linear`` multiplies `hidden` `(..., H)` and `weight` `(V, H)`; None where it raises."""
    if hidden.is_meta or weight.is_meta or (bias is not None and bias.is_meta):
        return None
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1] or hidden.device != weight.device:
        return None
    dtype = weight.dtype
    if in_fp32:
        dtype = torch.float32
    elif torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    elif hidden.dtype != dtype or (bias is not None and bias.dtype != dtype):
        return None
    return dtype if {dtype, hidden.dtype, weight.dtype} <= _RECORDABLE else None


def sharding_of(head: nn.Module) -> str:
    """What shards the parameters outside the model's forward and backward, "FSDP" or "ZeRO-3"; "" if nothing does."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _check_fsdp()
    if getattr(head, "_is_fsdp_managed_module", False):
        return "FSDP"
    for parameter in head.parameters():
        if hasattr(parameter, "ds_id"):
            _check_deepspeed()
            return "ZeRO-3"
    return ""


@functools.cache
def _check_fsdp() -> None:
    require(FSDP_HEAD)


@functools.cache
def _check_deepspeed() -> None:
    require(PARTITIONED_HEAD)


def through_owner(head: nn.Module, result: torch.Tensor) -> torch.Tensor:
    """`result`, computed with [`HeadCall.gathered`], such that ZeRO-3 gathers the weight again for its backward.

    ZeRO-3 gathers a module's parameters when a gradient reaches the module's output, as the gradient of a freed
    parameter could not be accumulated. Here `result` takes the place of that output.
    """
    gathering: Any = getattr(head, "pre_bwd_fn", None)
    if gathering is None or sharding_of(head) != "ZeRO-3" or not result.requires_grad:
        return result
    return gathering.apply(result)


def is_split(head: nn.Module) -> bool:
    """Whether a parameter of `head` is still a DTensor inside its forward, where FSDP has gathered its own."""
    return any(map(is_dtensor, head.parameters()))


def whole_parameter(parameter: Any, in_forward: torch.Tensor) -> torch.Tensor:
    """`parameter`, gathered if FSDP2 has sharded it again, and connected to its gradient.

    Args:
        parameter: The parameter that the module has now.
        in_forward: The one that it had in its forward.

    Raises:
        RuntimeError: if it is a shard of FSDP1, which gathers it in the model's forward only.
    """
    if parameter.shape != in_forward.shape:
        raise RuntimeError(
            "The logits are needed outside the model's forward, where a parameter of the head is a shard of shape "
            f"{tuple(parameter.shape)}. Use FSDP version 2, read `logits` inside the forward, or set "
            "`liger_kernel_config={'linear_cross_entropy': false, 'cross_entropy': false}`."
        )
    if type(parameter) in PLAIN:
        return parameter
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(parameter, DTensor):
        return parameter
    # A head in an FSDP2 unit of its own is sharded outside that unit's forward. Every rank has the gradient of the
    # whole weight for its own batch, so each shard gets the mean; `full_tensor` alone would drop the other ranks' part.
    return parameter.full_tensor(grad_placements=[Partial("avg")] * parameter.device_mesh.ndim)


def without_adapters(model: nn.Module) -> nn.Module:
    """The model inside a wrapper of PEFT or Lightning Fabric, whose forward is the model's own; any other itself."""
    for fabric in ("lightning.fabric", "lightning_fabric"):  # one library in two packages
        if fabric in sys.modules and sys.modules[fabric].is_wrapped(model):
            model = model.module  # type: ignore[assignment]
    if "peft" in sys.modules:
        from peft import PeftModel

        if isinstance(model, PeftModel):
            return model.get_base_model()
    return model


def adapts_tied_weight(model: nn.Module) -> bool:
    """Whether head and embedding of `model` share a weight, and PEFT's merge of the adapters on them changes too much.

    True for an adapter on one of the two, and for LoRA on both; not for rows that both train as one
    (`trainable_token_indices`).
    """
    if "peft" not in sys.modules or not available(TIED_ADAPTERS):
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    base: Any = without_adapters(model)
    try:
        ends = [trained_rows_of(end) for end in (base.get_output_embeddings(), base.get_input_embeddings())]
    except (AttributeError, NotImplementedError):
        return False
    if ends[0] is not None and getattr(ends[0], "tied_adapter", None) is ends[1]:
        return False
    weights = [getattr(getattr(end, "base_layer", end), "weight", None) for end in ends]
    return weights[0] is not None and weights[0] is weights[1] and any(isinstance(end, BaseTunerLayer) for end in ends)


def trained_rows_of(end: Any) -> Any:
    """PEFT's layer in its wrapper of an embedding or a head with `trainable_token_indices`; any other `end` itself."""
    return getattr(end, "token_adapter", end)


def find_lm_heads(model: nn.Module) -> tuple[list[Any], str]:
    """The modules that compute `model`'s logits.

    Args:
        model: A transformers model, a PEFT model around one, or any model with an `lm_head`.

    Returns:
        The modules to patch (several where PEFT keeps copies of the head) and an empty string; or an empty list and why
        the head is left alone: its own forward then builds the logits, and the model trains as before.
    """
    head = output_embedding(model)
    if head is None:
        return [], "the model has no output embedding"
    candidates: list[Any] = [_without_idle_adapter(head)]
    if "peft" in sys.modules:
        require(HEAD_COPIES)
        from peft.utils.other import ModulesToSaveWrapper

        if isinstance(head, ModulesToSaveWrapper):
            candidates = [head.original_module, *head.modules_to_save.values()]
    for candidate in candidates:
        reason = "" if maps_tokens(candidate) else f"{type(candidate).__name__} is not known to be linear"
        reason = _wrong_weight(candidate) if is_plain_linear(candidate) else reason
        if reason:
            return [], f"{reason}; it runs as it is, with full logits"
    return candidates, ""


def output_embedding(model: Any) -> Any:
    """The module that computes the logits; None if there is none.

    It is what `get_output_embeddings` gives or, in a model without that method, such as LitGPT's, `lm_head`.
    """
    get_output_embeddings = getattr(model, "get_output_embeddings", None)
    if callable(get_output_embeddings):
        return get_output_embeddings()
    head = getattr(model, "lm_head", None)
    return head if isinstance(head, nn.Module) else None


def _without_idle_adapter(head: nn.Module) -> nn.Module:
    """The linear layer inside LitGPT's `LoRALinear` without adapters (rank 0); any other `head` itself."""
    inner = getattr(head, "linear", None)
    return inner if isinstance(inner, nn.Linear) and not dict(head.named_parameters(recurse=False)) else head


def is_plain_linear(head: nn.Module) -> bool:
    """Whether `head` computes ``hidden @ weight.T + bias`` of an ordinary weight and bias."""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    return type(head.weight) is nn.Parameter or is_dtensor(head.weight)


def maps_tokens(head: nn.Module) -> bool:
    """Whether `head` maps each hidden state on its own: a linear layer of any kind, or an adapter on one."""
    is_linear = isinstance(head, nn.Linear) or (hasattr(head, "in_features") and hasattr(head, "out_features"))
    own = {name for name, _ in head.named_parameters(recurse=False)}
    of_litgpt = isinstance(getattr(head, "linear", None), nn.Linear) and own == {"lora_A", "lora_B"}
    return is_linear or of_litgpt or type(head).__module__.startswith("peft.")


def _wrong_weight(head: nn.Linear) -> str:
    dtype = head.weight.dtype
    return "" if dtype in RECORDABLE_DTYPES else f"the head's weight is of {dtype}; it needs fp16, bf16 or fp32"
