"""What happens to a training where a private name that it needs is gone."""

import logging

import pytest
import torch
import transformers.trainer
from torch import nn

import liger_trainer
from liger_trainer import stock_trainer
from liger_trainer.compat.peft import ADAPTERS_ON_FOUR_BITS
from liger_trainer.compat.private import Private, available
from liger_trainer.compat.torch import SAVED_IN_FOUR_BITS, SKIPPED_ON_DEVICE
from liger_trainer.compat.transformers import (
    BATCH_CHECKS,
    EXPERT_EXCHANGE,
    LOGGED_LOSS,
    META_WEIGHTS,
    PROMPT_TOKENS,
    STOCK_TRAINER,
)
from liger_trainer.compat.trl import SFT_OWN_LOSS
from liger_trainer.configs.loss_types import check_loss_type, known_loss_types
from liger_trainer.patching.moe import quantized_experts
from tests.quantised import library
from tests.trainers.builders import sft
from tests.trainers.tiny import COMMON, llama, token_rows


@pytest.fixture
def without(monkeypatch):
    """Makes the names of features look missing, as if the library had renamed them."""
    gone = []
    problem = Private.problem
    monkeypatch.setattr(Private, "problem", lambda self: "is missing" if self in gone else problem(self))
    available.cache_clear()
    yield lambda *features: gone.extend(name for feature in features for name in feature.names)
    available.cache_clear()


def lines(caplog, feature):
    return [record.getMessage() for record in caplog.records if f"needs for {feature.text}." in record.getMessage()]


def test_training_goes_on_without_what_it_can_do_without(without, tmp_path, caplog):
    off = (BATCH_CHECKS, LOGGED_LOSS, META_WEIGHTS, PROMPT_TOKENS)
    without(*off)
    losses = []
    for _ in range(2):
        args = liger_trainer.LigerTrainingArguments(str(tmp_path), **COMMON, kernel_report=False)
        trainer = liger_trainer.LigerTrainer(llama(), args, train_dataset=token_rows())
        losses.append(trainer.train().training_loss)
        trainer.is_in_train = True
        trainer.log({"loss": float("nan")})
    assert losses[0] == losses[1]
    assert [len(lines(caplog, feature)) for feature in off] == [1, 1, 1, 1]


def test_the_stock_trainer_stays_stock(without, monkeypatch, caplog):
    stock_trainer.uninstall()
    theirs = transformers.trainer.apply_liger_kernel
    without(STOCK_TRAINER)
    try:
        stock_trainer.install()
        assert transformers.trainer.apply_liger_kernel is theirs
        assert len(lines(caplog, STOCK_TRAINER)) == 1
    finally:
        stock_trainer.uninstall()
        available.cache_clear()
        monkeypatch.undo()
        stock_trainer.install()
    assert transformers.trainer.apply_liger_kernel is not theirs


def test_labels_are_not_smoothed_without_a_word(without, tmp_path):
    sft(tmp_path, label_smoothing_factor=0.1)
    without(SFT_OWN_LOSS)
    sft(tmp_path)
    with pytest.raises(ImportError, match="needs for `label_smoothing_factor`"):
        sft(tmp_path, label_smoothing_factor=0.1)


def test_an_update_is_left_out_on_the_host(without):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    assert liger_trainer.callbacks.non_finite._skips_on_device(optimizer)
    without(SKIPPED_ON_DEVICE)
    available.cache_clear()
    assert not liger_trainer.callbacks.non_finite._skips_on_device(optimizer)


def test_experts_are_not_quantised_where_adapters_would_be_wrong(without):
    library()
    without(ADAPTERS_ON_FOUR_BITS)
    experts = nn.Module()
    experts.down_proj = nn.Parameter(torch.randn(2, 64, 64))
    with pytest.raises(ImportError, match="adapters on experts in 4 bits"):
        liger_trainer.quantize_experts(experts)
    assert type(experts.down_proj) is nn.Parameter


def test_experts_are_saved_whole(without):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert quantized_experts._hooks_around() is not None
        without(SAVED_IN_FOUR_BITS)
        available.cache_clear()
        assert quantized_experts._hooks_around() is None


def test_experts_exchange_their_tokens_as_transformers_does(without, caplog):
    without(EXPERT_EXCHANGE)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0]._is_expert_parallel = model[1]._is_expert_parallel = True  # as transformers marks them
    for _ in range(2):
        assert not liger_trainer.apply_liger_kernel(model).applied
    assert len(lines(caplog, EXPERT_EXCHANGE)) == 1


def test_loss_types_that_are_not_stated(caplog):
    import dataclasses

    @dataclasses.dataclass
    class Config:
        loss_type: str = dataclasses.field(default="new", metadata={"help": "Which loss."})

    with caplog.at_level(logging.WARNING, "liger_trainer"):
        check_loss_type(Config())
        check_loss_type(Config("other"))
    (record,) = caplog.records
    assert "does not list its values" in record.getMessage()
    assert known_loss_types(Config) == []
