"""What one decoder layer saves for backward, and the peak memory of its backward pass.

All widths are elements per token; bytes per element are those of `Precision`. With the kernels of this package, a layer
of hidden size H, query width Q, key (and value) width K and MLP width I with trained weights saves:

    attention   norm input H, its output H, rotated q, k, v: Q + 2 K, attention output Q
    MLP         norm input H, its output H, gate and up 2 I, their product I

RoPE is linear and saves nothing. QK norms save their inputs q and k (Q + K), norms after attention and MLP their inputs
(2 H). Attention also saves a log-sum-exp in fp32 for each query head. SDPA takes keys and values repeated to Q each if
a mask rules out its own grouping, and eager attention always does and saves its matrix; our attention builds neither
mask nor matrix. Frozen weights save no input. The adapters of q, k and v save the norm's output, H, once, and so do
those of gate and up; the adapter of the output projection reads what attention saves, and the down projection's input
is recomputed. In PEFT's own layers each adapter saves its own copy of its input, because fp32 adapters cast it and
autocast casts it back. Dropout saves a byte for each element that an adapter reads.

The backward pass peaks at one of two moments. In the down projection's, everything above is allocated, with the
incoming gradient H and the gradient of the product, I, which overwrites the product itself; a PEFT adapter adds its own
bf16 share, I, and the same in fp32, our dropout only the former. In the attention's, the MLP has been freed, and the
gradients of output, q, k and v are allocated besides what attention saves. Flash attention, including SDPA's and that
of our attention, sums the gradient of q in fp32, 2 Q more, and makes those of k and v for every query head, 2 Q, if
several heads share a key. The gated kernels' backward overwrites gate and up, so it adds nothing.

A mixer in the place of attention, with heads of K and V whose values are V wide together, saves in our operators

    delta rule  its projections, the convolution's result C, the recurrence's V, the norm's V, and 64 numbers a head
    Mamba 2     the same without the latter
    short conv  its projection 3 H, and what the last projection reads, H

The projections are C + V and a few numbers a head. Chunk states are not saved. In the recurrence's backward these and
their gradients are allocated in the half precision of the values, K V / 64 a head each, with two widths of V, and the
gradients of its inputs and its output; the MLP has been freed. Of a Mamba 2 layer, experts, and attention that are
layers of their own (Nemotron-H), each saves its own norm's input alone.

Experts in our operator save gate and up of k rows, 2 k I, which their gradient overwrites, and their input H if they
are trained or have adapters; adapters of an expert that every token takes read the same input. Their backward peaks
with k rows of the output's gradient, the gradient of the product and, if a gradient is computed from it, the weighted
product, k H + 2 k I; or at its end with the gradients of k rows of input and of the input, k H + H, and the gradients
of all experts.

Under expert parallelism, k rows arrive for each token if the choices are even, and replace the input. The gradient of
the output arrives as k rows besides those sorted by expert, and so do the gradients of the input at the end: k H more
each time. transformers' own exchange saves k H more, the results that it weights on the tokens' GPU.

Experts in transformers' grouped matmul save k rows of each token, gathered (k H), gate and up (2 k I), the activation
and the product (2 k I), and the output (k H); frozen experts save no gathered rows and no product. The backward starts
with gradients of the weighted and the unweighted output, 2 k H, and ends in the gate and up projection with 2 k I + k H
and the gradients of all experts. PEFT's adapters on experts copy all experts with the adapters merged, and allocate a
gradient of that copy.
"""

from __future__ import annotations

import dataclasses

from liger_trainer.kernels.documents import CHUNK
from liger_trainer.plan.work import LayerShape

TILE_BYTES = 512 * 2**20  # intermediates of one tile of `tiled_mlp`
ADAPTER_BYTES = 4  # PEFT's adapters are fp32


