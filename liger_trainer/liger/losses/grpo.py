"""The GRPO family: policy losses of logits, and over a head whose logits exist one chunk of tokens at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from liger_trainer.configs.loss_types import POLICY_LOSS_TYPES, divided_by
from liger_trainer.functional import grpo_loss
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX
from liger_trainer.liger.losses.pairs import LOGITS_MEMORY, check_sequences, check_shape, reference_log_probs
from liger_trainer.liger.nn.losses import OptionsModule
from liger_trainer.liger.operators.grpo_loss import GRPOLossOutput, PolicyOptions, policy_loss, token_weights
from liger_trainer.liger.operators.linear_grouped_loss import linear_grouped_loss


def items_per_process(
    num_items_in_batch: int | float | torch.Tensor | None, mask: torch.Tensor | None, tokens: torch.Tensor
) -> torch.Tensor | float:
    """The items of the whole batch, by default the valid tokens of all processes, divided by the processes."""
    import torch.distributed as dist

    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_items_in_batch is not None:
        return num_items_in_batch / processes
    valid = (torch.ones_like(tokens) if mask is None else mask != 0).sum().to(torch.float32)
    if processes > 1:
        dist.all_reduce(valid)
    return valid / processes


def triton_grpo_loss(
    logits: torch.Tensor,
    old_logp: torch.Tensor | None,
    ref_logp: torch.Tensor | None,
    completion_ids: torch.Tensor,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = False,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: torch.Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: int | float | torch.Tensor | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> Any:
    """[`liger_trainer.functional.grpo_loss`] with Liger's arguments and results.

    Unlike in Liger, `inplace` is False by default: the caller's logits are not overwritten. "luspo" sums the losses of
    a sequence whatever its padding.

    Arguments of other names are `old_logp` and `ref_logp` (`old_log_probs`, `ref_log_probs`), `eps_low` and `eps_high`
    (`epsilon_low`, `epsilon_high`), `inplace` (`inplace_backward`) and `vllm_is_ratio` (`sampling_ratio`). `reduce`
    says whether the loss is reduced, `num_items_in_batch` is the number of tokens of the whole batch, over all
    processes.

    Returns:
        With `reduce` the loss and a list of the mean KL, if there is a `beta`, and the clipped share; else the losses,
        KLs (or None) and clipped marks of all tokens.

    Raises:
        ValueError: for a shape or option that is not allowed.
    """
    items = None
    if reduce and divided_by(loss_type) == "step":
        items = items_per_process(num_items_in_batch, completion_mask, completion_ids)
    result = grpo_loss(
        *(logits, completion_ids, advantages, completion_mask, old_logp, ref_logp, temperature, inplace),
        *(loss_type, importance_sampling_level, eps_low, eps_high, delta, beta, use_bias_correction_kl),
        *(vllm_is_ratio, sapo_temperature_pos, sapo_temperature_neg),
        *(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg),
        *(max_completion_length, items, "mean" if reduce else "none"),
    )
    if not reduce:
        return result.loss, result.kl, result.clipped
    return result.loss, [metric for metric in (result.kl, result.clipped) if metric is not None]


@dataclasses.dataclass(eq=False, repr=False)
class LigerFusedLinearGRPOLoss(OptionsModule):
    """GRPO, DAPO, BNPO, Dr. GRPO, LUSPO, CISPO, SAPO and VESPO over a head.

    Formulas and options are those of [`liger_trainer.functional.grpo_loss_from_log_probs`], and these:

    - `temperature`: Divides the logits of policy and reference, above 0;
    - `use_ref_model`: Whether there is a reference for the penalty. Without one it is 0, as is its gradient;
    - `logits_memory`: Bytes of logits at a time, 1 GiB by default. A head that is trained costs three matmuls; four
      where the loss couples the tokens of a completion ("vespo", or ratios of sequences) whose logits do not fit;
    - `compiled` and `chunk_size`: No effect: chunks are planned by memory.

    Raises:
        ValueError: For an option that is not allowed or does not fit the loss type.
    """

    beta: float = 0.04
    compiled: bool = True
    use_ref_model: bool = True
    chunk_size: int = 1
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"
    max_completion_length: int | None = None
    importance_sampling_level: str = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    temperature: float = 1.0
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    logits_memory: int = LOGITS_MEMORY

    def __post_init__(self) -> None:
        self._options()  # checks them

    def _options(self) -> PolicyOptions:
        return PolicyOptions(**{field.name: getattr(self, field.name) for field in dataclasses.fields(PolicyOptions)})

    def forward(
        self,
        _input: torch.Tensor,
        lin_weight: torch.Tensor,
        selected_token_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        advantages: torch.Tensor,
        bias: torch.Tensor | None = None,
        ref_per_token_logps: torch.Tensor | None = None,
        old_per_token_logps: torch.Tensor | None = None,
        ref_input: torch.Tensor | None = None,
        ref_weight: torch.Tensor | None = None,
        ref_bias: torch.Tensor | None = None,
        vllm_is_ratio: torch.Tensor | None = None,
        num_items_in_batch: int | float | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The loss of completions.

        Args:
            _input: `(batch, tokens, hidden)`, such that a position predicts the token at its place.
            lin_weight: `(vocab, hidden)`.
            selected_token_ids: `(batch, tokens)`.
            attention_mask: `(batch, tokens)`, 0 where a token does not count, whatever the other tensors hold there.
            advantages: `(batch,)`, `(batch, 1)` or `(batch, tokens)`. A NaN among those of tokens that count makes the
                loss NaN.
            bias: `(vocab,)`.
            ref_per_token_logps: `(batch, tokens)` of the reference, at the same temperature.
            old_per_token_logps: `(batch, tokens)` of the policy that sampled; by default the policy itself.
            ref_input: `(batch, tokens, hidden)` of the reference model, read where `ref_per_token_logps` is None.
            ref_weight: `(vocab, hidden)`, its head, which gets no gradient.
            ref_bias: `(vocab,)`.
            vllm_is_ratio: `(batch,)`, `(batch, 1)` or `(batch, tokens)`, corrects for a sampler that was not the old
                policy.
            num_items_in_batch: Tokens of the whole batch, over all processes, which divides "dapo", "cispo" and
                "vespo"; by default it is counted.

        Returns:
            The loss, and a tuple without a gradient: the mean KL penalty, unless `beta` is 0, and the share of the
            tokens that count whose ratio is clipped.

        Raises:
            ValueError: For a shape or dtype that is not allowed, or where the reference is missing.
        """
        check_sequences(_input, selected_token_ids, "_input", "selected_token_ids")
        batch, length = selected_token_ids.shape
        check_shape("attention_mask", attention_mask, (batch, length))
        check_shape("advantages", advantages, (batch,), (batch, 1), (batch, length))
        check_shape("ref_per_token_logps", ref_per_token_logps, (batch, length))
        check_shape("old_per_token_logps", old_per_token_logps, (batch, length))
        check_shape("vllm_is_ratio", vllm_is_ratio, (batch,), (batch, 1), (batch, length))
        mask = attention_mask != 0
        labels = torch.where(mask, selected_token_ids, IGNORE_INDEX)
        reference = None
        if self.beta != 0.0 and self.use_ref_model:
            reference = ref_per_token_logps
            if reference is None:
                reference = reference_log_probs(
                    *(ref_input, ref_weight, ref_bias, labels, IGNORE_INDEX, self.temperature, self.logits_memory)
                )
        tokens = {
            "advantages": advantages.view(batch, -1),
            "completion_mask": mask,
            "old_log_probs": old_per_token_logps,
            "ref_log_probs": reference,
            "sampling_ratio": None if vllm_is_ratio is None else vllm_is_ratio.view(batch, -1),
        }
        items = None
        if divided_by(self.loss_type) == "step":
            items = items_per_process(num_items_in_batch, mask, selected_token_ids)
        dtype = torch.float64 if _input.dtype == torch.float64 else torch.float32
        weights = token_weights(mask, self._options(), items, dtype)
        by_sequence = self.importance_sampling_level == "sequence"
        couples_tokens = by_sequence or POLICY_LOSS_TYPES[self.loss_type].couples_tokens
        row = length if couples_tokens else 1  # tokens that the formula sees as a completion
        parts = {**tokens, "weights": weights.expand(batch, 1)}
        if not couples_tokens:
            parts = {name: _by_token(tensor, length) for name, tensor in parts.items()}

        def formula(log_probs: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            some = slice(start // row, stop // row)
            part = {name: None if tensor is None else tensor[some] for name, tensor in parts.items()}
            factors = part.pop("weights")
            assert factors is not None
            return (self._policy_loss(log_probs.view(-1, row), part, "none").loss * factors).sum()

        result = linear_grouped_loss(
            _input.reshape(-1, _input.shape[-1]),
            lin_weight,
            labels.reshape(-1),
            formula,
            group=row,
            normalizer=1.0 / weights.amax(),
            bias=bias,
            ignore_index=IGNORE_INDEX,
            temperature=self.temperature,
            logits_memory=self.logits_memory,
        )
        with torch.no_grad():
            seen = self._policy_loss(result.log_probs.view(batch, length), tokens, "mean")
        return result.loss, ((seen.clipped,) if seen.kl is None else (seen.kl, seen.clipped))

    def _policy_loss(self, log_probs: torch.Tensor, tokens: dict[str, Any], reduction: str) -> GRPOLossOutput:
        """`policy_loss` of completions; `tokens` are its tensors, by name."""
        if tokens["ref_log_probs"] is None:
            tokens = {**tokens, "ref_log_probs": log_probs.detach()}
        return policy_loss(log_probs, **tokens, options=self._options(), reduction=reduction)


def _by_token(tensor: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """`(batch, 1)` or `(batch, length)` as `(batch * length, 1)`: every token a completion of its own."""
    return None if tensor is None else tensor.expand(-1, length).reshape(-1, 1)
