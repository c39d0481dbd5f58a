"""`optim: "liger_adamw"` in a Trainer: what it builds, resuming, other optimizers' checkpoints, two processes."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from liger_trainer.callbacks.non_finite import _skips_on_device
from liger_trainer.optim import LigerAdamW, adamw_state_dict
from liger_trainer.tools.cli import main
from liger_trainer.trainers.checkpoints.resuming import CheckpointError
from tests.forked import torchrun
from tests.optim.stored import as_stored
from tests.tools.cli.runs import EIGHT_STEPS, write_recipe
from tests.trainers.builders import causal, dpo, losses_and_norms, sft
from tests.trainers.tiny import llama, token_rows

OURS = {"optim": "liger_adamw", "learning_rate": 1e-5}
STORED = ["states=8bit", "states=bf16", "states=fp32", "states=8bit,master=stochastic", "states=bf16,master=none"]


def in_bf16(**options):
    """A model whose matrices have states in 8 bits."""
    return llama(hidden_size=256, intermediate_size=256, num_hidden_layers=1, **options).bfloat16()


def inner(trainer):
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def assert_same_training(a, b):
    """The bits of losses, norms, weights and everything that the optimizers have stored."""
    assert losses_and_norms(a) == losses_and_norms(b)
    for (name, weight), other in zip(a.model.named_parameters(), b.model.parameters()):
        assert torch.equal(weight, other), name
        states = inner(a).state[weight], inner(b).state[other]
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            pair = (each.reshape(-1).view(torch.uint8) for each in (value, states[1][key]))  # a remainder may be NaN
            assert torch.equal(*pair), (name, key)


@pytest.mark.parametrize("build", [causal, sft, dpo])
def test_the_arguments_reach_the_optimizer(build, tmp_path):
    further = {"optim_args": "states=bf16, master=none", "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}
    trainer = build(tmp_path, in_bf16(), **OURS, **further, weight_decay=0.1)
    trainer.create_optimizer()
    decayed, others = trainer.optimizer.param_groups
    assert type(trainer.optimizer) is LigerAdamW
    for group in (decayed, others):
        assert [group[key] for key in ("lr", "betas", "eps")] == [1e-5, (0.8, 0.9), 1e-6]
        assert [group[key] for key in ("states", "master", "seed")] == ["bf16", None, 3]  # the run's seed
    assert [decayed["weight_decay"], others["weight_decay"]] == [0.1, 0.0]
    assert {weight.ndim for weight in others["params"]} == {1}


def test_a_seed_of_its_own(tmp_path):
    trainer = causal(tmp_path, in_bf16(), **OURS, optim_args="seed=7")
    assert trainer.create_optimizer().defaults["seed"] == 7


def test_bf16_weights_keep_what_bf16_lacks(tmp_path):
    """What reaches them is too small for bf16: without the master most weights would stay where they were."""
    trainer = causal(tmp_path, in_bf16(), **OURS, optim_args="states=fp32")
    before = [weight.detach().float() for weight in trainer.model.parameters()]
    trainer.train()
    after = [inner(trainer).fp32_weight(weight) for weight in trainer.model.parameters()]
    moved = [(a != b).float().mean() for a, b in zip(before, after) if a.ndim == 2]
    assert min(moved[1:]) > 0.99  # the first are embeddings, of which few tokens occur
    for weight, exact in zip(trainer.model.parameters(), after):
        nearest = (exact.bfloat16().float() - exact).abs()
        assert torch.equal((weight.detach().float() - exact).abs(), nearest)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_fp32_weights_train_as_with_torch(scaled, max_grad_norm, tmp_path):
    """Clipping divides the gradients by the scale of a gradient scaler; without, the optimizer does."""
    expected = causal(tmp_path, optim="adamw_torch_fused", max_grad_norm=max_grad_norm)
    ours = causal(tmp_path, optim="liger_adamw", max_grad_norm=max_grad_norm)
    for trainer in (expected, ours):
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu") if scaled else None  # accelerate has one on GPUs
        trainer.train()
        assert (getattr(trainer.optimizer, "scaler", None) is not None) == scaled
    assert_same_training(expected, ours)


def test_clipping(tmp_path):
    norms = {}
    for most in (0.01, 0.0):
        trainer = causal(tmp_path, in_bf16(), **OURS, max_grad_norm=most, max_steps=1)
        trainer.train()
        norms[most] = inner(trainer).state[trainer.model.model.norm.weight]["exp_avg"].norm().item()
    (whole,) = (log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log)
    assert norms[0.0] > 0
    factor = 0.01 / torch.tensor(whole, dtype=torch.bfloat16)  # rounded to bf16, as the gradients that it clips
    assert norms[0.01] == pytest.approx(norms[0.0] * factor.item(), rel=4e-3)


def test_steps_that_are_not_finite_are_left_out(tmp_path):
    class Overflowing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(16, 256, dtype=torch.bfloat16))

        def forward(self, input_ids, labels, **kwargs):
            self.calls = getattr(self, "calls", 0) + 1
            return {"loss": (self.weight.float() * (float("nan") if self.calls == 2 else 1.0)).sum()}

    trainer = causal(tmp_path, Overflowing(), **OURS, non_finite="skip", use_liger_kernel=False)
    trainer.train()
    assert inner(trainer).state[trainer.model.weight]["step"] == 2
    assert inner(trainer).fp32_weight(trainer.model.weight).isfinite().all()
    assert _skips_on_device(inner(trainer))


def train(folder, resume=None, **options):
    settings = {**OURS, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, **options}
    trainer = causal(folder, in_bf16(attention_dropout=0.1), **settings)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume / "checkpoint-2"))
    return trainer


@pytest.mark.parametrize("optim_args", STORED)
def test_resumes_to_the_same_bits(optim_args, tmp_path):
    whole = train(tmp_path / "whole", optim_args=optim_args)
    resumed = train(tmp_path / "resumed", tmp_path / "whole", optim_args=optim_args)
    assert_same_training(whole, resumed)


def loads(tmp_path, **options):
    """The optimizer as it is when a run resumes from the checkpoint, and the state that was saved."""
    checkpoint = tmp_path / "checkpoint-2"
    trainer = causal(tmp_path, in_bf16(), **{**OURS, **options})
    trainer.create_optimizer_and_scheduler(4)
    trainer._load_optimizer_and_scheduler(str(checkpoint))
    return trainer.optimizer, torch.load(checkpoint / "optimizer.pt", weights_only=True)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_goes_on_from_torch(optim, tmp_path):
    before = train(tmp_path, optim=optim, max_steps=2)
    optimizer, saved = loads(tmp_path, optim_args="states=fp32", adam_beta1=0.5)
    assert saved["state"][0]["exp_avg"].dtype == torch.bfloat16
    for parameter, state in zip((p for g in optimizer.param_groups for p in g["params"]), saved["state"].values()):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][key], state[key].float())
        assert not optimizer.state[parameter]["remainder"].any()
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)  # as every resumed run, with a warning
    assert _skips_on_device(optimizer)
    assert len(losses_and_norms(train(tmp_path, tmp_path))) == 2 * len(losses_and_norms(before))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("states=8bit", "states=fp32"),
        ("states=8bit", "states=bf16,master=none"),
        ("states=fp32", "states=8bit"),
        ("states=bf16", "states=8bit,master=stochastic"),
    ],
)
def test_goes_on_with_other_states(before, after, tmp_path):
    train(tmp_path, optim_args=before, max_steps=2)
    optimizer, saved = loads(tmp_path, optim_args=after)
    expected = adamw_state_dict(saved)["state"]
    kept = adamw_state_dict(optimizer.state_dict())["state"]
    for key, state in expected.items():
        coded = "exp_avg_codes" in optimizer.state_dict()["state"][key]
        states = "fp32" if "8bit" in after and not coded else after.split(",")[0].removeprefix("states=")
        assert kept[key]["step"] == state["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(kept[key][name].float(), as_stored(state[name], states, signed=name == "exp_avg"))
        assert ("remainder" in optimizer.state_dict()["state"][key]) == ("master" not in after)
    train(tmp_path, tmp_path, optim_args=after)


@pytest.mark.parametrize("optim_args", ["states=8bit,master=none", "states=fp32"])
def test_another_optimizer_does_not_read_ours(optim_args, tmp_path):
    """Codes are no moments; and torch would keep the remainders, never change them, and save them again."""
    train(tmp_path, optim_args=optim_args, max_steps=2)
    message = "its states are LigerAdamW's, which AdamW cannot read. Set `optim: liger_adamw`, or write what"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        train(tmp_path, tmp_path, optim="adamw_torch_fused")
    file = tmp_path / "checkpoint-2" / "optimizer.pt"
    torch.save(adamw_state_dict(torch.load(file, weights_only=True)), file)  # as the message says
    train(tmp_path, tmp_path, optim="adamw_torch_fused")


def test_the_state_of_no_adam_is_refused(tmp_path):
    train(tmp_path, optim="adagrad", max_steps=2)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        train(tmp_path, tmp_path)


def test_in_a_recipe(tmp_path):
    values = {**EIGHT_STEPS, "max_steps": 2, "dtype": "bfloat16", "output_dir": str(tmp_path / "run"), "seed": 5}
    options = ["--optim", "liger_adamw", "--optim_args", "states=bf16,master=stochastic"]
    assert main(["train", write_recipe(tmp_path / "mine.yaml", values), *options]) == 0
    saved = torch.load(tmp_path / "run" / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert [saved["param_groups"][0][key] for key in ("states", "master", "seed")] == ["bf16", "stochastic", 5]
    assert {state["exp_avg"].dtype for state in saved["state"].values()} == {torch.bfloat16}


def test_with_a_stock_trainer(tmp_path):
    options = {"states": "bf16", "lr": 1e-5}
    stock = causal(tmp_path, in_bf16(), Trainer, optimizer_cls_and_kwargs=(LigerAdamW, options))
    stock.train()
    assert type(inner(stock)) is LigerAdamW
    assert inner(stock).param_groups[0]["states"] == "bf16"
    for weight in stock.model.parameters():
        assert not torch.equal(inner(stock).fp32_weight(weight), weight.float())  # it has trained what bf16 lacks


def work(folder, optim_args):
    rows = [row for row in token_rows(8) for _ in range(2)]  # each process has the same ones, which the mean keeps
    trainer = causal(
        Path(folder, "two"), in_bf16(), rows=rows, **OURS, optim_args=optim_args, per_device_train_batch_size=1,
        train_sampling_strategy="sequential", max_steps=4,
    )  # fmt: skip
    trainer.train()
    rank = trainer.args.process_index
    torch.save(trainer.model.state_dict(), Path(folder, f"weights{rank}.pt"))
    Path(folder, f"rank{rank}.json").write_text(json.dumps(losses_and_norms(trainer)))


@pytest.mark.parametrize("optim_args", ["states=8bit", "states=bf16,master=stochastic"])
def test_two_processes(optim_args, tmp_path):
    done = torchrun(work, tmp_path, optim_args)
    assert done.returncode == 0, done.stderr[-3000:]
    one = causal(
        tmp_path / "one", in_bf16(), rows=token_rows(8), **OURS, optim_args=optim_args, per_device_train_batch_size=1,
        train_sampling_strategy="sequential", max_steps=4,
    )  # fmt: skip
    one.train()
    for rank in range(2):
        weights = torch.load(tmp_path / f"weights{rank}.pt")
        for name, weight in one.model.state_dict().items():
            assert torch.equal(weights[name], weight), name
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == losses_and_norms(one)