@dataclasses.dataclass(frozen=True)
class Precision:
    """Bytes per element."""

    compute: int = 2  # outputs of linear layers and attention
    stream: int = 2  # residual stream and norms; 4 under autocast over fp32 weights

    @property
    def autocast(self) -> bool:
        """Whether each linear layer makes its own half-precision copy of its input."""
        return self.stream > self.compute


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer."""

    input: float  # bytes of the input, which checkpointing saves
    saved: float  # bytes saved without checkpointing, including the input
    working: float  # peak of its recomputation and backward, without that input
    gradients: int = 0  # elements of weight gradients at that moment that are not in `.grad` yet


def attention_saved(shape: LayerShape, precision: Precision, length: int, implementation: str) -> float:
    """Bytes per token that the attention block saves, including its norm."""
    if not shape.query and shape.mixer is None:  # of experts alone
        return shape.hidden * precision.stream + (shape.hidden * precision.compute if shape.trained else 0)
    if not shape.query:
        return _mixer_saved(shape, precision) + 2 * shape.hidden * precision.stream
    repeated = is_masked(shape, length, implementation) or implementation == "eager"
    keys = shape.query if repeated else shape.key_value
    elements = shape.query + 2 * keys + shape.query
    if shape.trained:
        elements += shape.hidden * (3 if precision.autocast else 1)
    if shape.qk_norm:
        elements += shape.query + shape.key_value
    stream = shape.hidden * (3 if shape.post_norms else 2)  # inputs of both norms, and of the one after
    scores = shape.heads * (length * (4 + precision.compute) if implementation == "eager" else 4)  # or a log-sum-exp
    adapters = _adapters_saved(shape, precision, shape.adapted_attention, shape.hidden)
    adapters += _adapters_saved(shape, precision, shape.adapted_output, 0)
    beside = 0.0 if shape.mixer is None else _mixer_saved(shape, precision)  # Falcon-H1
    return elements * precision.compute + stream * precision.stream + scores + adapters + beside


def _mixer_saved(shape: LayerShape, precision: Precision) -> float:
    """Bytes per token that the mixer saves, without its norm's input; its decays are in fp32."""
    mixer = shape.mixer
    assert mixer is not None
    elements = mixer.projected + mixer.convolved + (CHUNK * mixer.heads if mixer.delta else 0)
    elements += mixer.value if mixer.convolved else 0  # the gated norm's input
    if shape.trained or shape.adapted_output:
        elements += mixer.value  # what the last projection reads
    if shape.trained:
        elements += shape.hidden * (3 if precision.autocast else 1)
    adapters = _adapters_saved(shape, precision, shape.adapted_attention, shape.hidden)
    adapters += _adapters_saved(shape, precision, shape.adapted_output, 0)
    return elements * precision.compute + 2 * 4 * mixer.heads + adapters


def mlp_saved(shape: LayerShape, precision: Precision, recompute_mlp: bool = False) -> float:
    """Bytes per token that the MLP or the experts save; their norm's input counts for the attention block."""
    elements = 0
    if shape.trained:
        elements += shape.hidden * (2 if precision.autocast else 1)
    if shape.intermediate:
        elements += 2 * shape.intermediate
        elements += shape.intermediate if shape.trained and not recompute_mlp else 0
    if shape.experts_per_token:
        elements += _experts_saved(shape)
    after = shape.hidden * precision.stream if shape.post_norms else 0
    unsaved = 0 if shape.fused_experts and shape.adapted_experts else shape.hidden
    adapters = _adapters_saved(shape, precision, shape.adapted_mlp, unsaved)
    adapters += _adapters_saved(shape, precision, shape.adapted_down, 0)
    return elements * precision.compute + after + adapters


def _experts_saved(shape: LayerShape) -> int:
    inner, rows = _inner(shape), shape.experts_per_token * shape.hidden
    if shape.fused_experts:
        # The input of trained experts is counted already, unless an exchange has replaced it.
        counted = shape.trained and not shape.exchanged_experts
        return 2 * inner + (0 if counted else _experts_input(shape))
    arrived = rows if shape.exchanged_experts else 0
    return arrived + (4 * inner + 2 * rows if shape.trained or shape.adapted_experts else 3 * inner + rows)


def _experts_input(shape: LayerShape) -> int:
    """Elements of the experts' input that our operator saves: k rows per token if they arrive from an exchange."""
    if not (shape.trained or shape.adapted_experts):
        return 0
    return shape.hidden * (shape.experts_per_token if shape.exchanged_experts else 1)


def _inner(shape: LayerShape) -> int:
    return shape.experts_per_token * shape.expert_intermediate


def _adapters_saved(shape: LayerShape, precision: Precision, read: int, unsaved: int) -> float:
    """Bytes per token that adapters save: `read` is the sum of their input widths, `unsaved` the width of their input.

    The latter is 0 if something else saves that input or it is recomputed.
    """
    elements = min(read, unsaved) if shape.fused_adapters else read
    return elements * precision.compute + (read if shape.adapter_dropout else 0)


