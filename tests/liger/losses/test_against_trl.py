"""Values and gradients beside TRL's own loss code, which runs here on log-probabilities of an eager head in float64."""

from __future__ import annotations

import collections
import types
from typing import Any

import pytest
import torch
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from liger_trainer.liger.losses.preference_formulas import DPO_LOSSES
from liger_trainer.losses import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from tests.liger.losses.cases import (
    ALL_AT_ONCE,
    NOT_EVEN_ONE,
    ONE_PAIR,
    PAIRS,
    TOKENS,
    Batch,
    budget,
    gradients,
    make_batch,
)

BUDGETS = [budget(rows, torch.float64) for rows in (ALL_AT_ONCE, ONE_PAIR, NOT_EVEN_ONE)]


def _same(value: Any) -> Any:
    return value


def _trainer(**attributes: Any) -> Any:
    """What TRL's losses read of a trainer in one process."""
    accelerator = types.SimpleNamespace(
        device="cpu",
        num_processes=1,
        gather=_same,
        gather_for_metrics=_same,
        reduce=lambda value, reduction: value,
    )
    return types.SimpleNamespace(
        accelerator=accelerator,
        model=types.SimpleNamespace(training=True),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        current_gradient_accumulation_steps=1,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **attributes,
    )


def _model(log_probs: torch.Tensor) -> Any:
    """A model whose fused head returned these, and nothing else of interest."""
    zeros = torch.zeros_like(log_probs)
    outputs = types.SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    return lambda **_: outputs


