"""The workloads of the kernel benchmark, each with its providers: eager torch, torch.compile, Liger, TRL and ours."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F

Step = Callable[[], object]


def randn(*shape: int, scale: float = 1.0, grad: bool = True) -> torch.Tensor:
    """Random bf16 data on the GPU."""
    return (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale).requires_grad_(grad)


def step_of(function: Callable, inputs: list[torch.Tensor], upstream: torch.Tensor | tuple | None = None) -> Step:
    """One forward and backward of `function(*inputs)`, leaving no gradient behind."""

    def step() -> None:
        output = function(*inputs)
        outputs = output if isinstance(output, tuple) else (output,)
        gradients = (None,) * len(outputs) if upstream is None else upstream
        torch.autograd.backward(outputs, gradients if isinstance(gradients, tuple) else (gradients,))
        for tensor in inputs:
            tensor.grad = None

    return step


@dataclasses.dataclass(frozen=True)
class Workload:
    """Something to time: its providers (built lazily), and the fewest bytes and FLOPs it needs."""

    providers: Callable[[], dict[str, Callable[[], Step]]]
    bytes: float = 0.0
    flops: float = 0.0


def _with_compile(eager: Callable) -> dict[str, Callable]:
    return {"eager": eager, "compile": torch.compile(eager)}


def rms_norm(rows: int, hidden: int) -> Workload:
    """RMSNorm, Llama casting."""

    def providers() -> dict[str, Callable[[], Step]]:
        x, weight, dy = randn(rows, hidden), randn(hidden), randn(rows, hidden, grad=False)

        def eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            xf = x.float()
            return weight * (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

        def liger() -> Step:
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction

            return step_of(lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False), [x, weight], dy)

        def ours() -> Step:
            from liger_trainer.functional import rms_norm

            return step_of(rms_norm, [x, weight], dy)

        compiled = {name: (lambda f=f: step_of(f, [x, weight], dy)) for name, f in _with_compile(eager).items()}
        return {**compiled, "liger": liger, "liger_trainer": ours}

    return Workload(providers, bytes=2 * 5 * rows * hidden)


def fused_add_rms_norm(rows: int, hidden: int) -> Workload:
    """Residual add and RMSNorm, both outputs used."""

    def providers() -> dict[str, Callable[[], Step]]:
        x, residual, weight = randn(rows, hidden), randn(rows, hidden), randn(hidden)
        upstream = (randn(rows, hidden, grad=False), randn(rows, hidden, grad=False))

        def eager(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple:
            total = x + residual
            xf = total.float()
            return weight * (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype), total

        def liger() -> Step:
            from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Function

            return step_of(lambda x, r, w: Function.apply(x, r, w, 1e-6, 0.0, "llama", False), inputs, upstream)

        def ours() -> Step:
            from liger_trainer.functional import fused_add_rms_norm

            return step_of(fused_add_rms_norm, inputs, upstream)

        inputs = [x, residual, weight]
        compiled = {name: (lambda f=f: step_of(f, inputs, upstream)) for name, f in _with_compile(eager).items()}
        return {**compiled, "liger": liger, "liger_trainer": ours}

    return Workload(providers, bytes=2 * 8 * rows * hidden)


def layer_norm(rows: int, hidden: int) -> Workload:
    """LayerNorm with weight and bias."""

    def providers() -> dict[str, Callable[[], Step]]:
        inputs = [randn(rows, hidden), randn(hidden), randn(hidden)]
        dy = randn(rows, hidden, grad=False)

        def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, (hidden,), weight, bias, 1e-5)

        def liger() -> Step:
            from liger_kernel.ops.layer_norm import LigerLayerNormFunction

            return step_of(lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5), inputs, dy)

        def ours() -> Step:
            from liger_trainer.functional import layer_norm

            return step_of(layer_norm, inputs, dy)

        compiled = {name: (lambda f=f: step_of(f, inputs, dy)) for name, f in _with_compile(eager).items()}
        return {**compiled, "liger": liger, "liger_trainer": ours}

    return Workload(providers, bytes=2 * 5 * rows * hidden)


def rope(batch: int, length: int, q_heads: int, k_heads: int, dim: int) -> Workload:
    """Half-split rotary embedding of q and k, given and returned as transposed views, as transformers has them."""

    def providers() -> dict[str, Callable[[], Step]]:
        q = randn(batch, length, q_heads, dim).detach().transpose(1, 2).requires_grad_()
        k = randn(batch, length, k_heads, dim).detach().transpose(1, 2).requires_grad_()
        dq = randn(batch, length, q_heads, dim, grad=False).transpose(1, 2)
        dk = randn(batch, length, k_heads, dim, grad=False).transpose(1, 2)
        angles = torch.outer(torch.arange(length, device="cuda"), 1e4 ** (-torch.arange(0, 1, 2 / dim, device="cuda")))
        angles = torch.cat((angles, angles), -1)[None]
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

        def half(x: torch.Tensor) -> torch.Tensor:
            return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

        def eager(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            c, s = cos.unsqueeze(1), sin.unsqueeze(1)
            return q * c + half(q) * s, k * c + half(k) * s

        def liger() -> Step:
            from liger_kernel.ops.rope import LigerRopeFunction

            return step_of(lambda q, k: LigerRopeFunction.apply(q, k, cos, sin), [q, k], (dq, dk))

        def ours() -> Step:
            from liger_trainer.functional import rope

            return step_of(lambda q, k: rope(q, k, cos, sin), [q, k], (dq, dk))

        compiled = {name: (lambda f=f: step_of(f, [q, k], (dq, dk))) for name, f in _with_compile(eager).items()}
        return {**compiled, "liger": liger, "liger_trainer": ours}

    return Workload(providers, bytes=2 * 4 * batch * length * (q_heads + k_heads) * dim)


def gated(activation: str, rows: int, width: int) -> Workload:
    """SwiGLU or GeGLU (tanh) on separate gate and up."""

    def providers() -> dict[str, Callable[[], Step]]:
        leaf = [randn(rows, width), randn(rows, width)]
        dh = randn(rows, width, grad=False)

        def eager(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up

        def liger() -> Step:
            from liger_kernel.ops.geglu import LigerGELUMulFunction
            from liger_kernel.ops.swiglu import LigerSiLUMulFunction

            function = LigerSiLUMulFunction if activation == "swiglu" else LigerGELUMulFunction
            return step_of(function.apply, leaf, dh)

        def ours() -> Step:
            from liger_trainer import functional

            return step_of(getattr(functional, activation), leaf, dh)

        compiled = {name: (lambda f=f: step_of(f, leaf, dh)) for name, f in _with_compile(eager).items()}
        return {**compiled, "liger": liger, "liger_trainer": ours}

    return Workload(providers, bytes=2 * 8 * rows * width)


def cross_entropy(rows: int, vocab: int) -> Workload:
    """Cross entropy on given logits, mean."""

    def providers() -> dict[str, Callable[[], Step]]:
        logits = randn(rows, vocab)
        target = torch.randint(vocab, (rows,), device="cuda")

        def eager(logits: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(logits.float(), target)

        def liger() -> Step:
            from liger_kernel.transformers.functional import liger_cross_entropy

            return step_of(lambda x: liger_cross_entropy(x, target), [logits])

        def ours() -> Step:
            from liger_trainer.functional import cross_entropy

            return step_of(lambda x: cross_entropy(x, target), [logits])

        compiled = {name: (lambda f=f: step_of(f, [logits])) for name, f in _with_compile(eager).items()}
        return {**compiled, "liger": liger, "liger_trainer": ours}

    return Workload(providers, bytes=6 * rows * vocab)


def liger_linear_cross_entropy(target: torch.Tensor, softcap: float | None, chunk: int) -> Callable:
    """Liger's fused linear cross entropy as a function of hidden states and weight, with its `chunk_mem_const`."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    defaults = {name: p.default for name, p in list(inspect.signature(Function.forward).parameters.items())[1:]}
    given = {"target": target, "softcap": softcap, "chunk_mem_const": chunk}

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return Function.apply(*{**defaults, **given, "_input": x, "weight": weight}.values())[0]

    return call