def layer_memory(
    shape: LayerShape,
    precision: Precision,
    tokens: int,
    length: int,
    implementation: str = "sdpa",
    recompute_mlp: bool = False,
    tiled_mlp: bool = False,
    expert_elements: int = 0,
) -> LayerMemory:
    """The memory of one layer, for `tokens` in a micro-batch on one GPU, in sequences of `length`.

    `expert_elements` are the trained elements of one layer's experts. They do not run in tiles, as gated MLPs do with
    `tiled_mlp`.
    """
    compute, stream = precision.compute, precision.stream
    layer_input = shape.hidden * stream
    attention = attention_saved(shape, precision, length, implementation)
    mlp = mlp_saved(shape, precision, recompute_mlp)
    upstream = shape.hidden * stream  # gradient of the layer's output
    tile = 0.0
    down = shape.intermediate * compute
    if shape.adapted_down:
        down += shape.adapted_down * _adapter_gradient(shape, compute)
    experts, down_elements = _experts_begin(shape, compute), shape.hidden * shape.intermediate
    merged = 0
    if shape.experts_per_token and shape.fused_experts:
        down_elements += shape.experts * shape.hidden * shape.expert_intermediate
    if shape.adapted_experts and not (shape.fused_experts and shape.fused_adapters):
        merged = 3 * shape.experts * shape.hidden * shape.expert_intermediate * compute
    if tiled_mlp and shape.intermediate and not shape.experts_per_token:
        mlp, down = shape.hidden * compute, shape.hidden * compute  # the input and its gradient
        tile = min(TILE_BYTES, tokens * shape.intermediate * 4 * compute)
        tile += 3 * shape.hidden * shape.intermediate * 4 if shape.trained else 0  # fp32 sums of its gradients
    in_mlp = tokens * (attention + mlp + upstream + max(down, experts)) + tile
    flash = implementation != "eager" and not is_masked(shape, length, implementation)
    in_attention = tokens * (attention + upstream + _attention_backward(shape, compute, flash))
    moments = [(in_mlp + merged, down_elements if shape.trained else 0), (in_attention, 0)]
    if shape.experts_per_token:
        in_experts = tokens * (attention + upstream + _experts_end(shape, compute))
        moments.append((in_experts + 2 * merged, expert_elements))
    fullest, gradients = max(moments, key=lambda moment: moment[0] + compute * moment[1])
    mask = 0.0
    if is_masked(shape, length, implementation):
        mask = length**2 * (1 + compute)  # as booleans, and in the dtype that SDPA's kernel takes
    return LayerMemory(
        tokens * layer_input, tokens * (attention + mlp) + merged, fullest - tokens * layer_input + mask, gradients
    )


def is_masked(shape: LayerShape, length: int, implementation: str) -> bool:
    """Whether SDPA gets a mask, which excludes flash attention and its own grouping of heads."""
    return implementation == "sdpa" and shape.sliding_window is not None and length > shape.sliding_window


def _attention_backward(shape: LayerShape, compute: int, flash: bool) -> float:
    """Gradients in the attention's backward: at its output projection, in the middle, or at q, k and v."""
    mixer = shape.mixer
    if mixer is not None and not shape.query:
        states = 2 * mixer.state / CHUNK + (2 if mixer.delta else 1) * mixer.value if mixer.heads else 0
        middle = (states + mixer.value + mixer.convolved) * compute
        return max(middle, (mixer.convolved + mixer.projected + shape.hidden) * compute)
    if not shape.query:
        return 0.0
    output = shape.query * compute + shape.adapted_output * _adapter_gradient(shape, compute)
    middle = (2 * shape.query + 2 * shape.key_value) * compute
    if flash:
        middle += 4 * shape.query + (2 * shape.query * compute if shape.key_value < shape.query else 0)
    adapted = shape.hidden * _adapter_gradient(shape, compute) if shape.adapted_attention else 0
    start = (shape.query + 2 * shape.key_value + 2 * shape.hidden) * compute + adapted
    gone = 2 * shape.query * compute  # q and the output are freed before the projections' own backward
    return max(output, middle, start - gone)


def _adapter_gradient(shape: LayerShape, compute: int) -> int:
    """Bytes per element that an adapter needs besides its input's gradient while it adds its own."""
    if not shape.fused_adapters:
        return compute + ADAPTER_BYTES
    return compute if shape.adapter_dropout else 0  # otherwise a matmul adds it


def _experts_begin(shape: LayerShape, compute: int) -> int:
    """Elements that the down projection's backward adds to what is saved."""
    inner, rows = _inner(shape), shape.experts_per_token * shape.hidden
    if shape.fused_experts:
        arrived = rows if shape.exchanged_experts else 0
        return (arrived + rows + inner * (2 if shape.trained or shape.adapted_experts else 1)) * compute
    return 2 * rows * compute


def _experts_end(shape: LayerShape, compute: int) -> int:
    """Elements allocated when the gradient of the gate and up projection's input is."""
    inner, rows = _inner(shape), shape.experts_per_token * shape.hidden
    if shape.fused_experts:
        arriving = rows if shape.exchanged_experts else 0
        return (_experts_input(shape) + arriving + shape.hidden + 2 * inner + rows) * compute
    return (2 * rows + 4 * inner) * compute
