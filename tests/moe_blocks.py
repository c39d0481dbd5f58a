"""Blocks of experts as published models have them, and how exact ours is on one beside the block's own loop.

Truth is the block's own code in a wider dtype. It computes expert by expert, so that no wide copy of all weights and no
wide gradient of all of them exists at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.benchmarks.models import MODELS, model_config

BLOCKS: dict[str, type[nn.Module]] = {
    "glm4.5": Glm4MoeMoE,
    "glm4.5-air": Glm4MoeMoE,
    "llama4-scout": Llama4TextMoe,
    "qwen2-57b-a14b": Qwen2MoeSparseMoeBlock,
    "olmoe-1b-7b": OlmoeSparseMoeBlock,
    "gpt-oss-120b": GptOssMLP,
    "deepseek-v3": DeepseekV3MoE,
}
"""The class of the block of each model, a key of `liger_trainer.benchmarks.models.MODELS`."""

_BIAS = "e_score_correction_bias"


class Errors(NamedTuple):
    """Distances from the truth, of one tensor or of each expert's part of one, in float64.

    Args:
        ours: The distance of the patched block.
        eager: The distance of the block as it is.
        norm: The norm of the truth.
        numbers: How many numbers the tensor or part has.
    """

    ours: Tensor
    eager: Tensor
    norm: Tensor
    numbers: int

    def no_less_exact(self, factor: float, floor: float) -> bool:
        """Whether ours is nowhere further away than `factor` times eager's distance and `floor` of the norm.

        The norms of two equally large errors of n independent numbers differ by chance, by a deviation of 1 / sqrt(n);
        two of them are added to `factor`. That matters for biases alone.
        """
        return bool((self.ours <= (factor + 2 * self.numbers**-0.5) * self.eager + floor * self.norm).all())

    def __str__(self) -> str:
        least = torch.finfo(torch.float64).tiny
        ours, eager = ((distance / self.norm.clamp_min(least)).max() for distance in (self.ours, self.eager))
        ratio = (self.ours / self.eager.clamp_min(least)).max()
        return f"ours {ours:.3e}, eager {eager:.3e} of the norm; ours / eager {ratio:.3f}"


class Measured(NamedTuple):
    """A block as it is and patched, beside the truth.

    Args:
        errors: By name: ``"output"``, ``"hidden"`` and the parameters'.
        components: The components that were patched.
        same_choices: Whether all three chose the same experts for every token; the errors say nothing if not.
    """

    errors: dict[str, Errors]
    components: set[str]
    same_choices: bool

    def less_exact(self, factor: float, floor: float) -> dict[str, str]:
        """What ours is less exact in, see `Errors.no_less_exact`."""
        return {key: str(each) for key, each in self.errors.items() if not each.no_less_exact(factor, floor)}

    @property
    def expected_components(self) -> set[str]:
        """What there is to patch in the block."""
        shared = any(key.startswith("shared_expert") for key in self.errors)
        return {"experts", "router", "swiglu"} if shared else {"experts", "router"}


def measure_block(
    name: str, device: str, dtype: torch.dtype, tokens: int, exact: torch.dtype, widths: dict[str, int] | None = None
) -> Measured:
    """Builds a block, patches it and compares; nothing of it stays in memory.

    Args:
        name: A key of `BLOCKS`.
        device: The device of the block.
        dtype: The dtype of parameters and hidden states.
        tokens: How many.
        exact: The dtype of the truth.
        widths: Fields of the configuration to change, of those that it has.
    """
    block = _filled(on_meta(name, widths).to(dtype), device)
    hidden = _clear_tokens(block, tokens, device, dtype)
    upstream = torch.randn(hidden.shape, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(2))
    eager, chosen = _run(block, hidden, upstream)
    report = apply_liger_kernel(block)
    ours, chosen_by_ours = _run(block, hidden, upstream)
    revert_liger_kernel(block)
    experts = block.experts
    stream = _Stream(experts, [{k.removeprefix("experts."): v for k, v in each.items()} for each in (ours, eager)])
    block.experts = _ExpertByExpert(experts, stream)
    rest = {key: value for key, value in block.named_parameters() if not key.startswith("experts.")}
    wide = {key: value.detach().to(exact).requires_grad_() for key, value in rest.items()}
    true, truly_chosen = _run(block, hidden.to(exact), upstream.to(exact), wide)
    errors = {key: Errors(*_norms(ours[key], eager[key], value), value.numel()) for key, value in true.items()}
    for key, rows in stream.norms.items():
        errors[f"experts.{key}"] = Errors(*torch.stack(rows).unbind(1), getattr(experts, key)[0].numel())
    assert errors.keys() == eager.keys() == ours.keys()
    components = {row.component for row in report.applied}
    same = torch.equal(chosen_by_ours, chosen) and torch.equal(chosen, truly_chosen)
    return Measured(errors, components, same)


def on_meta(name: str, widths: dict[str, int] | None = None) -> nn.Module:
    """The block without memory, with eager experts; of the configuration's fields, `widths` are changed."""
    config = model_config(MODELS[name])
    config._experts_implementation = "eager"
    for field, width in (widths or {}).items():
        if hasattr(config, field):
            setattr(config, field, width)
    with torch.device("meta"):
        return BLOCKS[name](config)