def linear_cross_entropy(
    rows: int, hidden: int, vocab: int, softcap: float | None = None, frozen: bool = False
) -> Workload:
    """The LM head with its cross entropy, mean over the tokens; `frozen` leaves the head without a gradient."""

    def providers() -> dict[str, Callable[[], Step]]:
        x, weight = randn(rows, hidden), randn(vocab, hidden, scale=hidden**-0.5, grad=not frozen)
        target = torch.randint(vocab, (rows,), device="cuda")

        def eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            logits = F.linear(x, weight).float()
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            return F.cross_entropy(logits, target)

        def liger(chunk: int) -> Callable[[], Step]:
            return lambda: step_of(liger_linear_cross_entropy(target, softcap, chunk), [x, weight])

        def trl() -> Step:
            from trl.kernels.chunked_logprob import ChunkedLogProbFunction as Function

            outputs = ("log_probs",)
            call = lambda x, w: -Function.apply(x, w, None, target, 1.0, 32768, softcap, 1.0, outputs)[0].mean()  # noqa: E731
            return step_of(call, [x, weight])

        def ours(**options: int) -> Callable[[], Step]:
            def build() -> Step:
                from liger_trainer.functional import linear_cross_entropy

                return step_of(lambda x, w: linear_cross_entropy(x, w, target, softcap=softcap, **options), [x, weight])

            return build

        compiled = {"compile": lambda: step_of(torch.compile(eager), [x, weight])}
        return {
            **compiled,
            "liger C=1": liger(1),
            "liger C=8": liger(8),
            "trl": trl,
            "liger_trainer": ours(),
            "liger_trainer 1GiB": ours(logits_memory=2**30),
        }

    return Workload(providers, flops=(2 if frozen else 3) * 2 * rows * hidden * vocab)


WORKLOADS: dict[str, Workload] = {
    "rms_norm_4096": rms_norm(16384, 4096),
    "rms_norm_128": rms_norm(655360, 128),
    "rms_norm_16384": rms_norm(16384, 16384),
    "fused_add_rms_norm": fused_add_rms_norm(16384, 4096),
    "layer_norm": layer_norm(16384, 4096),
    "rope": rope(4, 4096, 32, 8, 128),
    "swiglu": gated("swiglu", 16384, 14336),
    "geglu": gated("geglu", 16384, 14336),
    "cross_entropy": cross_entropy(8192, 128256),
    "linear_ce_llama_8k": linear_cross_entropy(8192, 4096, 128256),
    "linear_ce_llama_32k": linear_cross_entropy(32768, 4096, 128256),
    "linear_ce_gemma": linear_cross_entropy(8192, 2560, 262208, softcap=30.0),
    "linear_ce_qwen": linear_cross_entropy(16384, 2048, 151936),
    "linear_ce_frozen": linear_cross_entropy(8192, 4096, 128256, frozen=True),
}
