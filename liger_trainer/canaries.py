"""Canaries: what we recognise by its shape, built with the installed transformers and recognised, or not.

Nothing says that a closure, the order of a composition, a decorator or the name of an argument has changed. The thing
would only no longer be recognised, and a slower way would run. So a feature that recognises something names a function
of this module (`compat/private.py`), which runs once, when the feature is first used, and in `liger-trainer doctor`.
Each takes milliseconds, on the CPU, and draws no random numbers from torch's generators.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.rebound import called_global, forward_calling
from liger_trainer.compat.transformers import REMAPPED_POSITIONS

_SMALL: dict[str, Any] = {
    **{"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8},
    **{"num_hidden_layers": 1, "vocab_size": 8},
}
_PACKED = ((0, 1, 2, 3, 0, 1, 2, 3),)
_LENGTH, _SIZE = len(_PACKED[0]), 3
_HIDDEN = "is decorated in a way that hides what it calls"


@functools.cache
def _llama() -> Any:
    """A Llama of one layer, without memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**_SMALL))


def masks() -> str | None:
    """The masks of packed rows, of windows and of chunks, as the installed transformers composes them."""
    from transformers import AttentionMaskInterface, LlamaConfig, masking_utils

    from liger_trainer.attention.masks import composed_pattern

    described: list[Callable] = []

    def capture(*_args: Any, mask_function: Callable, **_kwargs: Any) -> None:
        described.append(mask_function)

    config = LlamaConfig(**_SMALL)
    config.sliding_window = config.attention_chunk_size = _SIZE
    config._attn_implementation = "liger_trainer_canary"
    AttentionMaskInterface.register("liger_trainer_canary", capture)
    positions, embeds = torch.tensor(_PACKED, device="cpu"), torch.zeros(1, _LENGTH, 1, device="cpu")
    creators = {
        "full": masking_utils.create_causal_mask,
        "window": masking_utils.create_sliding_window_causal_mask,
        "chunk": masking_utils.create_chunked_causal_mask,
    }
    for kind, create in creators.items():
        names = {"cache", "past_key_values"} & inspect.signature(create).parameters.keys()
        without_cache: dict[str, Any] = dict.fromkeys(names)
        for packed in (False, True):
            if kind == "chunk" and packed and not REMAPPED_POSITIONS.applies:
                continue  # its chunks begin with the row, and get a mask
            create(config, embeds, None, **without_cache, position_ids=positions if packed else None)
            found = composed_pattern(described[-1])
            numbers = None if found is None or found.packed is None else found.packed.diff().tolist()
            sizes = None if found is None else {"window": found.window, "chunk": found.chunk}
            expected = {"window": 0, "chunk": 0} | ({} if kind == "full" else {kind: _SIZE})
            if sizes != expected or numbers != ([[0, 0, 0, 1, 0, 0, 0]] if packed else None):
                return f"the {kind} mask of {'packed' if packed else 'plain'} rows is composed in a way we do not know"
    return None


def cache_of_a_step() -> str | None:
    """The argument in which a step of a generation is given its cache."""
    from transformers import DynamicCache

    from liger_trainer.patching.model_forward import CACHE_NAMES

    cache = DynamicCache()
    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    given = _llama().prepare_inputs_for_generation(ids, None, cache)
    name = next((name for name, value in given.items() if value is cache), None)
    return None if name in CACHE_NAMES else f"a step of a generation is given its cache as `{name}`"


def rotary_function() -> str | None:
    """The rotary function that an attention's forward calls by a global name, and a copy that calls another."""
    from liger_trainer.patching.rope import rotary_globals

    forward = type(_llama().model.layers[0].self_attn).forward
    name = next((name for name, _ in rotary_globals(forward)), None)
    if name is None:
        return "the forward of LlamaAttention calls no rotary function that we know"
    return None if _calls_another(forward, name) else f"the forward of LlamaAttention {_HIDDEN}"


def _calls_another(forward: Callable, name: str) -> bool:
    """Whether a copy of `forward` can be made that calls another function by the global `name`."""
    copy = forward_calling(forward, name, _another)
    return copy is not None and called_global(copy, name) is _another


def _another(*_args: Any, **_kwargs: Any) -> None:
    """Never runs."""


def attention() -> str | None:
    """An attention that calls transformers' interface, and what it passes on."""
    from transformers.modeling_flash_attention_utils import FlashAttentionKwargs

    from liger_trainer.patching.attention import attention_problem
    from liger_trainer.patching.probe import Probe

    missing = {"cu_seq_lens_q", "max_length_q"} - inspect.get_annotations(FlashAttentionKwargs).keys()
    if missing:
        return f"`FlashAttentionKwargs` has no `{min(missing)}`"
    probe = Probe(torch.device("cpu"))
    with probe.isolated():
        problem = attention_problem(_llama(), probe)
    return f"LlamaAttention is not what we know: {problem}" if problem else None


def load_balancing_loss() -> str | None:
    """The loss that a forward calls by a global name, and a copy that calls another."""
    from transformers import MixtralForCausalLM

    from liger_trainer.patching.moe.load_balancing import NAME

    if called_global(MixtralForCausalLM.forward, NAME) is None:
        return f"the forward of MixtralForCausalLM no longer calls `{NAME}`"
    return None if _calls_another(MixtralForCausalLM.forward, NAME) else f"the forward of MixtralForCausalLM {_HIDDEN}"


def experts() -> str | None:
    """Experts with stacked weights, whose implementation transformers looks up by a name."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from liger_trainer.patching.moe.experts import is_dispatched
    from liger_trainer.patching.moe.experts_formula import ExpertsFormula, layout_of

    with torch.device("meta"):
        module = MixtralExperts(MixtralConfig(**_SMALL, num_local_experts=2))
    layout = layout_of(module)
    if not isinstance(layout, ExpertsFormula):
        return f"the weights of MixtralExperts are not what we know: {layout or ', '.join(module._parameters)}"
    return None if is_dispatched(module) else "MixtralExperts does not look its implementation up in the way we know"


def split_head() -> str | None:
    """The forward that tensor parallelism gives an LM head, which gathers its logits."""
    from torch.distributed.tensor import Replicate
    from transformers.distributed.tensor_parallel import ColwiseParallel

    from liger_trainer.head.vocab_parallel import gathers_logits

    head = nn.Linear(8, 8, device="meta")
    ColwiseParallel(output_layouts=Replicate()).install_forward(head, None)
    known = gathers_logits(head.__dict__.get("forward"), head)
    return None if known else "the forward of a head that is split by columns holds other variables than we know"


def checkpointed_layer() -> str | None:
    """A layer that is checkpointed calls the function that we replace."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    from liger_trainer.recompute.layers import OF_TRANSFORMERS, replace_checkpoints

    class Layer(GradientCheckpointingLayer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    calls: list[Any] = []
    layer: Any = Layer().train()
    layer.gradient_checkpointing = True
    setattr(layer, OF_TRANSFORMERS, torch.utils.checkpoint.checkpoint)
    replace_checkpoints({layer: ("", OF_TRANSFORMERS)}, lambda *args, **kwargs: calls.append(args))
    with torch.inference_mode(False), torch.enable_grad():
        layer(torch.zeros(1, device="cpu"))
    return None if calls else f"a layer that is checkpointed does not call its `{OF_TRANSFORMERS}`"
