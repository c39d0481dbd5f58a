"""The base class for distillation losses of one's own, with the hook and the arguments of Liger's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LigerFusedLinearDistillationBase(torch.autograd.Function):
    """A distillation loss over two heads, in chunks of tokens, so that only one chunk of logits exists at a time.

    A subclass defines `distillation_loss_fn` as a static method, and a `forward` that calls the one here with
    ``cls=cls, ctx=ctx`` and tensors and options by name. In plain torch; the losses of [`liger_trainer.losses`] have
    kernels and do not come from it.
    """

    @staticmethod
    def distillation_loss_fn(student_logits: Tensor, teacher_logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The sum of the losses of a chunk, of logits, (tokens, vocab), divided by the temperature."""
        raise NotImplementedError("A subclass of LigerFusedLinearDistillationBase defines `distillation_loss_fn`.")

    @staticmethod
    def forward(  # type: ignore[override]
        cls: type[LigerFusedLinearDistillationBase],
        ctx: Any,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        target: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        chunk_size: int = 1024,
        ignore_index: int = -100,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        compute_ce_loss: bool = True,
        temperature: float = 1.0,
        compiled: bool = True,
        return_soft_hard_loss: bool = False,
        **loss_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The weighted sum of both losses, each divided by the number of tokens that count.

        Tensors and options are those of [`liger_trainer.nn.LigerFusedLinearJSDLoss`], with `target` for the labels. The
        subclass is `cls`, and the soft loss its `distillation_loss_fn`, which gets `beta` and `loss_kwargs`.
        `chunk_size` is the number of tokens of one chunk, and `compute_ce_loss` says whether the cross entropy counts.
        """
        if student_weight.shape[0] != teacher_weight.shape[0]:
            raise ValueError(
                f"`student_weight` has {student_weight.shape[0]} rows and `teacher_weight` {teacher_weight.shape[0]}; "
                "they must be equal."
            )
        valid = (target != ignore_index).sum().clamp(min=1)
        grad_input, grad_weight = torch.zeros_like(student_input), torch.zeros_like(student_weight)
        grad_bias = None if student_bias is None else torch.zeros_like(student_bias)
        hard, soft = (torch.zeros((), dtype=torch.float32, device=student_input.device) for _ in range(2))
        weight = student_weight.detach().requires_grad_()
        bias = None if student_bias is None else student_bias.detach().requires_grad_()
        for start in range(0, student_input.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            hidden = student_input[rows].detach().requires_grad_()
            teacher = torch.nn.functional.linear(teacher_input[rows], teacher_weight, teacher_bias).detach()
            with torch.enable_grad():
                logits = torch.nn.functional.linear(hidden, weight, bias)
                soft_chunk = cls.distillation_loss_fn(
                    *(logits / temperature, teacher / temperature),
                    target=target[rows],
                    ignore_index=ignore_index,
                    beta=beta,
                    **loss_kwargs,
                )
                hard_chunk = soft_chunk.new_zeros(())
                if compute_ce_loss and (weight_hard_loss != 0 or return_soft_hard_loss):
                    hard_chunk = torch.nn.functional.cross_entropy(
                        logits.float(), target[rows], ignore_index=ignore_index, reduction="sum"
                    )
                loss = (weight_hard_loss * hard_chunk + weight_soft_loss * soft_chunk) / valid
            found = torch.autograd.grad(loss, [leaf for leaf in (hidden, weight, bias) if leaf is not None])
            grad_input[rows] = found[0]
            grad_weight += found[1]
            if grad_bias is not None:
                grad_bias += found[2]
            hard += hard_chunk.detach() / valid
            soft += soft_chunk.detach() / valid
        ctx.save_for_backward(grad_input, grad_weight, grad_bias)
        total = weight_hard_loss * hard + weight_soft_loss * soft
        return (total, soft, hard) if return_soft_hard_loss else total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *args: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradients of the first six tensors of `forward`; a subclass adds None for its further arguments."""
        hidden, weight, bias = (None if value is None else value * grad_output for value in ctx.saved_tensors)
        return hidden, weight, None, None, None, bias
