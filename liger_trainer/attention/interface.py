"""Our functions in transformers' registries, of attention and of masks: what runs in a forward, and their name.

`masks.py` says which masks have a plan, and makes it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from liger_trainer.attention.config_names import NAME
from liger_trainer.attention.masks import (
    MaskPart,
    Pattern,
    SlicedPlan,
    composed_pattern,
    of_selected,
    packed_documents,
    plan_of,
    read_plan,
    sliced,
    traced_plan,
)
from liger_trainer.compat.private import available, require
from liger_trainer.compat.torch import COMPILED_NAMES
from liger_trainer.compat.transformers import DEFAULT_ATTENTION, PACKED_POSITIONS, RECOGNISED_MASKS
from liger_trainer.head.lm_head import version_of
from liger_trainer.head.step import Step, current_step
from liger_trainer.kernels.attention.attention import FLASH_HEAD_DIM, attention
from liger_trainer.kernels.attention.plan import AttentionPlan, bits_of, dense
from liger_trainer.kernels.documents import FIRST
from liger_trainer.kernels.runtime import TRITON_DEVICES, use_triton

require(DEFAULT_ATTENTION)

UNDERSTOOD = frozenset({"softcap", "s_aux"})
"""Arguments of a model's own attention function, besides the usual ones, that ours computes."""

PROVED = "_liger_trainer_attention"
"""The attribute of an attention for which ours is proved. Other models with the same config have theirs without it."""


class OurName(str):
    """Our name in the config of a patched model; a pickle has the name that was there before, and is read without us.

    Args:
        before: The name that was there before.
    """

    before: str
    users: weakref.WeakSet[nn.Module]
    """The attentions that were proved under this name; a copy of the config has no others than those of its model."""
    slices: bool
    """Whether code of the model takes parts of its masks."""

    def __new__(cls, before: str) -> OurName:
        """Our name, with `before` besides."""
        name = super().__new__(cls, NAME)
        name.before, name.users, name.slices = before, weakref.WeakSet(), False
        return name

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return str, (self.before,)

    def __deepcopy__(self, memo: dict[int, Any]) -> OurName:
        name = OurName(self.before)
        name.slices = self.slices
        return name

    __copy__ = functools.partialmethod(__deepcopy__, {})


if available(COMPILED_NAMES):
    torch.utils._pytree.register_constant(OurName)  # for Dynamo of torch 2.11, no other subclass of str is a constant