def _filled(block: Any, device: str) -> nn.Module:
    """With normal weights that keep deviations near 1."""
    block.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    transposed = getattr(block.experts, "is_transposed", isinstance(block, Llama4TextMoe))
    for key, parameter in block.named_parameters():
        fan_in = parameter.shape[1 if parameter.dim() == 3 and transposed else -1]
        parameter.data.normal_(generator=generator).mul_(0.1 if key.endswith("bias") else fan_in**-0.5)
        if hasattr(block.experts, "limit") and key.endswith("gate_up_proj"):
            parameter.data.mul_(2)  # so that the clamps are met, and still rounding seldom decides about them
    router = _router(block)
    if _BIAS in router._buffers:  # in fp32, as models keep it
        setattr(router, _BIAS, 0.02 * torch.randn(router.num_experts, device=device, generator=generator))
    return block


def _router(block: Any) -> Any:
    return block._modules.get("gate") or block._modules["router"]


def _clear_tokens(block: nn.Module, tokens: int, device: str, dtype: torch.dtype) -> Tensor:
    """Normal hidden states (tokens, hidden), of more than that the ones whose choice of experts is the clearest.

    Rounding then changes no choice: logits in bf16 are often equal, and of equal ones torch takes any.
    """
    router = _router(block)
    generator = torch.Generator(device).manual_seed(1)
    size = router.weight.shape[1]
    hidden = torch.randn(tokens * 3 // 2, size, device=device, dtype=dtype, generator=generator)
    scores = hidden.float() @ router.weight.float().mT
    if getattr(router, "bias", None) is not None:
        scores = scores + router.bias.float()
    margin = torch.full_like(scores[:, 0], torch.inf)
    if _BIAS in router._buffers:
        scores = scores.sigmoid() + getattr(router, _BIAS)
        if router.topk_group < router.num_group:
            groups = scores.unflatten(1, (router.num_group, -1))
            sums = groups.topk(2).values.sum(-1)
            top = sums.topk(router.topk_group + 1).values
            margin = top[:, -2] - top[:, -1]
            scores = groups.masked_fill((sums < top[:, -2:-1]).unsqueeze(2), -torch.inf).flatten(1)
    top = scores.topk(router.top_k + 1).values
    return hidden[torch.minimum(margin, top[:, -2] - top[:, -1]).topk(tokens).indices].detach()


def _run(
    block: Any, hidden: Tensor, upstream: Tensor, parameters: dict[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Output and gradients by name, and the experts of each token (tokens, k) in ascending order."""
    chosen = []

    def note(router: Any, arguments: Any, result: tuple[Tensor, ...]) -> None:
        index = result[2] if len(result) == 3 else result[0].topk(router.top_k).indices
        chosen.append(index.long().sort(-1).values)

    hook = _router(block).register_forward_hook(note)
    hidden = hidden.detach().clone().requires_grad_()
    output = functional_call(block, parameters or {}, (hidden.unsqueeze(0),))
    hook.remove()
    output = (output[0] if isinstance(output, tuple) else output).view_as(hidden)
    leaves = {"hidden": hidden, **(parameters or dict(block.named_parameters()))}
    gradients = torch.autograd.grad(output, list(leaves.values()), upstream)
    (index,) = chosen
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}, index


def _norms(ours: Tensor, eager: Tensor, true: Tensor) -> Tensor:
    """The first two numbers are the distances from `true`, the third is its norm."""
    vectors = ours.to(true.dtype) - true, eager.to(true.dtype) - true, true
    return torch.stack([torch.linalg.vector_norm(vector, dtype=torch.float64) for vector in vectors])


class _Stream:
    """Takes the true gradients of one expert after the other and keeps how far the others are from them."""

    def __init__(self, experts: nn.Module, found: list[dict[str, Tensor]]) -> None:
        self.found = found
        self.norms: dict[str, list[Tensor]] = {key: [] for key, _ in experts.named_parameters()}

    def take(self, expert: int, gradients: dict[str, Tensor]) -> None:
        for key, true in gradients.items():
            self.norms[key].append(_norms(*(each[key][expert] for each in self.found), true[0]))


class _ExpertByExpert(nn.Module):
    """The class's own forward on the rows and the wide weights of one expert at a time, in place of its module."""

    def __init__(self, experts: nn.Module, stream: _Stream) -> None:
        super().__init__()
        self.experts = experts
        self.stream = stream

    def forward(self, hidden: Tensor, *choice: Tensor) -> Tensor:
        if choice:
            index, weights = choice
            return _Experts.apply(self, index, hidden, weights)
        return _Experts.apply(self, None, hidden, None)

    def rows(self, index: Tensor | None, hidden: Tensor, weights: Tensor | None, expert: int) -> tuple[Any, Any]:
        """Where the rows of an expert lie: tokens, and the places in (tokens, k); all experts see all in turn else."""
        if index is None or weights is None:
            size = len(hidden) // self.experts.gate_up_proj.shape[0]
            return slice(expert * size, (expert + 1) * size), None
        token, place = torch.where(index == expert)
        return token, (token, place)

    def one(self, expert: int, rows: Tensor, weights: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The results of one expert, and its weights, which are leaves."""
        wide = {
            key: value.detach()[expert : expert + 1].to(rows.dtype).requires_grad_()
            for key, value in self.experts.named_parameters()
        }
        choice = ()
        if weights is not None:
            choice = torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device), weights.unsqueeze(1)
        return functional_call(self.experts, wide, (rows, *choice)), wide


class _Experts(torch.autograd.Function):
    """Runs each expert in both passes, so that nothing of it is kept."""

    @staticmethod
    def forward(ctx, module, index, hidden, weights):
        ctx.module = module
        ctx.save_for_backward(index, hidden, weights)
        output = torch.zeros_like(hidden)
        for expert in range(len(module.experts.down_proj)):
            tokens, places = module.rows(index, hidden, weights, expert)
            results, _ = module.one(expert, hidden[tokens], None if places is None else weights[places])
            output[tokens] += results
        return output

    @staticmethod
    def backward(ctx, upstream):
        module, (index, hidden, weights) = ctx.module, ctx.saved_tensors
        of_hidden = torch.zeros_like(hidden)
        of_weights = None if weights is None else torch.zeros_like(weights)
        for expert in range(len(module.experts.down_proj)):
            tokens, places = module.rows(index, hidden, weights, expert)
            inputs = [hidden[tokens]] if places is None else [hidden[tokens], weights[places]]
            inputs = [each.detach().requires_grad_() for each in inputs]
            with torch.enable_grad():
                results, wide = module.one(expert, *inputs, *([None] if places is None else []))
            leaves = [*inputs, *wide.values()]
            if results.requires_grad:
                gradients = torch.autograd.grad(results, leaves, upstream[tokens])
            else:  # an expert that nothing chose
                gradients = [torch.zeros_like(leaf) for leaf in leaves]
            of_hidden[tokens] += gradients[0]
            if of_weights is not None:
                of_weights[places] = gradients[1]
            module.stream.take(expert, dict(zip(wide, gradients[len(inputs) :], strict=True)))
        return None, None, of_hidden, of_weights
