"""Losses of a user's own on the per-token statistics: a subclass of our SFT trainer trains as one of TRL's does."""

from __future__ import annotations

import contextlib
import io
import pickle
import types
from typing import Any

import pytest
import torch
import trl.trainer.sft_trainer as trl_sft_trainer
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from liger_trainer.configs.trl_configs import LigerSFTConfig
from liger_trainer.kernels.head import linear_log_probs as expected_gradients
from liger_trainer.trainers.fused_forward import SummedLogProbs, _SignedPart
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trl_mixin import own_fused_head
from tests.trainers.parity import lora, naive_fused_head
from tests.trainers.tiny import COMMON, gemma2, llama, mixtral, text_dataset, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


def weighted(outputs: Any) -> torch.Tensor:
    """Another weight for every token, of which some are 0."""
    weights = torch.linspace(0.0, 2.0, outputs.log_probs.numel()).view_as(outputs.log_probs) * outputs.label_mask
    return -(outputs.log_probs * weights).sum() / weights.sum()


def focal(outputs: Any) -> torch.Tensor:
    return (-outputs.log_probs * (1.0 - outputs.log_probs.exp()).square()).sum() / outputs.label_mask.sum()


def entropy_bonus(outputs: Any) -> torch.Tensor:
    return outputs.loss - 0.1 * outputs.entropy.sum() / outputs.label_mask.sum()


def entropy_alone(outputs: Any) -> torch.Tensor:
    return -outputs.entropy.sum() / outputs.label_mask.sum()


def masked_mean(outputs: Any) -> torch.Tensor:
    """Alike for all labels, in a way that only the values of the gradient show."""
    return -outputs.log_probs[outputs.label_mask].mean()


LOSSES = {loss.__name__: loss for loss in (weighted, focal, entropy_bonus, entropy_alone, masked_mean)}


class OwnLoss:
    """A trainer that takes the loss of the fused outputs itself, as TRL's documentation says."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return self.of_outputs(model(**inputs, use_cache=False, fused_lm_head=True))  # type: ignore[attr-defined]


class Capture:
    """Stands for a model and keeps what it returned."""

    def __init__(self, model: Any) -> None:
        self.model, self.outputs = model, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.outputs = self.model(*args, **kwargs)
        return self.outputs


class MoreThanTheirs:
    """A trainer that adds a term to the loss of the trainer below, of the outputs that one got."""

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        model = Capture(model)
        loss = super().compute_loss(model, inputs, **kwargs)  # type: ignore[misc]
        return loss + self.of_outputs(model.outputs)  # type: ignore[attr-defined]


class Replace(Capture):
    """Stands for a model whose tokens weigh differently."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().__call__(*args, **kwargs)
        outputs.log_probs = outputs.log_probs * torch.linspace(0.5, 1.0, outputs.log_probs.shape[-1])
        return outputs


class ReplacedInTheirs:
    """A trainer whose trainer below gets other log-probabilities than the model's."""

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        return super().compute_loss(Replace(model), inputs, **kwargs)  # type: ignore[misc]


class Gradients(TrainerCallback):
    """Keeps the gradients of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = model.named_parameters()
        self.steps.append({name: p.grad.detach().clone() for name, p in named if p.grad is not None})


def build(bases: tuple[type, ...], tmp_path: Any, of_outputs: Any = None, **case: Any) -> Any:
    """A trainer of these bases that takes two steps."""
    model, peft_config = case.pop("model", llama)(), case.pop("peft_config", None)
    ours, naive = LigerSFTTrainer in bases, case.pop("naive", False)
    config = LigerSFTConfig if ours else SFTConfig
    defaults = {**COMMON, "max_steps": 2, "bf16": False, "gradient_checkpointing": False, "max_grad_norm": 0.0}
    args = config(output_dir=str(tmp_path), optim="sgd", **{**defaults, **case})
    trainer_class: Any = types.new_class("Own", bases)
    if of_outputs is not None:
        trainer_class.of_outputs = staticmethod(of_outputs)
    torch.manual_seed(0)
    head = own_fused_head(trl_sft_trainer, naive_fused_head) if naive and not ours else contextlib.nullcontext()
    with head:
        return trainer_class(
            model, args, train_dataset=text_dataset(), processing_class=tokenizer(), peft_config=peft_config
        )


def train(
    bases: tuple[type, ...], tmp_path: Any, of_outputs: Any = None, **case: Any
) -> tuple[list[float], list[dict]]:
    """The losses and gradients of the steps of such a trainer."""
    trainer, gradients = build(bases, tmp_path, of_outputs, **case), Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], gradients.steps


def assert_same(ours: Any, stock: Any, tolerance: float = 1e-4) -> None:
    assert ours[0] == pytest.approx(stock[0], rel=tolerance, abs=tolerance)
    assert len(ours[0]) == len(ours[1]) == 2
    for left, right in zip(ours[1], stock[1], strict=True):
        assert left.keys() == right.keys()
        largest = max(gradient.norm() for gradient in right.values())
        for name, gradient in right.items():
            assert gradient.isfinite().all()
            assert (left[name] - gradient).norm() <= tolerance * (gradient.norm() + 1e-2 * largest), name


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"model": lambda: llama(tie_word_embeddings=True)},
    "softcap": {"model": gemma2},
    "moe": {"model": mixtral},
    "lora": {"peft_config": lora()},
    "lora on the head": {"peft_config": lora("q_proj", "lm_head"), "naive": True},  # TRL's own head refuses
    "saved head": {"peft_config": lora("q_proj", modules_to_save=["lm_head"])},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16 autocast": {"bf16": True, "tolerance": 0.05},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss", LOSSES)
def test_own_loss(loss: str, case: str, tmp_path: Any) -> None:
    options = dict(CASES[case])
    tolerance = options.pop("tolerance", 1e-4)
    stock = train((OwnLoss, SFTTrainer), tmp_path / "stock", LOSSES[loss], **options)
    ours = train((OwnLoss, LigerSFTTrainer), tmp_path / "ours", LOSSES[loss], **options)
    assert_same(ours, stock, tolerance)


@pytest.mark.parametrize("case", ["plain", "softcap", "lora", "lora on the head", "bf16 autocast"])
@pytest.mark.parametrize("loss", LOSSES)
def test_more_than_the_loss_of_the_trainer(loss: str, case: str, tmp_path: Any) -> None:
    """Where the gradients at the head were made in the forward, for the trainer's own loss alone."""
    options = dict(CASES[case])
    tolerance = options.pop("tolerance", 1e-4)
    stock = train((MoreThanTheirs, SFTTrainer), tmp_path / "stock", LOSSES[loss], **options)
    ours = train((MoreThanTheirs, LigerSFTTrainer), tmp_path / "ours", LOSSES[loss], **options)
    assert_same(ours, stock, tolerance)


