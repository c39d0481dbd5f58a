"""Liger's helpers that frameworks import: what is installed, which device there is, and a few functions.

Also the loss of a causal language model from its hidden states: `liger_kernel.transformers.model.loss_utils`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from liger_trainer.functional import CrossEntropyOutput, log_probs, tiled_mlp
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX
from liger_trainer.liger.functional import liger_fused_linear_cross_entropy

PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None


def is_peft_available() -> bool:
    """Whether PEFT is installed."""
    return PEFT_AVAILABLE


def is_transformers_available() -> bool:
    """Whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def is_npu_available() -> bool:
    """Whether there is an Ascend NPU."""
    return infer_device() == "npu"


def is_hip() -> bool:
    """Whether torch is built for AMD GPUs."""
    return torch.version.hip is not None


def infer_device() -> str:
    """The type of the accelerator, `"cpu"` without one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


def infer_comm_backend() -> str:
    """The backend of torch.distributed for that device."""
    return torch.distributed.get_default_backend_for_device(infer_device())


def get_total_gpu_memory() -> int:
    """The memory of the first accelerator in GiB, rounded down.

    Raises:
        RuntimeError: if there is none.
    """
    device = infer_device()
    if device == "cpu":
        raise RuntimeError("There is no accelerator whose memory could be told.")
    return int(torch.get_device_module(device).get_device_properties(0).total_memory) // 2**30


def compare_version(package: str, operator: Callable[[Any, Any], bool], target: str) -> bool:
    """Whether `package` is installed and its version is, as `operator` says, to `target`."""
    from packaging.version import Version

    try:
        module = importlib.import_module(package)
    except ImportError:
        return False
    return operator(Version(module.__version__), Version(target))


def transformers_version_dispatch(
    required_version: str,
    before_fn: Callable[..., Any],
    after_fn: Callable[..., Any],
    before_args: Sequence[Any] = (),
    after_args: Sequence[Any] = (),
    before_kwargs: Mapping[str, Any] | None = None,
    after_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """The result of `before_fn` where transformers is older than `required_version`, else of `after_fn`."""
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__) < Version(required_version):
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))


def ensure_contiguous(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function of a context and tensors, which then gets contiguous ones."""

    @functools.wraps(fn)
    def wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        def contiguous(value: Any) -> Any:
            return value.contiguous() if isinstance(value, torch.Tensor) else value

        return fn(ctx, *map(contiguous, args), **{name: contiguous(value) for name, value in kwargs.items()})

    return wrapper


