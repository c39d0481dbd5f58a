"""What is trained, as a plan sees it: the model, the work of one micro-batch, and the memory of its head.

The fused head with vocabulary V over N hidden states of size H holds one chunk of logits (`logits_memory`, or N V
elements if that is less). Cross entropy computes both gradients in the forward pass: dX (N H) and, for a trained head,
dW (V H). Losses of log-probabilities compute dX and dW in the backward pass; for a frozen head, the forward pass saves
the gradient of each log-probability with respect to its hidden state, (N, H) in fp32, from which the backward pass
computes dX. Logits that are saved for backward (`retain_logits_memory`) are added to a chunk.

Without the fused head, all logits are built: 12 bytes each in half precision (the logits, their fp32 copy, and both
gradients), or twice their size (the logits and their gradient) if the cross entropy is a kernel.

The sizes of a decoder layer, which determine its activations, are read from a model on the meta device.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

from torch import nn

from liger_trainer.compat.private import available
from liger_trainer.compat.transformers import PLANNED_ATTENTION
from liger_trainer.configs.flags import kernel_config_of, retained_bytes_of
from liger_trainer.kernels.fp8.modes import Fp8Mode
from liger_trainer.patching.recurrent.mixers import is_depthwise
from liger_trainer.plan.parameters import Parameters, decoder_layers

_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")
_MIXER_INPUTS = ("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba")


@dataclasses.dataclass(frozen=True)
class MixerShape:
    """What mixes tokens besides attention, in elements per token."""

    projected: int  # results of its first projections
    value: int  # width of what its last projection reads
    convolved: int = 0  # width of the convolution's result, which a recurrence saves; 0 without a recurrence
    state: int = 0  # elements of the states of all heads
    heads: int = 0  # number of decays
    delta: bool = False  # whether a triangular matrix of each chunk is inverted, and saved


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """The model's largest decoder layer, in elements per token; the `others` are of the kinds it has besides."""

    hidden: int  # size H of the residual stream
    query: int  # width of all query heads
    key_value: int  # width of all key heads, and of all value heads
    intermediate: int  # width I of the dense MLP, or of the expert that every token takes; 0 for none
    experts: int = 0  # number of experts; 0 in a dense layer
    experts_per_token: int = 0  # number of experts per token; 0 in a dense layer
    expert_intermediate: int = 0  # width of each expert
    heads: int = 1  # number of query heads
    qk_norm: bool = False  # whether queries and keys are normalised
    post_norms: bool = False  # whether attention and MLP are followed by norms, as in Gemma 2 and 3
    sliding_window: int | None = None  # tokens that a sliding-window layer sees; None without such a layer
    full_layers: float = 1.0  # fraction of the layers that see the whole sequence
    adapted_attention: int = 0  # sum of the input widths of the adapters of q, k and v
    adapted_output: int = 0  # the same of the attention's output projection
    adapted_mlp: int = 0  # the same of the gate and up projections
    adapted_down: int = 0  # the same of the down projection
    adapted_experts: bool = False  # whether the experts have adapters
    # Whether adapters run in our operators, which save no input copies, or in PEFT's layers.
    fused_adapters: bool = True
    fused_experts: bool = True  # whether experts run in our operator, or in transformers' grouped matmul
    exchanged_experts: bool = False  # whether experts get rows of other GPUs too (expert parallelism)
    adapter_dropout: bool = False  # whether adapters have dropout, whose mask is saved
    trained: bool = True  # whether the layer's own weights are trained
    vocab: int = 0  # size V of the vocabulary
    mixer: MixerShape | None = None
    share: float = 1.0  # fraction of the layers that are of this kind
    others: tuple[LayerShape, ...] = ()  # of a hybrid, whose layers differ in what mixes tokens

    @property
    def kinds(self) -> tuple[LayerShape, ...]:
        """The layer, and those of the other kinds."""
        return (self, *self.others)

    def divided(self, size: int) -> LayerShape:
        """The part of one of `size` GPUs that share every matrix; what is between the matrices stays whole."""
        return dataclasses.replace(
            self,
            query=self.query // size,
            key_value=self.key_value // size,
            intermediate=self.intermediate // size,
            heads=self.heads // size,
            vocab=-(-self.vocab // size),
            others=tuple(kind.divided(size) for kind in self.others),
        )

    @property
    def sparse_share(self) -> float:
        """Fraction of the layers that have experts; 1 for none."""
        return sum(kind.share for kind in self.kinds if kind.experts) or 1.0


def read_layer_shape(model: Any, fused_adapters: bool = True, fused_experts: bool = True) -> LayerShape:
    """The [`LayerShape`] of a model on any device; the flags say whether adapters and experts run in our operators."""
    config = model.config.get_text_config()
    for needed in ("hidden_size", "num_attention_heads"):
        if not isinstance(getattr(config, needed, None), int):
            raise ValueError(f"The configuration of {type(model).__name__} has no `{needed}`; it cannot be planned.")
    layers = list(decoder_layers(model))
    groups = defaultdict(list)
    hybrid = any(map(_convolution, layers))
    for place, layer in enumerate(layers):
        groups[_parts(layer) if hybrid else ()].append(place)
    kinds = []
    for places in groups.values():
        place = max(places, key=lambda one: sum(p.numel() for p in layers[one].parameters()))
        shape = _shape_of(_of_layer(config, place), layers[place], hybrid, fused_adapters, fused_experts)
        kinds.append(dataclasses.replace(shape, share=len(places) / len(layers)))
    # A kind with experts comes first, as they decide how the model is split; then the most frequent one.
    first, *others = sorted(kinds, key=lambda kind: (kind.experts == 0, -kind.share))
    return dataclasses.replace(first, others=tuple(others))


def _shape_of(config: Any, layer: nn.Module, hybrid: bool, fused_adapters: bool, fused_experts: bool) -> LayerShape:
    names = {name.rsplit(".", 1)[-1] for name, _ in layer.named_modules()}
    heads = 0 if hybrid and not _has_attention(layer) else config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sparse = any(_is_of_experts(name) for name, _ in layer.named_parameters())
    own = [p for name, p in layer.named_parameters() if "lora_" not in name]
    window, full = _windows(config)
    return LayerShape(
        hidden=config.hidden_size,
        query=heads * head_dim,
        key_value=(getattr(config, "num_key_value_heads", None) or heads) * head_dim if heads else 0,
        intermediate=_shared_width(config) if sparse else _width(config, layer, hybrid),
        experts=_first(config, "num_experts", "num_local_experts", "n_routed_experts") if sparse else 0,
        experts_per_token=_first(config, "num_experts_per_tok", "num_experts_per_token", "top_k") if sparse else 0,
        expert_intermediate=_first(config, "moe_intermediate_size", "intermediate_size") if sparse else 0,
        heads=heads,
        qk_norm=bool(names & {"q_norm", "q_layernorm"}),
        post_norms="post_feedforward_layernorm" in names,
        sliding_window=window,
        full_layers=full,
        **_adapted(layer),
        adapted_experts=any(_is_of_experts(name) and "lora_" in name for name, _ in layer.named_parameters()),
        fused_adapters=fused_adapters,
        fused_experts=fused_experts,
        exchanged_experts=False,  # a setting says so
        adapter_dropout=_has_dropout(layer),
        trained=any(parameter.requires_grad for parameter in own),
        vocab=config.vocab_size,
        mixer=_mixer(layer),
    )


def _convolution(layer: nn.Module) -> nn.Conv1d | None:
    """The convolution along the tokens of a layer with a mixer."""
    return next(filter(is_depthwise, layer.modules()), None)


def _parts(layer: nn.Module) -> tuple[bool, bool, bool]:
    """Whether a hybrid's layer has a mixer, attention, and experts."""
    sparse = any(_is_of_experts(name) for name, _ in layer.named_parameters())
    return _convolution(layer) is not None, _has_attention(layer), sparse


def _has_attention(layer: nn.Module) -> bool:
    names = {name.rsplit(".", 1)[-1] for name, _ in layer.named_modules()}
    return bool(names & set(_ATTENTION)) and ("o_proj" in names or "out_proj" in names)


def _mixer(layer: nn.Module) -> MixerShape | None:
    """The mixer of a layer: what holds its convolution."""
    conv = _convolution(layer)
    if conv is None:
        return None
    owner: Any = next(module for module in layer.modules() if conv in module._modules.values())
    inputs = [getattr(owner, name) for name in _MIXER_INPUTS if hasattr(owner, name)]
    # OLMo-hybrid and Kimi have a projection for each; the convolution's channels and the gate are near enough.
    value = int(getattr(getattr(owner, "out_proj", None) or owner.o_proj, "in_features", 0))
    projected = sum(int(each.out_features) for each in inputs) or conv.in_channels + value
    decays = owner._parameters.get("A_log")
    if decays is None:
        return MixerShape(projected, value)
    heads, delta = decays.numel(), "D" not in owner._parameters
    groups = int(getattr(owner, "n_groups", 0) or 0)
    keys = (conv.in_channels - value) // 2  # all of them
    if delta:
        groups = int(getattr(owner, "num_k_heads", 0) or heads)
    state = heads * (keys // max(groups, 1)) * (value // heads)
    return MixerShape(projected, value, conv.in_channels, state, heads, delta)


def named_attention(model: Any) -> str:
    """The attention implementation that the configuration of a model, or of its language model, names."""
    config = model.config.get_text_config()
    return (available(PLANNED_ATTENTION) and getattr(config, "_attn_implementation", None)) or "sdpa"


def _is_of_experts(name: str) -> bool:
    return ".experts" in f".{name}"


def _first(config: Any, *names: str) -> int:
    return next((int(value) for name in names if (value := getattr(config, name, None))), 0)


def _of_layer(config: Any, index: int) -> Any:
    """The configuration of one layer; asking that of the model for a size that differs between layers is an error."""
    own = getattr(config, "per_layer_config", None)  # of transformers from 5.20 on
    return own[index] if own else config


_DOWN = ("down_proj", "w2", "fc2", "output_linear")


def _width(config: Any, layer: nn.Module, hybrid: bool) -> int:
    """The width of the layer's MLP: what its last projection takes, which may differ from the configuration's.

    A hybrid's layer may have no MLP.
    """
    down = [module for name, module in layer.named_modules() if name.rsplit(".", 1)[-1] in _DOWN]
    width = max((getattr(module, "in_features", 0) for module in down), default=0)
    if hybrid:
        return width
    return width or getattr(config, "intermediate_size", None) or 4 * config.hidden_size


def _shared_width(config: Any) -> int:
    shared = _first(
        *(config, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    )
    return shared or _first(config, "n_shared_experts") * _first(config, "moe_intermediate_size")


def _windows(config: Any) -> tuple[int | None, float]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or []
    if not window or "sliding_attention" not in kinds:
        return None, 1.0
    return int(window), kinds.count("full_attention") / len(kinds)


def _adapted(layer: nn.Module) -> dict[str, Any]:
    """Sums of the input widths of linear layers with a LoRA adapter, by their place in the layer."""
    widths = dict.fromkeys(("adapted_attention", "adapted_output", "adapted_mlp", "adapted_down"), 0)
    for name, module in layer.named_modules():
        if not getattr(module, "lora_A", None) or _is_of_experts(name):
            continue
        last = name.rsplit(".", 1)[-1]
        if last in (*_ATTENTION, *_MIXER_INPUTS):
            place = "adapted_attention"
        elif "attn" in name or "attention" in name or last in ("o_proj", "out_proj"):
            place = "adapted_output"
        else:
            place = "adapted_down" if "down" in last or last in _DOWN else "adapted_mlp"
        widths[place] += int(getattr(module, "in_features", 0))
    return widths


def _has_dropout(layer: nn.Module) -> bool:
    found = (dropout for module in layer.modules() for dropout in getattr(module, "lora_dropout", {}).values())
    return any(getattr(dropout, "p", 0) for dropout in found)


UNFUSED_BYTES = 12  # peak per logit in eager cross entropy: half precision, fp32, fp32, half precision


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """How the head runs."""

    loss: str = "cross_entropy"  # ``"cross_entropy"``, ``"log_probs"``, or ``"none"`` for a model without an LM head
    fused: bool = True  # whether the fused head runs
    cross_entropy: bool = True  # without the fused head, whether the cross entropy on all logits is a kernel
    logits_memory: int = 512 * 2**20  # bytes of one chunk of logits
    # Bytes of logits that may be saved for backward; None for one chunk, which is the working chunk itself.
    retained: int | None = None

    @classmethod
    def of(cls, arguments: Any, loss: str) -> HeadSettings:
        """Those of training arguments, or of a namespace with a recipe's keys."""
        kernels, ours = kernel_config_of(arguments), arguments.use_liger_kernel
        return cls(
            loss,
            fused=bool(ours and kernels.linear_cross_entropy),
            cross_entropy=bool(ours and kernels.cross_entropy),
            logits_memory=int(kernels.logits_memory),
            retained=retained_bytes_of(arguments),
        )


@dataclasses.dataclass(frozen=True)
class HeadMemory:
    """Bytes of the head: its peak, and the weight gradient that remains when the layers' backward begins."""

    peak: float
    weight_gradient: float


def head_memory(
    settings: HeadSettings, tokens: int, hidden: int, vocab: int, compute: int, weight: int, trained: bool
) -> HeadMemory:
    """The memory of the head for N `tokens` with a loss.

    `compute` is the bytes of a hidden state and of a logit, `weight` those of an element of the weight's gradient.
    """
    if settings.loss == "none":
        return HeadMemory(0.0, 0.0)
    gradient = vocab * hidden * weight if trained else 0
    states = 2 * tokens * hidden * compute  # the last norm's output, and its gradient
    logits = tokens * vocab * compute
    if not settings.fused:
        whole = 2 * logits if settings.cross_entropy else tokens * vocab * max(UNFUSED_BYTES, 3 * compute)
        return HeadMemory(whole + states + gradient, gradient)
    chunk = min(settings.logits_memory, logits)
    retained = min(settings.retained or 0, logits) if trained and settings.loss == "log_probs" else 0
    unit = tokens * hidden * 4 if settings.loss == "log_probs" and not trained else 0
    return HeadMemory(chunk + retained + states + unit + gradient, gradient)


@dataclasses.dataclass(frozen=True)
class Work:
    """What a trainer does with one micro-batch, apart from its size."""

    rows: int = 1  # sequences per unit of batch size: 2 for the trainers of pairs
    length: int = 1024  # tokens in a sequence
    loss_length: int = 1024  # how many of these have a loss
    head: HeadSettings = dataclasses.field(default_factory=HeadSettings)  # how the LM head runs
    reference_bytes: float = 0.0  # bytes of a reference model's weights; 0 for none
    # Sequences that each GPU generates at once with ``generate``, for a micro-batch of one sample; 0 for none.
    generated: int = 0
    all_micro_batches: bool = True  # whether the sequences of all accumulation steps are generated together
    reserved_fraction: float = 0.0  # fraction of the GPU that vLLM takes for itself
    # Forwards without gradients beside each one with them: of a reference, of KTO's mismatched completions, or of the
    # policy before the step.
    scored: float = 0.0


@dataclasses.dataclass(frozen=True)
class Run:
    """A model and its training: everything that a `Setting` leaves open."""

    parameters: Parameters  # the model's parameter counts
    shape: LayerShape  # the shape of its largest layer
    work: Work  # the work of a micro-batch
    weight_bytes: int = 2  # bytes per element of the trained weights as they are loaded; adapters are always fp32
    mixed: bool = True  # whether bf16 or fp16 autocast is on
    optim: str = "adamw_torch_fused"  # the Trainer's ``optim``
    optim_args: str = ""  # the Trainer's ``optim_args``
    # The attention implementation, as in ``attn_implementation``; ``"liger_trainer"`` is ours.
    implementation: str = "sdpa"
    recompute_mlp: bool = False  # whether gated MLPs recompute their product in the backward pass
    checkpoint_every: int = 1  # with checkpointing, one layer out of this many is checkpointed
    fp8: Fp8Mode | None = None  # how linear layers multiply in fp8; None for the dtype of the model
    fp8_base: bool = False  # whether frozen linear layers are stored in fp8, and multiply so
    sync_each_batch: bool = False  # whether gradients are reduced after every micro-batch instead of once per step
