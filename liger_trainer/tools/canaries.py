"""Canaries: what we recognise by its shape, built with the installed transformers and recognised, or not.

Nothing says that a closure, the order of a composition, a decorator or the name of an argument has changed. The thing
would only no longer be recognised, and a slower way would run. So a feature that recognises something names a function
of this module (`compat/private.py`), which runs once, when the feature is first used, and in `liger-trainer doctor`.
Each takes milliseconds, on the CPU, and draws no random numbers from torch's generators.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.rebound import called_global, forward_calling, without_packages
from liger_trainer.compat.transformers import REMAPPED_POSITIONS

_SMALL: dict[str, Any] = {
    **{"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8},
    **{"num_hidden_layers": 1, "vocab_size": 8},
}
_PACKED = ((0, 1, 2, 3, 0, 1, 2, 3), (0, 0, 1, 2, 3, 4, 5, 0))
_ENDS = [[False, False, False, True, False, False, False], [True, False, False, False, False, False, True]]
_PADDED = ((0, 0, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 0, 0, 0))
_BLOCKS = ((-1, 0, 0, 0, 0, -1, -1, -1), (-1, -1, 0, 0, -1, 1, 1, 1))
_LENGTH, _SIZE = len(_PACKED[0]), 3
_HIDDEN = "is decorated in a way that hides what it calls"


@functools.cache
def _llama() -> Any:
    """A Llama of one layer, without memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**_SMALL))


def masks() -> str | None:
    """The masks of packed and padded rows, of windows, chunks and blocks, as the installed transformers makes them.

    Each is recognised, and our plan of it is compared with its values, query by query.
    """
    from transformers import AttentionMaskInterface, LlamaConfig, masking_utils

    from liger_trainer.attention.interface import attention_mask

    described: list[dict[str, Any]] = []
    known = inspect.signature(attention_mask)

    def capture(*args: Any, **kwargs: Any) -> None:
        given = known.bind(*args, **kwargs)
        given.apply_defaults()
        described.append(given.arguments | given.arguments.pop("kwargs"))

    config = LlamaConfig(**_SMALL)
    config.sliding_window = config.attention_chunk_size = _SIZE
    config._attn_implementation = "liger_trainer_canary"
    AttentionMaskInterface.register("liger_trainer_canary", capture)
    embeds = torch.zeros(len(_PACKED), _LENGTH, 1, device="cpu")
    creators = {
        "full": masking_utils.create_causal_mask,
        "window": masking_utils.create_sliding_window_causal_mask,
        "chunk": masking_utils.create_chunked_causal_mask,
    }
    for kind, create in creators.items():
        taken = inspect.signature(create).parameters.keys()
        without_cache: dict[str, Any] = dict.fromkeys({"cache", "past_key_values"} & taken)
        config.attention_chunk_size = None if kind == "window" else _SIZE  # a model has one or the other
        for rows in ("plain", "packed", "padded", "illustrated"):
            given: dict[str, Any] = {"attention_mask": None}
            if rows == "packed":
                given["position_ids"] = torch.tensor(_PACKED, device="cpu")
            elif rows == "padded":
                given["attention_mask"] = torch.tensor(_PADDED, dtype=torch.bool, device="cpu")
            elif rows == "illustrated" and "block_sequence_ids" in taken:
                given["block_sequence_ids"] = torch.tensor(_BLOCKS, device="cpu")
            elif rows == "illustrated":
                continue
            create(config, embeds, **given, **without_cache)
            # What sees both ways has no plan, nor have chunks that begin with a packed row.
            planned = rows != "illustrated" and (kind, rows, REMAPPED_POSITIONS.applies) != ("chunk", "packed", False)
            with torch.device("cpu"):  # a model may be being built on another
                problem = _problem_of_mask(described[-1], kind if planned else None, rows)
            if problem:
                return f"the {kind} mask of {rows} rows {problem}"
    return None


