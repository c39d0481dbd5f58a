"""`LigerORPOTrainer` and `LigerCPOTrainer`: one forward of chosen and rejected sequences, without logits.

TRL's ORPO and CPO trainers build the logits of every token in `concatenated_forward`, and take log-probabilities and a
mean from them, which they log. So every token is scored; the last of a row, which predicts nothing, for any target. The
logged mean is over the tokens. TRL's is over padding too, so it changes with the length of the longest row.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from trl.import_utils import suppress_experimental_warning

from liger_trainer.compat.private import require
from liger_trainer.compat.trl import CPO_PAIRS, ORPO_PAIRS
from liger_trainer.configs.trl_experimental_configs import LigerCPOConfig, LigerORPOConfig
from liger_trainer.head.lm_head import without_adapters
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX
from liger_trainer.trainers.base import parameters_of
from liger_trainer.trainers.trl_mixin import LigerTRLMixin, wants_fused_head

with suppress_experimental_warning():
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

if TYPE_CHECKING:

    class _Base(LigerTRLMixin, ORPOTrainer): ...
else:
    _Base = LigerTRLMixin


@dataclasses.dataclass(frozen=True)
class PairForward:
    """Statistics of B pairs padded to a common length L, the chosen sequences before the rejected ones."""

    log_probs: torch.Tensor  # `(2B, L - 1)`, fp32, of the token after each position; differentiable
    mean_logits: torch.Tensor  # `(2B, L)`, fp32, mean over the vocabulary at each position; 0 at padding
    counts: torch.Tensor  # `(2B, L)`, 1 for a token, 0 for padding
    is_token: torch.Tensor  # `(2B, L - 1)`, bool, whether the position after this one is not padding
    is_completion: torch.Tensor  # `(2B, L - 1)`, bool, whether it is part of the completion
    aux_loss: torch.Tensor | None  # the load-balancing loss, if the model is a mixture of experts that computes one

    def completion_log_probs(self, average: bool) -> torch.Tensor:
        """Log-probability of each completion, `(2B,)`: the sum over its tokens, or their average."""
        total = self.log_probs.masked_fill(~self.is_completion, 0.0).sum(-1)
        return total / self.is_completion.sum(-1) if average else total

    def chosen_nll(self, of: torch.Tensor) -> torch.Tensor:
        """Mean negative log-likelihood of the chosen sequences, over the tokens in the mask `of` `(2B, L - 1)`.

        Without such a token it is a zero that backpropagates, where TRL's is NaN.
        """
        log_probs, of = self.log_probs.chunk(2)[0], of.chunk(2)[0]
        return -log_probs.masked_fill(~of, 0.0).sum() / of.sum().clamp(min=1)

    def results(self, log_probs: torch.Tensor, positions: int, nll: torch.Tensor) -> tuple:
        """What `concatenated_forward` returns, with the means of the logits in place of the logits.

        TRL takes nothing but the mean from them. It unpacks the tuple by position, in this order.
        """
        sums, counts = (each[:, :positions].sum(-1).chunk(2) for each in (self.mean_logits, self.counts))
        means = (total.sum() / count.sum() for total, count in zip(sums, counts))
        aux_loss = () if self.aux_loss is None else (self.aux_loss,)
        return (*log_probs.chunk(2), *means, nll, *aux_loss)


def forward_pairs(
    trainer: ORPOTrainer | CPOTrainer, model: nn.Module, batch: dict[str, Any], padding_value: int
) -> PairForward:
    """One forward of `model`, which has the fused head, on the pairs of `batch` as `trainer` concatenates them."""
    pairs = trainer.concatenated_inputs(
        batch, is_encoder_decoder=False, padding_value=padding_value, device=trainer.accelerator.device
    )
    input_ids, attention_mask = pairs["concatenated_input_ids"], pairs["concatenated_attention_mask"]
    router_logits = {"output_router_logits": True} if trainer.aux_loss_enabled else {}
    outputs = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        shift_labels=input_ids.roll(-1, dims=1).masked_fill(attention_mask == 0, IGNORE_INDEX),
        fused_lm_head=True,
        use_cache=False,
        **router_logits,
    )
    return PairForward(
        log_probs=outputs.log_probs[:, :-1],
        mean_logits=outputs.mean_logits,
        counts=attention_mask,
        is_token=attention_mask[:, 1:] == 1,
        is_completion=pairs["concatenated_labels"][:, 1:] != IGNORE_INDEX,
        aux_loss=outputs.aux_loss if trainer.aux_loss_enabled else None,
    )


class _Mapped(dict[str, Any]):
    """Several data sets by name, mapped together; TRL calls `map` of what it is given for evaluation."""

    def map(self, *args: Any, **kwargs: Any) -> _Mapped:
        return _Mapped({name: dataset.map(*args, **kwargs) for name, dataset in self.items()})


class PairMixin(_Base):
    """Installs the fused head, which these trainers of TRL do not have, and checks the pairs."""

    _fused = False
    """Whether the model returns statistics; otherwise TRL's own `concatenated_forward` runs on its logits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super(LigerTRLMixin, self).__init__).bind(*args, **kwargs)
        if isinstance(given.arguments.get("eval_dataset"), dict):
            given.arguments["eval_dataset"] = _Mapped(given.arguments["eval_dataset"])
        super().__init__(*given.args, **given.kwargs)

    def _finish_init(self) -> None:
        if wants_fused_head(self.args) and not self.is_encoder_decoder:
            self._add_fused_lm_head(without_adapters(self.model), outputs=("log_probs", "mean_logits"))
            self._fused = True
        super()._finish_init()

    def _averages(self) -> bool:
        """Whether the loss averages over the tokens of a completion, and so cannot take one without tokens."""
        return True

    def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
        """TRL's tokenisation of a pair."""
        row = super().tokenize_row(feature, model)
        if self.is_encoder_decoder or not self._averages():
            return row
        for side in ("chosen", "rejected"):
            if all(label == IGNORE_INDEX for label in row[f"{side}_labels"][1:]):
                raise ValueError(
                    f"`{side}` has no token left in the pair with the prompt {feature['prompt'][:80]!r}: both are cut "
                    f"to `max_length={self.max_length}` tokens, and this loss averages over a completion's tokens. "
                    "Increase `max_length`, or leave out prompts this long."
                )
        return row