def fused_selective_log_softmax(
    logits: torch.Tensor, input_ids: torch.Tensor, temperature: float = 0.9, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The log-probability of each token of a completion; see [`liger_trainer.functional.log_probs`].

    Args:
        logits: (batch, tokens + 1, vocab); those of the last position are for the token after the completion.
        input_ids: (batch, at least tokens), which end with the completion.
        temperature: Divides the logits.
        mask: As `input_ids`; where it is 0, so is the result. None: nowhere.

    Returns:
        float32, (batch, tokens). Without a gradient, as in Liger.
    """
    tokens = logits.shape[1] - 1
    target = input_ids[:, input_ids.shape[1] - tokens :]
    if mask is not None:
        target = torch.where(mask[:, mask.shape[1] - tokens :] != 0, target, IGNORE_INDEX)
    with torch.no_grad():
        result = log_probs(logits[:, :-1], target, temperature=temperature)
    assert isinstance(result, torch.Tensor)
    return result


def apply_tiled_mlp(
    fn: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor],
    mlp_module: torch.nn.Module,
    x: torch.Tensor,
    num_shards: int | None = None,
    compute_params: Sequence[torch.nn.Parameter] | None = None,
) -> torch.Tensor:
    """`fn(mlp_module, x)` in tiles of the tokens; see [`liger_trainer.functional.tiled_mlp`].

    `num_shards` is by default, as in Liger, the tokens divided by the width, rounded up. `compute_params` has no
    effect: gradients are summed before they reach a parameter.
    """
    shards = math.ceil(x.shape[-2] / x.shape[-1]) if num_shards is None else num_shards
    return tiled_mlp(fn, mlp_module, x, max(1, shards))


class _FSDPForwardRedirection:
    """Calls a method of a part of an FSDP1 module with the parameters of the whole gathered."""

    def __call__(self, wrapper_module: torch.nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`method(*args, **kwargs)`, run in place of the forward of what `wrapper_module` wraps."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        if not isinstance(wrapper_module, FullyShardedDataParallel):
            raise TypeError(f"`wrapper_module` is a {type(wrapper_module).__name__}, not a FullyShardedDataParallel.")
        inner = wrapper_module.module
        original = inner.forward

        def redirected(*inner_args: Any, **inner_kwargs: Any) -> Any:
            inner.forward = original  # `method` may call it
            return method(*inner_args, **inner_kwargs)

        inner.forward = redirected
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            inner.forward = original


def unpack_cross_entropy_result(result: Any) -> tuple[torch.Tensor, Any, Any, Any]:
    """Loss, z-loss, token accuracy and predicted tokens of a loss, a `CrossEntropyOutput` or a tuple; else None."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    values = [*result] if isinstance(result, tuple) else [result]
    loss, z_loss, accuracy, predicted = (*values, None, None, None)[:4]
    return loss, z_loss, accuracy, predicted


def fixed_fused_linear_cross_entropy(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target: torch.Tensor,
    num_items_in_batch: int | torch.Tensor | None = None,
    ignore_index: int = -100,
    final_logit_softcapping: float | None = None,
    accum_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> torch.Tensor | CrossEntropyOutput:
    """The mean loss over the tokens that count, or their sum divided by `num_items_in_batch`.

    Args:
        hidden_states: (tokens, hidden).
        lm_head_weight: (vocab, hidden).
        target: (tokens,), shifted already.
        num_items_in_batch: Divides the sum; None for the mean.
        ignore_index: Target that does not count.
        final_logit_softcapping: Soft-cap of the logits.
        accum_dtype: No effect.
        return_token_accuracy: Return a `CrossEntropyOutput` with the share of right tokens.
        return_predicted_tokens: And with every token's most likely one.
        kwargs: More of [`liger_trainer.liger.functional.liger_fused_linear_cross_entropy`].
    """
    result = liger_fused_linear_cross_entropy(
        hidden_states,
        lm_head_weight,
        target,
        reduction="mean" if num_items_in_batch is None else "sum",
        ignore_index=ignore_index,
        softcap=final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **kwargs,
    )
    loss, _, accuracy, predicted = unpack_cross_entropy_result(result)
    if num_items_in_batch is not None:
        loss = loss / num_items_in_batch
    if return_token_accuracy or return_predicted_tokens:
        return CrossEntropyOutput(loss, token_accuracy=accuracy, predicted_tokens=predicted)
    return loss


def LigerForCausalLMLoss(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    labels: torch.Tensor | None,
    hidden_size: int,
    num_items_in_batch: int | torch.Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    final_logit_softcapping: float | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> torch.Tensor | CrossEntropyOutput:
    """The loss of hidden states whose logits are never built, each against the next label.

    It is `fixed_fused_linear_cross_entropy` of `hidden_states`, (batch, tokens, hidden), whose width is `hidden_size`,
    against `labels`, (batch, tokens), or in their place `shift_labels`, the label of each position. Keywords that
    `liger_fused_linear_cross_entropy` does not take are dropped, as in Liger: models pass all their keywords.

    Returns:
        The float32 loss.
    """
    known = inspect.signature(liger_fused_linear_cross_entropy).parameters
    if shift_labels is None:
        if labels is None:
            raise ValueError("`labels` and `shift_labels` are both None; one of them must be given.")
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch,
        ignore_index,
        final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **{name: value for name, value in kwargs.items() if name in known},
    )
