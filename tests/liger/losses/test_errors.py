"""Errors of the alignment losses: each names the argument and what would be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liger_trainer import losses
from tests.liger.losses.cases import TOKENS, VOCAB, make_batch
from tests.liger.losses.test_losses import ADVANTAGES, DESIRABLE, _arguments


def _changed(loss: Any, **changes: Any) -> Any:
    """A call of a loss with some arguments of a good call replaced."""
    batch = make_batch()
    good = {
        "lin_weight": batch.weight,
        "_input": batch.hidden,
        "target": batch.target,
        "bias": batch.bias,
        "ref_input": batch.ref_hidden,
        "ref_weight": batch.ref_weight,
        "preference_labels": DESIRABLE,
        "selected_token_ids": batch.target.clamp(min=0),
        "attention_mask": batch.mask,
        "advantages": ADVANTAGES,
    }
    known = _arguments(loss.forward)
    return loss(**{name: value for name, value in {**good, **changes}.items() if name in known})


_DPO, _ORPO, _KTO, _GRPO = (
    *(losses.LigerFusedLinearDPOLoss, losses.LigerFusedLinearORPOLoss),
    *(losses.LigerFusedLinearKTOLoss, losses.LigerFusedLinearGRPOLoss),
)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: _DPO(loss_type="dpo"), ["`loss_type`", "'dpo'", "'sigmoid'", "'aot_unpaired'"]),
        (lambda: _DPO(label_smoothing=1.5), ["`label_smoothing`", "1.5", "[0, 1]"]),
        (lambda: _DPO(loss_type="robust", label_smoothing=0.5), ["`label_smoothing`", "'robust'", "0.5"]),
        (lambda: _DPO(loss_type="exo_pair"), ["`label_smoothing`", "'exo_pair'", "1e-3"]),
        (lambda: _DPO(loss_type="ipo", beta=0.0), ["`beta`", "'ipo'", "above 0"]),
        (lambda: _DPO(discopop_tau=0.0), ["`discopop_tau`", "above 0"]),
        (lambda: losses.LigerFusedLinearSimPOLoss(label_smoothing=-0.1), ["`label_smoothing`", "-0.1"]),
        (lambda: _GRPO(loss_type="ppo"), ["`loss_type`", "'ppo'", "'vespo'"]),
        (lambda: _GRPO(delta=0.0), ["`delta`", "above 0"]),
        (lambda: _GRPO(loss_type="cispo", importance_sampling_level="sequence"), ["'cispo'", "'token'"]),
        (lambda: _changed(_DPO(), _input=torch.zeros(5, TOKENS, 8)), ["`_input`", "`target`", "(5, 5, 8)"]),
        (
            lambda: _changed(_DPO(), _input=torch.zeros(5, TOKENS, 8), target=torch.zeros(5, TOKENS).long()),
            ["`target`", "5 completions", "even"],
        ),
        (lambda: _changed(_DPO(), _input=torch.zeros(30, 8)), ["`_input`", "(batch, tokens, hidden)"]),
        (
            lambda: _changed(_DPO(), _input=torch.zeros(0, TOKENS, 8), target=torch.zeros(0, TOKENS).long()),
            ["`_input`", "at least one token"],
        ),
        (lambda: _changed(_DPO(), ref_input=None), ["`ref_input`", "use_ref_model=False"]),
        (lambda: _changed(_DPO(), ref_input=torch.zeros(6, 4, 6)), ["`ref_input`", "(6, 4, 6)", "`target`"]),
        (lambda: _changed(_DPO(), ref_log_probs=torch.zeros(6)), ["`ref_log_probs`", "(6,)", "(6, 5)"]),
        (lambda: _changed(_DPO(), lin_weight=torch.zeros(VOCAB, 7).double()), ["(33, 7)", "must be (..., H)"]),
        (lambda: _changed(_DPO(logits_memory=0)), ["`logits_memory`", "at least 1 byte"]),
        (lambda: _changed(_ORPO(), nll_target=torch.zeros(6, 4).long()), ["`nll_target`", "(6, 4)", "(6, 5)"]),
        (
            lambda: _changed(_ORPO(), nll_target=(make_batch().target + 1) % VOCAB),
            ["`nll_target`", "different labels", "`ignore_index`"],
        ),
        (lambda: _changed(_KTO(), preference_labels=None), ["`preference_labels`", "True"]),
        (lambda: _changed(_KTO(), preference_labels=DESIRABLE[:5]), ["`preference_labels`", "(5,)", "(6,)"]),
        (lambda: _changed(_KTO(), kl=torch.zeros(5)), ["`kl`", "(5,)", "(6,) or (1,) or ()"]),
        (lambda: _changed(_GRPO(), advantages=ADVANTAGES[:5]), ["`advantages`", "(5,)", "(6,) or (6, 1) or (6, 5)"]),
        (lambda: _changed(_GRPO(), old_per_token_logps=torch.zeros(6)), ["`old_per_token_logps`", "(6,)", "(6, 5)"]),
        (lambda: _changed(_GRPO(), ref_per_token_logps=torch.zeros(6, 4)), ["`ref_per_token_logps`", "(6, 4)"]),
        (lambda: _changed(_GRPO(), vllm_is_ratio=torch.zeros(5)), ["`vllm_is_ratio`", "(5,)"]),
        (lambda: _changed(_GRPO(), attention_mask=torch.ones(6)), ["`attention_mask`", "(6,)", "(6, 5)"]),
        (lambda: _changed(_GRPO(), ref_input=None), ["`ref_input`", "use_ref_model=False"]),
        (lambda: _changed(_GRPO(temperature=0.0), ref_per_token_logps=torch.zeros(6, 5)), ["`temperature`", "0.0"]),
    ],
)
def test_errors_say_what_is_wrong(call: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        call()
    assert all(word in str(error.value) for word in words), str(error.value)