class NotPackable(Exception):
    """A model has a mask that no plan of a packed row can express."""


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: AttentionPlan | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a transformers model; transformers' default where `module` is not proved.

    Args:
        module: The layer's attention.
        query: (batch, heads, seq, head_dim).
        key: (batch, key_heads, key_seq, head_dim).
        value: As `key`.
        attention_mask: The plan or mask that [`attention_mask`] returned, or the caller's own mask.
        dropout: Probability of dropping a weight; the model's own attention runs unless it is 0.
        scaling: Factor of the scores.
        is_causal: Whether None as a mask means causal; by default as `module` says.
        softcap: Soft-cap of the scores, as in Gemma2.
        s_aux: (heads,), the sinks, as in GPT-OSS.
        indices: The keys that an indexer has selected for each query. From a patched one the `bits` of the plan in the
            mask's place, (words, batch * seq). Else their places, (batch, seq, selected); of no columns, or as many as
            there are keys, if it has selected all.
        **kwargs: Further arguments that the layer and its caller pass.

    Returns:
        (batch, seq, heads, head_dim), and None; or what the model's own attention returns.
    """
    proved = PROVED in module.__dict__
    beyond_sdpa = softcap is not None or s_aux is not None or not (proved or _takes_sdpa(type(module)))  # type: ignore[arg-type]
    plan = attention_mask.build() if isinstance(attention_mask, MaskPart) else attention_mask
    wide = proved and query.shape[-1] > FLASH_HEAD_DIM
    if plan is None and (beyond_sdpa or wide) and query.shape[2] > 1 and _is_causal(module, is_causal):
        # transformers' None: causal, and what lies behind the queries in a static cache is not there yet.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        plan = AttentionPlan(0, None, query.shape[2])
    elif isinstance(plan, AttentionPlan):
        plan = _with_packing(plan, len(query), query.shape[2], kwargs)
        if plan.keys is not None:
            key, value = _in_one_row(key), _in_one_row(value)
    spread = isinstance(plan, AttentionPlan) and plan.spread
    if spread and not (proved and not dropout and indices is None):
        what = f"drops attention weights ({dropout})" if proved and dropout else "takes no keys of other processes"
        raise ValueError(f"`{spread}` is above 1, and {type(module).__name__} {what}. Set `{spread}=1`.")
    if indices is not None and (indices.dim() == 2 or 0 < indices.shape[-1] < key.shape[2]):
        plan = _selecting(attention_mask, plan, indices, len(query), key.shape[2])
    if isinstance(plan, AttentionPlan):
        if proved and not dropout and (spread or use_triton(query)):
            operands = (each.transpose(1, 2) for each in (query, key, value))
            return attention(*operands, plan=plan, scale=scaling, softcap=softcap, sinks=s_aux), None
        needed = beyond_sdpa or not plan.masks_nothing
        make = plan.dense if isinstance(plan, SlicedPlan) else functools.partial(dense, plan, tokens=key.shape[2])
        plan = make(len(query), query.shape[2], query.device) if needed else None
    if beyond_sdpa:
        return eager_function(module)(
            module, query, key, value, additive(plan, query.dtype), dropout=dropout, scaling=scaling,
            softcap=softcap, s_aux=s_aux, **kwargs,
        )  # fmt: skip
    return sdpa_attention_forward(
        module, query, key, value, plan, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: AttentionPlan | torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> AttentionPlan | torch.Tensor | None:
    """What our attention needs to know about a mask; the arguments are those of transformers' `sdpa_mask`.

    The lengths of padded and packed rows are read on the host, once for each kind of mask that a model uses, unless
    they are known (`Step.rows`).

    Returns:
        A plan, or None where a padding mask masks nothing of plain causal attention; for what is not recognised, where
        the caller needs a tensor and where our attention has no kernels, what transformers' `sdpa_mask` returns.

    Raises:
        NotPackable: for a packed row, and a mask that is not recognised.
    """
    if isinstance(attention_mask, AttentionPlan):
        return attention_mask  # which `generate` made before the model was called
    slices = getattr(getattr(config, "_attn_implementation", None), "slices", False)
    step = None if torch.compiler.is_compiling() else current_step()
    of_row = None
    if step is not None and (step.plan_of is not None or (step.documents is not None and attention_mask is None)):
        of_row = _plan_of_documents(step, mask_function, batch_size * q_length, device)
    if of_row is not None:
        device = torch.device(device)
        if of_row.spread:
            return of_row  # for our attention alone
        if device.type not in TRITON_DEVICES:
            return dense(of_row, batch_size, q_length, device)
        return sliced(of_row, batch_size, q_length, device) if slices else of_row
    plan = None
    continues = isinstance(q_offset, torch.Tensor) or q_offset or kv_offset or q_length != kv_length or q_length == 1
    ours = not continues and torch.device(device).type in TRITON_DEVICES
    if ours and torch.compiler.is_compiling():
        if allow_is_causal_skip and not use_vmap:
            plan = traced_plan(local_size, attention_mask, batch_size, q_length, config)
    elif ours:
        pattern = _pattern(mask_function)
        # Packing always forbids skipping the mask; without packing, it is the caller who forbids it.
        if pattern is not None and (allow_is_causal_skip or slices or pattern.packed is not None):
            plan = read_plan(pattern, attention_mask, batch_size, q_length, dtype, device)
    if plan is None:
        arguments: dict[str, Any] = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function}
        arguments |= {"attention_mask": attention_mask, "local_size": local_size, "use_vmap": use_vmap}
        arguments |= {"allow_is_causal_skip": allow_is_causal_skip, "dtype": dtype, "device": device, **kwargs}
        return sdpa_mask(batch_size, q_length, kv_length, **arguments)
    if slices and not torch.compiler.is_compiling():
        return sliced(plan, batch_size, q_length, device)
    return None if plan.masks_nothing and attention_mask is not None else plan


def _plan_of_documents(
    step: Step, mask_function: Callable, tokens: int, device: torch.device | str
) -> AttentionPlan | None:
    """The plan of a packed row of ours, or of one whose documents the model knows but tells no mask of."""
    pattern = _pattern(mask_function)
    if step.plan_of is not None:
        if pattern is None or pattern.packed is not None:
            raise NotPackable("a mask that is neither causal, nor a window, nor chunks")
        return step.plan_of(pattern.window, pattern.chunk)
    assert step.documents is not None
    spans = step.documents().spans
    if pattern is None or pattern.packed is not None or pattern.chunk or spans is None:
        return None
    return plan_of(spans[:, FIRST].tolist(), tokens, pattern.window, device)


def _pattern(function: Callable) -> Pattern | None:
    """What the mask function computes; None also where the functions of the installed transformers are not known."""
    if function is causal_mask_function:
        return Pattern()
    return composed_pattern(function) if available(RECOGNISED_MASKS) else None


@functools.cache
def _takes_sdpa(kind: type[nn.Module]) -> bool:
    """Whether transformers' default for the models in the file of an attention is SDPA."""
    models = (each for each in vars(sys.modules.get(kind.__module__, sys)).values() if isinstance(each, type))
    return all(
        each._supports_sdpa for each in models if issubclass(each, PreTrainedModel) and each is not PreTrainedModel
    )


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _in_one_row(x: torch.Tensor) -> torch.Tensor:
    """(1, heads, batch * seq, head_dim) of (batch, heads, seq, head_dim)."""
    return x if len(x) == 1 else x.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)


