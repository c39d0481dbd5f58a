"""`fp16: true` with a gradient scaler: every trainer trains as TRL's does in fp32, and leaves out what overflows.

accelerate has a scaler and autocast in fp16 on accelerators alone; `in_fp16` gives a trainer both on the CPU.
"""

import math

import pytest
import torch

from tests.quantised import library, loading_in_4_bits
from tests.trainers.builders import causal, losses_and_norms
from tests.trainers.parity import KINDS, OTHER_KINDS, build, lora, save_models
from tests.trainers.tiny import llama, logged, token_rows, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

SCALE = 2.0**13  # with torch's first one, 2.0**16, RLOO's gradients overflow, in TRL's trainer too


def in_fp16(trainer, init_scale=SCALE):
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale, backoff_factor=SCALE / 2.0**40)
    return trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))["llama"]


def assert_trains_as_in_fp32(kind, folder, tmp_path, **case):
    """Losses, gradient norms and what the weights have moved by, as far as fp16 has digits."""
    stock = build(kind, False, tmp_path / "stock", folder, **case)
    before = [weight.detach().clone() for weight in stock.model.parameters()]
    stock.train()
    ours = in_fp16(build(kind, True, tmp_path / "ours", folder, fp16=True, **case))
    ours.train()
    assert ours.accelerator.scaler.get_scale() == SCALE, "a gradient was not finite"
    assert {weight.dtype for weight in ours.model.parameters()} == {torch.float32}
    pairs = list(zip(logged(stock), logged(ours), strict=True))
    assert sum("grad_norm" in left for left, _ in pairs) == 2
    for left, right in pairs:
        for key in {"loss", "grad_norm", "train_loss"} & left.keys():
            assert right[key] == pytest.approx(left[key], rel=4e-3, abs=1e-4), key
    weights = stock.model.parameters(), ours.model.parameters()
    moved, other = (torch.cat([(b - a).flatten() for a, b in zip(before, each)]) for each in weights)
    assert (other - moved).norm() < 0.02 * moved.norm()


@pytest.mark.parametrize("adapted", [True, False], ids=["LoRA", "full"])
@pytest.mark.parametrize("kind", [*KINDS, *OTHER_KINDS])
def test_trains_as_in_fp32(kind, adapted, folder, tmp_path):
    assert_trains_as_in_fp32(kind, folder, tmp_path, **({"peft_config": lora()} if adapted else {}))


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "GRPO"])
def test_adapters_of_a_quantised_base_are_fp32(kind, tmp_path):
    """TRL's are bf16, whose gradients torch's scaler does not take on a GPU. The base stays in fp16."""
    library()
    llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")  # rows of whole blocks
    tokenizer().save_pretrained(tmp_path / "base")
    options = {"peft_config": lora(), "model_init_kwargs": loading_in_4_bits() | {"dtype": "float16"}, "fp16": True}
    trainer = in_fp16(build(kind, True, tmp_path, str(tmp_path / "base"), **options))
    assert {weight.dtype for weight in trainer.model.parameters() if weight.requires_grad} == {torch.float32}
    assert trainer.model.get_input_embeddings().weight.dtype == torch.float16
    trainer.train()
    losses = losses_and_norms(trainer)
    assert len(losses) == 4
    assert all(map(math.isfinite, losses))


@pytest.mark.kernel
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_kernels_train_as_in_fp32(kind, folder, tmp_path):
    assert_trains_as_in_fp32(kind, folder, tmp_path, peft_config=lora(), per_device_train_batch_size=1)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "liger_adamw"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_an_update_that_overflows_is_left_out(optim, max_grad_norm, tmp_path):
    """With a factor that fp16 does not hold no gradient is finite, and the scaler takes a smaller one."""
    options = {"optim": optim, "max_grad_norm": max_grad_norm, "lr_scheduler_type": "constant", "fp16": True}
    options |= {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 4}
    rows = token_rows()
    expected = in_fp16(causal(tmp_path, rows=rows[:8], max_steps=2, **options))
    ours = causal(tmp_path, rows=[*rows[8:12], *rows[:8]], max_steps=3, **options)
    in_fp16(ours, 2.0**40)
    for trainer in (ours, expected):
        trainer.train()
        assert trainer.accelerator.scaler.get_scale() == SCALE
    assert losses_and_norms(ours)[2:] == losses_and_norms(expected)
    assert all(map(torch.equal, ours.model.parameters(), expected.model.parameters()))
