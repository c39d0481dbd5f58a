"""Rotary embeddings of queries and keys, in the layouts of several families of models."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from liger_trainer import functional
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.norms import eager_rms_norm
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider, wide

Pair = tuple[Tensor, Tensor]
Sections = tuple[int, int, int]


def rates(data: Data, width: int) -> Tensor:
    """Radians per position for each pair of `width` dimensions."""
    return 1e4 ** (-torch.arange(0, 1, 2 / width, device=data.device))


def rotary_tables(data: Data, length: int, width: int) -> Pair:
    """Cosines and sines shaped (1, length, width)."""
    angles = torch.outer(torch.arange(length, device=data.device), rates(data, width))
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos().to(data.dtype), angles.sin().to(data.dtype)


def heads_case(data: Data, model: Model, tokens: int, transposed: bool = False) -> Case:
    """Queries and keys shaped (batch, length, heads, width), as projections give them, or with the heads first."""
    length = min(tokens, 4096)
    q, k, dq, dk = (
        data.upstream(tokens // length, length, heads, model.head_dim) for heads in (model.heads, model.kv_heads) * 2
    )
    if transposed:
        q, k, dq, dk = (x.transpose(1, 2) for x in (q, k, dq, dk))
    size = q.numel() + k.numel()
    shape = f"{tokens // length}×{length}, {model.heads}+{model.kv_heads} heads of {model.head_dim}"
    return Case({"q": q.requires_grad_(), "k": k.requires_grad_()}, shape, Floor(2 * size, 2 * size), (dq, dk))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One tensor of heads, rotated as in transformers."""
    left, right = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-right, left), dim=-1) * sin.unsqueeze(1)


def of_both(rotate: Callable[..., Tensor]) -> Callable[..., Pair]:
    """The rotation of queries and keys, each with the same tables."""
    return lambda q, k, *tables, **named: (rotate(q, *tables, **named), rotate(k, *tables, **named))