def _problem_of_mask(given: dict[str, Any], kind: str | None, rows: str) -> str | None:
    """What is wrong with our plans of a mask, of which there must be one of this `kind`; None: there may be none."""
    from transformers.masking_utils import sdpa_mask

    from liger_trainer.attention.masks import composed_pattern, read_plan, traced_plan
    from liger_trainer.kernels.attention.plan import dense

    padding, batch, length = given["attention_mask"], given["batch_size"], given["q_length"]
    found = composed_pattern(given["mask_function"])
    expected = {"window": 0, "chunk": 0} | ({kind: _SIZE} if kind in ("window", "chunk") else {})
    if kind is not None:
        numbers = None if found is None or found.packed is None else (found.packed.diff() != 0).tolist()
        sizes = None if found is None else {"window": found.window, "chunk": found.chunk}
        if sizes != expected or numbers != (_ENDS if rows == "packed" else None):
            return "is composed in a way we do not know"
    plans = []
    if found is not None:
        plans.append(read_plan(found, padding, batch, length, given["dtype"], given["device"]))
    if given["allow_is_causal_skip"] and not given["use_vmap"]:
        plans.append(traced_plan(given["local_size"], padding, batch, length, given["config"]))
    theirs = sdpa_mask(**given | {"allow_is_causal_skip": False})
    real = torch.ones(batch, length, dtype=torch.bool) if padding is None else padding
    for plan in filter(None, plans):  # what a token of padding sees is nobody's concern
        if ((dense(plan, batch, length, real.device) != theirs) & real[:, None, :, None]).any():
            return "lets tokens see others than we think"
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


def expert_exchange() -> str | None:
    """The forward that receives tokens from other processes, which experts get that are split over these."""
    from transformers.distributed.expert_parallel import AutoEP, EpDispatchExpertsParallel, EPImplementationInterface

    from liger_trainer.patching.moe.expert_parallel import held_by_exchange, receives_tokens

    # Without its `__init__`, which asks for the groups of running processes.
    EPImplementationInterface.register("liger_trainer_canary", lambda *_: object.__new__(AutoEP))
    module, mesh = nn.Linear(8, 8, device="meta"), object()
    EpDispatchExpertsParallel().install_forward(module, mesh, tp_mesh=mesh, ep_implementation="liger_trainer_canary")
    held = held_by_exchange(module) if receives_tokens(module) else None
    known = held is not None and held["ep_mesh"] is mesh and hasattr(held["self"], "context_around_forward")
    return None if known else "the forward of experts that are split holds other variables than we know"


def split_head() -> str | None:
    """The forward that tensor parallelism gives an LM head, which gathers its logits."""
    from torch.distributed.tensor import Replicate
    from transformers.distributed.tensor_parallel import ColwiseParallel

    from liger_trainer.head.vocab_parallel import gathers_logits

    head = nn.Linear(8, 8, device="meta")
    ColwiseParallel(output_layouts=Replicate()).install_forward(head, None)
    known = gathers_logits(head.__dict__.get("forward"), head)
    return None if known else "the forward of a head that is split by columns holds other variables than we know"


def torch_convolution() -> str | None:
    """The forward of a layer with a short convolution calls torch's, wrapped in a choice among packages."""
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    forward = without_packages(Lfm2ShortConv.forward)
    convolve = None if forward is None else called_global(forward, "causal_conv1d_fn")
    if not isinstance(convolve, types.FunctionType) or hasattr(convolve, "__wrapped__"):
        return f"the forward of LFM2's convolution {_HIDDEN}"
    return None if "conv1d" in convolve.__code__.co_names else "LFM2's convolution is not torch's without packages"


def checkpointed_layer() -> str | None:
    """A layer that is checkpointed calls the function that we replace."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    from liger_trainer.recompute.keeping import OF_TRANSFORMERS, replace_checkpoints

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


def cut_shared_layers() -> str | None:
    """The method by which Gemma 4 runs its last layers, which share keys, on the last tokens alone."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextConfig, Gemma4TextModel

    from liger_trainer.patching.shared_layers import cuts_to_last_tokens

    config = Gemma4TextConfig(**_SMALL, layer_types=["full_attention"])
    known = cuts_to_last_tokens(Gemma4TextModel, config, "eager")
    return None if known else "Gemma 4 cuts what its last layers are given in another way than we know"