class LigerORPOTrainer(PairMixin, ORPOTrainer):
    """[`~trl.experimental.orpo.ORPOTrainer`] with the kernels in the model and our fused LM head.

    Takes the same arguments; `args` is a [`LigerORPOConfig`], or an `ORPOConfig`, with which the kernels are on. Loss
    and metrics are TRL's own code on log-probabilities; the logits, which TRL builds, are not. An encoder-decoder model
    trains as in TRL, with the kernels that fit its layers.

    Raises:
        ValueError: for a completion without tokens, whose average log-probability does not exist, for several GPUs in
            one process (`nn.DataParallel`), for a wrong kernel configuration, and with `strict_kernels` for a kernel
            that cannot be applied.
    """

    config_class = LigerORPOConfig
    padding_value: int  # TRL's

    @parameters_of(ORPOTrainer.__init__, LigerORPOConfig)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require(ORPO_PAIRS)
        super().__init__(*args, **kwargs)

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple:
        """One forward on all pairs; returns what TRL's method does, with the mean logits in place of the logits."""
        if not self._fused:
            return super().concatenated_forward(model, batch)
        pairs = forward_pairs(self, model, batch, self.padding_value)
        # The loss of the chosen sequences includes the prompt (Hong et al. 2024, arXiv:2403.07691).
        nll = pairs.chosen_nll(pairs.is_token)
        return pairs.results(pairs.completion_log_probs(average=True), pairs.mean_logits.shape[1] - 1, nll)


class LigerCPOTrainer(PairMixin, CPOTrainer):
    """[`~trl.experimental.cpo.CPOTrainer`] (CPO, SimPO, AlphaPO) with the kernels in the model and our fused LM head.

    Takes the same arguments; `args` is a [`LigerCPOConfig`], or a `CPOConfig`, with which the kernels are on. Loss
    types, options and metrics are TRL's own code on log-probabilities; the logits, which TRL builds, are not. An
    encoder-decoder model trains as in TRL, with the kernels that fit its layers.

    Raises:
        ValueError: for a completion without tokens where the loss type averages over them ("ipo", "simpo", "alphapo"),
            for several GPUs in one process (`nn.DataParallel`), for a wrong kernel configuration, and with
            `strict_kernels` for a kernel that cannot be applied.
    """

    config_class = LigerCPOConfig
    pad_token_id: int  # TRL's

    @parameters_of(CPOTrainer.__init__, LigerCPOConfig)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require(CPO_PAIRS)
        super().__init__(*args, **kwargs)

    def _averages(self) -> bool:
        return self.loss_type in ("ipo", "simpo")

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple:
        """One forward on all pairs; returns what TRL's method does, with the mean logits in place of the logits."""
        if not self._fused:
            return super().concatenated_forward(model, batch)
        pairs = forward_pairs(self, model, batch, self.pad_token_id)
        nll = pairs.log_probs.new_zeros(()) if self.cpo_alpha == 0 else pairs.chosen_nll(pairs.is_completion)
        return pairs.results(pairs.completion_log_probs(self._averages()), pairs.mean_logits.shape[1], nll)