def rotated_by_quack(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Pair:
    """QuACK's rotation, whose tables are (length, pairs)."""
    from quack.rotary import apply_rotary_emb

    tables = cos[0].contiguous(), sin[0].contiguous()
    rotated_q, rotated_k = (
        apply_rotary_emb(x.transpose(1, 2), *tables, interleaved=interleaved).transpose(1, 2) for x in (q, k)
    )
    return rotated_q, rotated_k


@operation("rope", "RoPE: rotary embedding of queries and keys, halves rotated as in Llama")
def rope_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Queries and keys are transposed views, as in models, and so are their gradients."""
    case = heads_case(data, model, tokens, transposed=True)
    case.arguments["cos"], case.arguments["sin"] = rotary_tables(data, min(tokens, 4096), model.head_dim)
    yield case


eager_rope = provider("rope", "torch")(of_both(rotated))
library("rope", "liger-kernel")


@provider("rope", "quack")
def quack_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    half = cos.shape[-1] // 2
    return rotated_by_quack(q, k, cos[..., :half], sin[..., :half])


library("rope", "liger_trainer")


@operation("rope_half_width", "RoPE, half-width tables: one cosine and sine per pair, as in GPT-OSS")
def half_width_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    for case in rope_cases(data, model, tokens):
        for name in ("cos", "sin"):
            case.arguments[name] = case.arguments[name][..., : model.head_dim // 2].contiguous()
        yield case


def rotated_by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


provider("rope_half_width", "torch")(of_both(rotated_by_halves))
library("rope_half_width", "liger-kernel", path="liger_kernel.transformers.rope:liger_rotary_pos_emb_gpt_oss")
provider("rope_half_width", "quack")(rotated_by_quack)


@provider("rope_half_width", "liger_trainer")
def our_half_width(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    return functional.rope(q, k, cos, sin, rotary_dim=q.shape[-1])


@operation("rope_interleaved", "RoPE, interleaved: neighbours rotated, as in GLM-4 and Cohere")
def interleaved_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Tables that give two neighbours the same angle."""
    for case in half_width_cases(data, model, tokens):
        for name in ("cos", "sin"):
            case.arguments[name] = case.arguments[name].repeat_interleave(2, dim=-1)
        yield case


def rotated_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    neighbours = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos.unsqueeze(1) + neighbours * sin.unsqueeze(1)


provider("rope_interleaved", "torch")(of_both(rotated_neighbours))


@provider("rope_interleaved", "quack")
def quack_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    return rotated_by_quack(q, k, cos[..., ::2], sin[..., ::2], interleaved=True)


library("rope_interleaved", "liger_trainer", path="liger_trainer.functional:rope", fixed={"interleaved": True})


@operation("rope_multimodal", "RoPE, multimodal: pairs of a head follow time, height or width, as in Qwen2-VL")
def multimodal_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """One table for each axis: a video whose frames are 16 patches wide."""
    pairs = model.head_dim // 2
    time, width = pairs // 4, (pairs - pairs // 4) // 2
    for case in rope_cases(data, model, tokens):
        batch, _, length, _ = case.arguments["q"].shape
        place = torch.arange(length, device=data.device)
        axes = torch.stack((place // 256, place // 16 % 16, place % 16))
        for name in ("cos", "sin"):
            table = case.arguments[name][0, axes]
            case.arguments[name] = table.unsqueeze(1).expand(-1, batch, -1, -1).contiguous()
        case.arguments["sections"] = (time, width, pairs - time - width)
        yield case


@provider("rope_multimodal", "torch")
def eager_multimodal(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sections: Sections) -> Pair:
    def together(table: Tensor) -> Tensor:
        return torch.cat([part[i % 3] for i, part in enumerate(table.split(sections * 2, dim=-1))], dim=-1)

    return eager_rope(q, k, together(cos), together(sin))


@provider("rope_multimodal", "liger-kernel")
def liger_multimodal(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sections: Sections) -> Pair:
    from liger_kernel.transformers.functional import liger_qwen2vl_mrope

    return liger_qwen2vl_mrope(q, k, cos, sin, list(sections))


library("rope_multimodal", "liger_trainer")


@operation("rope_complex", "RoPE, complex: queries and keys as complex numbers times complex factors, as in Llama 4")
def complex_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    case = heads_case(data, model, tokens)
    angles = torch.outer(torch.arange(min(tokens, 4096), device=data.device), rates(data, model.head_dim))
    case.arguments["freqs_cis"] = torch.polar(torch.ones_like(angles), angles)[None]
    yield case


def rotated_as_complex(x: Tensor, freqs_cis: Tensor) -> Tensor:
    pairs = torch.view_as_complex(wide(x).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs_cis[:, :, None, :]).flatten(-2).type_as(x)


provider("rope_complex", "torch")(of_both(rotated_as_complex))
library("rope_complex", "liger-kernel", path="liger_kernel.transformers.llama4_rope:liger_llama4_text_rotary_pos_emb")
library("rope_complex", "liger_trainer")


@operation(
    "rope_vision",
    "RoPE, vision: packed patches without a batch dimension, rotated in fp32, as in Qwen-VL's vision towers",
)
def vision_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The model's heads, as many keys as queries; half of the pairs follows the rows of an image, half the columns."""
    q, k, dq, dk = (data.upstream(tokens, model.heads, model.head_dim) for _ in range(4))
    place = torch.arange(tokens, device=data.device)
    angles = torch.cat([torch.outer(axis, rates(data, model.head_dim // 2)) for axis in (place // 32, place % 32)], -1)
    angles = torch.cat((angles, angles), -1)
    arguments = {"q": q.requires_grad_(), "k": k.requires_grad_(), "cos": angles.cos(), "sin": angles.sin()}
    size = q.numel() + k.numel()
    title = f"{tokens}, {model.heads}+{model.heads} heads of {model.head_dim}"
    yield Case(arguments, title, Floor(2 * size, 2 * size), (dq, dk))


def rotated_patches(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads_first = wide(x).transpose(0, 1)[None]
    return rotated(heads_first, cos[None], sin[None])[0].transpose(0, 1).to(x.dtype)


provider("rope_vision", "torch")(of_both(rotated_patches))
library("rope_vision", "liger-kernel", path="liger_kernel.transformers.rope:liger_rotary_pos_emb_vision")
library("rope_vision", "liger_trainer")


@operation("qk_norm_rope", "QK-norm + RoPE: RMSNorm of queries and keys, then their rotary embedding (Qwen3, Gemma3)")
def qk_norm_rope_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Inputs as projections give them; results have the heads before the length."""
    case = heads_case(data, model, tokens)
    case.floor = Floor(case.floor.forward, 1.5 * case.floor.backward)
    case.upstream = tuple(gradient.transpose(1, 2) for gradient in case.upstream)
    cos, sin = rotary_tables(data, min(tokens, 4096), model.head_dim)
    weights = {name: data.normal(model.head_dim) for name in ("q_weight", "k_weight")}
    case.arguments |= {**weights, "cos": cos, "sin": sin, "eps": 1e-6}
    yield case


@provider("qk_norm_rope", "torch")
def eager_qk(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Pair:
    q, k = eager_rms_norm(q, q_weight, eps), eager_rms_norm(k, k_weight, eps)
    return eager_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


@provider("qk_norm_rope", "liger-kernel")
def liger_qk(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Pair:
    from liger_kernel.transformers.functional import liger_rms_norm, liger_rope

    q, k = liger_rms_norm(q, q_weight, eps), liger_rms_norm(k, k_weight, eps)
    return liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


@provider("qk_norm_rope", "liger_trainer", kernels=3)
def our_three_kernels(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, kernels: int
) -> Pair:
    q, k = functional.rms_norm(q, q_weight, eps), functional.rms_norm(k, k_weight, eps)
    return functional.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


@provider("qk_norm_rope", "liger_trainer")
def our_qk(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Pair:
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return functional.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, unsqueeze_dim=1)