# Plans of packed rows, by position ids: every layer of a model is given the same ones. With the number of rows and how
# often the ids had been written over.
_packings: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _with_packing(plan: AttentionPlan, batch: int, length: int, kwargs: dict[str, Any]) -> AttentionPlan:
    """`plan` with the documents of packed rows, which some models (GPT-OSS) do not tell their mask function of."""
    positions, offsets, longest = (kwargs.get(name) for name in ("position_ids", "cu_seq_lens_q", "max_length_q"))
    if plan.offsets is not None or plan.whole_rows:
        return plan
    if offsets is not None and longest is not None:
        return plan._replace(offsets=offsets.to(torch.int32), longest=int(longest))
    if positions is None or positions.shape[-1] != length or positions.dim() != 2 or torch.compiler.is_compiling():
        return plan
    read_at, packed = _packings.get(positions, (None, None))
    if read_at != (batch, version_of(positions)):
        numbers = find_packed_sequence_indices(positions.expand(batch, -1))
        packed = None if numbers is None else plan_of(packed_documents(numbers), batch * length, 0, positions.device)
        _packings[positions] = (batch, version_of(positions)), packed
    return plan if packed is None else packed._replace(window=plan.window)


def _selecting(
    given: Any, plan: AttentionPlan | torch.Tensor | None, indices: torch.Tensor, batch: int, keys: int
) -> AttentionPlan | torch.Tensor:
    """`plan`, or the mask in its place, without the keys that are not selected; `given` is what an indexer knew."""
    if not isinstance(plan, AttentionPlan):
        return of_selected(plan, indices, keys)
    if indices.dim() == 3:
        return plan._replace(bits=bits_of(plan, indices, keys).flatten(1))
    selecting: AttentionPlan = given._replace(bits=indices)
    if plan is given:
        return selecting
    # Bits are places in a document, and the indexer did not know that there are several in a row.
    return dense(selecting, batch, keys, indices.device) & dense(plan, batch, keys, indices.device)


_find = masking_utils.find_packed_sequence_indices


def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
    """What transformers' function of this name finds; None, without looking, for ids that a model has made itself."""
    known = None if torch.compiler.is_compiling() else current_step().rows
    return _find(position_ids) if known is None else None


def eager_function(module: nn.Module) -> Any:
    """The function of the model's file that computes attention with a mask; None if it has none."""
    forward = type(module).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    # A forward that somebody has put into the class may be from another file.
    places = [getattr(forward, "__globals__", {})]
    places += [vars(sys.modules.get(cls.__module__, sys)) for cls in type(module).__mro__]
    return next((place["eager_attention_forward"] for place in places if "eager_attention_forward" in place), None)


def additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A boolean mask as what is added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def has_our_attention(model: PreTrainedModel) -> bool:
    """Whether the attention of a model that is proved is still ours: no other takes the plan of a packed row."""
    return bool(model.config.get_text_config()._attn_implementation == NAME)


def default_implementation(owner: type[PreTrainedModel]) -> str:
    """The attention that transformers takes for a class of models where nothing else is asked for."""
    return "sdpa" if owner._supports_sdpa else "eager"


if available(PACKED_POSITIONS):
    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
