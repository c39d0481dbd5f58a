"""RoPE, multimodal: pairs of a head follow time, height or width, as in Qwen2-VL."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.rope import cases as text_cases
from liger_trainer.benchmarks.operations.rope import eager as rotate_both
from liger_trainer.benchmarks.operations.rope import rotary_tables
from liger_trainer.benchmarks.registry import Case, Data, library, operation, provider

Sections = tuple[int, int, int]


@operation("rope_multimodal")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The cases of RoPE, with one table for each axis: a video whose frames are 16 patches wide."""
    pairs = model.head_dim // 2
    time, width = pairs // 4, (pairs - pairs // 4) // 2
    for case in text_cases(data, model, tokens):
        batch, _, length, _ = case.arguments["q"].shape
        place = torch.arange(length, device=data.device)
        axes = torch.stack((place // 256, place // 16 % 16, place % 16))
        for name, table in zip(("cos", "sin"), rotary_tables(data, length, model.head_dim)):
            case.arguments[name] = table[0, axes].unsqueeze(1).expand(-1, batch, -1, -1).contiguous()
        case.arguments["sections"] = (time, width, pairs - time - width)
        yield case


@provider("rope_multimodal", "torch")
def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sections: Sections) -> tuple[Tensor, Tensor]:
    def together(table: Tensor) -> Tensor:
        return torch.cat([part[i % 3] for i, part in enumerate(table.split(sections * 2, dim=-1))], dim=-1)

    return rotate_both(q, k, together(cos), together(sin))


@provider("rope_multimodal", "liger-kernel")
def liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sections: Sections) -> tuple[Tensor, Tensor]:
    from liger_kernel.transformers.functional import liger_qwen2vl_mrope

    return liger_qwen2vl_mrope(q, k, cos, sin, list(sections))


library("rope_multimodal", "liger_trainer", "liger_trainer.functional:rope_multimodal")