@pytest.mark.parametrize("own", [OwnLoss, MoreThanTheirs])
@pytest.mark.parametrize("loss", LOSSES)
def test_bf16_is_no_further_from_fp32_than_eager(loss: str, own: type, tmp_path: Any) -> None:
    """Eager is TRL's trainer on logits that torch builds under autocast."""
    runs = [
        train((own, base), tmp_path, LOSSES[loss], bf16=bf16, naive=True)[1][0]
        for base, bf16 in ((SFTTrainer, False), (SFTTrainer, True), (LigerSFTTrainer, True))
    ]
    exact, theirs, ours = (torch.cat([gradient.flatten() for gradient in run.values()]) for run in runs)
    assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_trainer_between_ours_and_trls(loss: str, tmp_path: Any) -> None:
    class Between(OwnLoss, SFTTrainer):
        of_outputs = staticmethod(LOSSES[loss])

    assert_same(train((LigerSFTTrainer, Between), tmp_path / "ours"), train((Between,), tmp_path / "stock"))


@pytest.mark.parametrize("case", ["plain", "lora"])
def test_other_log_probs_than_the_models(case: str, tmp_path: Any) -> None:
    stock = train((ReplacedInTheirs, SFTTrainer), tmp_path / "stock", **CASES[case])
    assert_same(train((ReplacedInTheirs, LigerSFTTrainer), tmp_path / "ours", **CASES[case]), stock)


def test_log_probs_are_a_tensor_like_any_other() -> None:
    """Negated, cloned, indexed, pickled and changed in place, with the gradients of a plain tensor."""
    values = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    labelled = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)  # the last position has no label

    def uses(log_probs: torch.Tensor) -> list[torch.Tensor]:
        weights = torch.arange(6.0, dtype=torch.float64).view(2, 3)
        changed = log_probs.clone()
        changed *= weights
        uses = [-log_probs, torch.neg(log_probs) * weights, log_probs.neg().exp(), log_probs.clone(), changed]
        return [*uses, log_probs[:, 1:], log_probs.exp().detach() * log_probs, log_probs.sum(1), log_probs.mean()]

    def summed(values: torch.Tensor) -> torch.Tensor:
        return _SignedPart.apply(values, 1.0, 3).as_subclass(SummedLogProbs)

    for ours, plain in zip(uses(summed(values * labelled)), uses(values[:, :3])):
        for reduced in (lambda x: x.sum(), lambda x: x.square().sum(), lambda x: (-x).sum()):
            expected = torch.autograd.grad(reduced(plain), values, retain_graph=True)
            torch.testing.assert_close(torch.autograd.grad(reduced(ours), values, retain_graph=True), expected)
    log_probs = summed(values.detach())
    assert torch.equal(pickle.loads(pickle.dumps(log_probs)), values.detach()[:, :3])
    file = io.BytesIO()
    torch.save({"log_probs": summed(values)}, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)["log_probs"]) is torch.Tensor
    assert type(log_probs.sum()) is type(log_probs * 2) is type(-log_probs) is torch.Tensor


@pytest.fixture
def ways(monkeypatch):
    """What every backward of the head did."""
    found: list[str] = []

    def spied(name: str, original: Any) -> Any:
        return lambda *args: found.append(name) or original(*args)

    for name in ("number_by_values", "recomputed_gradients"):
        monkeypatch.setattr(expected_gradients, name, spied(name, getattr(expected_gradients, name)))
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_trainers_own_loss_neither_waits_nor_recomputes(case: str, ways: list[str], tmp_path: Any) -> None:
    options = {key: value for key, value in CASES[case].items() if key != "tolerance"}
    train((LigerSFTTrainer,), tmp_path, **options)
    assert ways == []


def test_a_loss_with_entropy_recomputes_without_a_look_at_the_values(ways: list[str], tmp_path: Any) -> None:
    train((MoreThanTheirs, LigerSFTTrainer), tmp_path, entropy_alone)
    assert ways == ["recomputed_gradients"] * 2


@pytest.mark.parametrize("unused", [False, True])
def test_distributed_data_parallel(unused: bool, ways: list[str], tmp_path: Any) -> None:
    """Which puts a node of its own behind the outputs where it looks for unused parameters."""
    trainer = build((LigerSFTTrainer,), tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=9).backward()
    expected = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(trainer.model, find_unused_parameters=unused)
        trainer.compute_loss(model, dict(batch), num_items_in_batch=9).backward()
        del model  # before its group: it can wait forever for one that is gone
    finally:
        torch.distributed.destroy_process_group()
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)
    assert ways == []