def _inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """Token ids and masks, which have one position more than there are predictions."""
    mask = torch.nn.functional.pad(batch.mask.long(), (1, 0))
    ids = torch.nn.functional.pad(batch.target.clamp(min=0), (1, 0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}


def _compare(ours: tuple[torch.Tensor, Any], theirs: torch.Tensor, batch: Batch) -> None:
    assert theirs.dtype == torch.float64
    torch.testing.assert_close(ours[0], theirs, rtol=2e-7, atol=2e-7)  # TRL has temperatures in fp32
    torch.testing.assert_close(gradients(ours[0], batch), gradients(theirs, batch), rtol=2e-7, atol=2e-7)


def _compare_metrics(outputs: list[torch.Tensor], trainer: Any) -> None:
    """The log-probabilities, which come first, and the rewards, which come last."""
    names = "logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected"
    for name, output in zip(names, (*outputs[:2], *outputs[-2:])):
        assert trainer._metrics["train"][name] == pytest.approx([output.item()])


@pytest.mark.parametrize("memory", BUDGETS)
@pytest.mark.parametrize("loss_type", DPO_LOSSES)
def test_dpo(loss_type: str, memory: int) -> None:
    batch = make_batch()
    options = {"beta": 0.3, "label_smoothing": 0.2}
    theirs = {"aot_pair": "aot"}.get(loss_type, loss_type)
    trainer = _trainer(
        **options,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        loss_types=[theirs, "sft"],
        loss_weights=[1.0, 0.7],
        args=types.SimpleNamespace(discopop_tau=0.05),
    )
    ref_chosen, ref_rejected = batch.ref_log_probs().sum(-1).chunk(2)
    inputs = {**_inputs(batch), "ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected}
    expected = DPOTrainer._compute_loss(trainer, _model(batch.log_probs()), inputs, False)
    loss = LigerFusedLinearDPOLoss(
        loss_type=loss_type, compute_nll_loss=True, alpha=0.7, logits_memory=memory, **options
    )
    result = loss(batch.weight, batch.hidden, batch.target, batch.bias, *batch.reference)
    _compare(result, expected, batch)
    _compare_metrics([output.mean() for output in result[1]], trainer)
    given = loss(batch.weight, batch.hidden, batch.target, batch.bias, ref_log_probs=batch.ref_log_probs())
    torch.testing.assert_close(given[0], result[0])


@pytest.mark.parametrize("memory", BUDGETS)
def test_orpo(memory: int) -> None:
    odds_ratio_loss = pytest.importorskip("trl.experimental.orpo.orpo_trainer").ORPOTrainer.odds_ratio_loss
    batch = make_batch(torch.float32)  # TRL computes this one in fp32
    chosen, rejected = (batch.log_probs().sum(-1) / batch.mask.sum(-1)).chunk(2)
    ratios, *rewards, log_ratio, log_odds = odds_ratio_loss(_trainer(beta=0.3), chosen, rejected)
    everything = batch.target.masked_fill(~batch.mask, 7)  # as if the prompt were all sevens
    whole = Batch(*batch.leaves, everything, batch.ref_hidden, batch.ref_weight, batch.ref_bias)
    for nll_target, tokens in ((None, batch), (everything, whole)):
        nll = -tokens.log_probs()[:PAIRS].sum() / tokens.mask[:PAIRS].sum()
        expected = nll - ratios.mean()
        loss = LigerFusedLinearORPOLoss(beta=0.3, logits_memory=memory)
        result, outputs = loss(batch.weight, batch.hidden, batch.target, batch.bias, nll_target)
        torch.testing.assert_close(result, expected)
        theirs = torch.autograd.grad(expected * 1.5, batch.leaves, retain_graph=True)
        torch.testing.assert_close(gradients(result, batch), list(theirs))
        torch.testing.assert_close(outputs[:2], (chosen.detach(), rejected.detach()))
        torch.testing.assert_close(outputs[4:], (nll.detach(), *rewards, log_ratio.detach(), log_odds.detach()))


@pytest.mark.parametrize("memory", BUDGETS)
@pytest.mark.parametrize("kind", ["sigmoid", "simpo"])
def test_cpo_and_simpo(kind: str, memory: int) -> None:
    cpo_loss = pytest.importorskip("trl.experimental.cpo.cpo_trainer").CPOTrainer.cpo_loss
    batch = make_batch()
    log_probs = batch.log_probs()
    completions = log_probs.sum(-1) / (batch.mask.sum(-1) if kind == "simpo" else 1)
    trainer = _trainer(alpha=0.0, loss_type=kind, simpo_gamma=0.4, beta=0.8, label_smoothing=0.1)
    losses, *rewards = cpo_loss(trainer, *completions.chunk(2))
    nll = -log_probs[:PAIRS].sum() / batch.mask[:PAIRS].sum()
    options = {"beta": 0.8, "alpha": 0.6, "label_smoothing": 0.1, "logits_memory": memory}
    loss = LigerFusedLinearSimPOLoss(gamma=0.4, **options) if kind == "simpo" else LigerFusedLinearCPOLoss(**options)
    result = loss(batch.weight, batch.hidden, batch.target, batch.bias)
    _compare(result, losses.mean() + 0.6 * nll, batch)
    torch.testing.assert_close(result[1][4:], (nll.detach(), *rewards))


@pytest.mark.parametrize("memory", BUDGETS)
@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_kto(kind: str, memory: int) -> None:
    batch = make_batch()
    desirable = torch.tensor([1, 0, 1, 1, 0, 0]).bool()
    with_kl = kind == "kto"
    kl_logps, ref_kl_logps = torch.tensor([2.0, 1.0]).double(), torch.tensor([1.5, 0.6]).double()
    trainer = _trainer(
        beta=0.3,
        loss_type=kind,
        calculate_KL=with_kl,
        desirable_weight=1.0,
        undesirable_weight=1.0,
        _compute_kl_logps=lambda *_: kl_logps,
    )
    inputs = {**_inputs(batch), "label": desirable, "ref_logps": batch.ref_log_probs().sum(-1)}
    expected = KTOTrainer._compute_loss(
        trainer, _model(batch.log_probs()), {**inputs, "ref_KL_logps": ref_kl_logps}, False
    )
    loss = LigerFusedLinearKTOLoss(beta=0.3, use_ref_model=True, logits_memory=memory)
    kl = (kl_logps - ref_kl_logps).mean() if with_kl else None
    result = loss(batch.hidden, batch.weight, batch.target, batch.bias, desirable, *batch.reference, kl)
    _compare(result, expected, batch)
    _compare_metrics([total / 3 for total in result[1]], trainer)


POLICY_OPTIONS: list[dict[str, Any]] = [
    *({"loss_type": kind} for kind in ("grpo", "dapo", "bnpo", "dr_grpo", "luspo", "sapo", "vespo")),
    {"loss_type": "cispo", "epsilon_high": 1.2},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0},
    {"loss_type": "dapo", "delta": 1.1, "epsilon_high": 0.4},
    {"loss_type": "dapo", "use_bias_correction_kl": True},
]


@pytest.mark.parametrize("memory", BUDGETS)
@pytest.mark.parametrize("options", POLICY_OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_grpo(options: dict[str, Any], memory: int) -> None:
    batch = make_batch()
    defaults = {"beta": 0.1, "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token"}
    options = {**defaults, **options}
    rows = {"delta": None, "use_bias_correction_kl": False, **options}
    vespo = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    args = {"steps_per_generation": 1, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, **vespo}
    log_probs, generator = batch.log_probs(0.9), torch.Generator().manual_seed(1)
    noise = torch.randn(2, *log_probs.shape, generator=generator, dtype=torch.float64)
    old = log_probs.detach() + 0.3 * noise[0]
    sampling = torch.where(batch.mask, (0.2 * noise[1]).exp(), 1.0)
    advantages = torch.tensor([1.3, -0.7, 0.4, 2.0, -1.0, 0.0], dtype=torch.float64)
    trainer = _trainer(
        **{name: value for name, value in rows.items() if name not in ("delta", "use_bias_correction_kl")},
        args=types.SimpleNamespace(delta=rows["delta"], use_bias_correction_kl=rows["use_bias_correction_kl"], **args),
        max_completion_length=9,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(advantages), 1).long(),
        "prompt_mask": torch.ones(len(advantages), 1).long(),
        "completion_ids": batch.target.clamp(min=0),
        "completion_mask": batch.mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": batch.ref_log_probs(0.9),
        "importance_sampling_ratio": sampling,
        "num_items_in_batch": torch.tensor(17.0),
    }
    expected = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss = LigerFusedLinearGRPOLoss(temperature=0.9, max_completion_length=9, logits_memory=memory, **options)
    ids, mask = inputs["completion_ids"], inputs["completion_mask"]
    policy = batch.hidden, batch.weight, ids, mask, advantages, batch.bias
    result = loss(*policy, None, old, *batch.reference, sampling, torch.tensor(17))
    _compare(result, expected, batch)
    metrics = trainer._metrics["train"]
    assert len(result[1]) == (2 if options["beta"] else 1)
    if options["beta"] and options["importance_sampling_level"] == "token":
        assert metrics["kl"] == pytest.approx([result[1][0].item()])
    if "clip_ratio/region_mean" in metrics and "delta" not in options and len(result[1]) == 2:
        share = metrics["clip_ratio/region_mean"]
        assert options["importance_sampling_level"] == "sequence" or share == pytest.approx([result[1][1].item()])
    given = loss(*policy, batch.ref_log_probs(0.9), old, vllm_is_ratio=sampling, num_items_in_batch=17)
    torch.testing.assert_close(given[0], result[0])


def test_masks_have_gaps_and_lengths_differ() -> None:
    """What the comparisons above would be blind without."""
    assert make_batch().mask.sum(-1).tolist() == [3, 5, 5, 4, 5, 3]
    assert TOKENS == 5
