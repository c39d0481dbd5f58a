"""RoPE, vision: packed patches without a batch dimension, rotated in fp32, as in Qwen-VL's vision towers."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.rope import rates
from liger_trainer.benchmarks.operations.rope import rotated as rotated_heads
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider, wide


@operation("rope_vision")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The model's heads, as many keys as queries; half of the pairs follows the rows of an image, half the columns."""
    shape = tokens, model.heads, model.head_dim
    q, k, dq, dk = (data.upstream(*shape) for _ in range(4))
    place = torch.arange(tokens, device=data.device)
    angles = torch.cat([torch.outer(axis, rates(data, model.head_dim // 2)) for axis in (place // 32, place % 32)], -1)
    angles = torch.cat((angles, angles), -1)
    arguments = {"q": q.requires_grad_(), "k": k.requires_grad_(), "cos": angles.cos(), "sin": angles.sin()}
    size = q.numel() + k.numel()
    title = f"{tokens}, {model.heads}+{model.heads} heads of {model.head_dim}"
    yield Case(arguments, title, Floor(2 * size, 2 * size), (dq, dk))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One tensor of heads, rotated as in transformers."""
    heads_first = wide(x).transpose(0, 1)[None]
    return rotated_heads(heads_first, cos[None], sin[None])[0].transpose(0, 1).to(x.dtype)


@provider("rope_vision", "torch")
def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(q, cos, sin), rotated(k, cos, sin)


library("rope_vision", "liger-kernel", "liger_kernel.transformers.rope:liger_rotary_pos_emb_vision")
library("rope_vision", "liger_trainer", "liger_trainer.functional:rope_vision")
