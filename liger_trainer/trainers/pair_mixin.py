"""What `LigerORPOTrainer` and `LigerCPOTrainer` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from liger_trainer.head.lm_head import without_adapters
from liger_trainer.trainers.pair_forward import IGNORE_INDEX
from liger_trainer.trainers.trl_mixin import LigerTRLMixin, wants_fused_head

if TYPE_CHECKING:
    from trl.experimental.orpo import ORPOTrainer

    class _Base(LigerTRLMixin, ORPOTrainer): ...
else:
    _Base = LigerTRLMixin


class PairMixin(_Base):
    """Installs the fused head, for which these trainers of TRL have no place of their own, and checks the pairs."""

    _fused = False
    """Whether the model answers with statistics; otherwise TRL's own `concatenated_forward` runs on its logits."""

    def _finish_init(self) -> None:
        if wants_fused_head(self.args) and not self.is_encoder_decoder:
            assert isinstance(self.model, nn.Module)
            self._add_fused_lm_head(without_adapters(self.model), outputs=("log_probs", "mean_logits"))
            self._fused = True
        super()._finish_init()

    def _averages(self) -> bool:
        """Whether the loss takes the average over a completion's tokens, which 0 / 0 is without any."""
        return True

    def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
        """TRL's tokenisation of a pair.

        Raises:
            ValueError: for a completion without a token where the loss averages over its tokens.
        """
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
