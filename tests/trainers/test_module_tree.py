"""A step walks over no modules and parameters that are as they were, and sees those that are not."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from liger_trainer.trainers.module_tree import ModuleTree
from tests.trainers.builders import causal, sft
from tests.trainers.test_activation_memory import assert_same
from tests.trainers.tiny import llama

pytestmark = pytest.mark.filterwarnings("ignore")

WALKS = {function.__code__: name for name, function in vars(nn.Module).items() if hasattr(function, "__code__")}
"""Every method of `nn.Module`; a walk calls some of them once a module."""


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads of tensors."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.counts["reads"] += func.overloadpacket.__name__ == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))


class CountedStep(TrainerCallback):
    """Counts the calls of `nn.Module`'s methods, and the reads, in the fifth step."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self.mode = Reads(self.counts)
            self.mode.__enter__()
            sys.setprofile(self.note)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            sys.setprofile(None)
            self.mode.__exit__(None, None, None)

    def note(self, frame: Any, event: str, argument: Any) -> None:
        name = WALKS.get(frame.f_code) if event == "call" else None
        if name is not None and name not in ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__"):
            self.counts[name] += 1


def adapted(frozen: int) -> nn.Module:
    """A model with adapters and so many frozen modules more."""
    model = llama()
    model.more = nn.Sequential(*(nn.Linear(2, 2) for _ in range(frozen)))
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.0}, {"gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("build", [causal, sft])
def test_a_step_costs_the_same_with_more_frozen_modules(build, options, tmp_path):
    counts = []
    for frozen in (40, 80):
        counted = CountedStep()
        trainer = build(tmp_path, adapted(frozen), max_steps=6, logging_steps=6, **options)
        trainer.add_callback(counted)
        trainer.train()
        counts.append(counted.counts)
    assert counts[0]["modules"] > 0, "nothing is counted"  # of the head, whose modules are few
    assert counts[0] == counts[1]
    assert counts[0]["train"] == counts[0]["zero_grad"] == 0


def other_mode(model):
    model.base_model.model.model.layers[1].eval()


def module_in_the_other_mode(model):
    model.base_model.model.model.later = nn.Sequential(nn.Dropout()).eval()


def unfrozen(model):
    model.base_model.model.model.norm.weight.requires_grad_(True)


def replaced_parameter(model):
    projection = model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"]
    projection.weight = nn.Parameter(projection.weight.detach() + 0.01)


def gradient_of_a_frozen_one(model):
    weight = model.base_model.model.model.norm.weight
    weight.grad = torch.ones_like(weight)


class At(TrainerCallback):
    """Changes the model after the second step, and notes after each what the Trainer has left."""

    def __init__(self, change: Any) -> None:
        self.change, self.modes, self.left = change, [], []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.modes.append(all(each.training for each in model.modules()))
        self.left.append([name for name, each in model.named_parameters() if each.grad is not None])
        if state.global_step == 2:
            self.change(model)


@pytest.mark.parametrize(
    "change", [other_mode, module_in_the_other_mode, unfrozen, replaced_parameter, gradient_of_a_frozen_one]
)
def test_what_changes_is_seen(change, tmp_path, monkeypatch):
    trainers = []
    for walks in (True, False):
        with monkeypatch.context() as patch:
            if walks:  # as the Trainer does by itself
                patch.setattr(ModuleTree, "_holds", lambda self: False)
                patch.setattr(ModuleTree, "gradients_are_removed", lambda self: None)
            trainer, seen = trained(change, tmp_path)
        assert seen.modes == [True] * 5
        assert seen.left == [[]] * 5
        trainers.append(trainer)
    assert_same(*trainers)


def trained(change, folder):
    trainer, seen = causal(folder, adapted(4), max_steps=5), At(change)
    trainer.add_callback(seen)
    trainer.train()
    assert not {"train", "zero_grad"} & vars(trainer.model).keys()
    return trainer, seen


class Frozen(nn.Dropout):
    """Stays in evaluation, whatever the model does."""

    calls = 0

    def train(self, mode: bool = True) -> Any:
        self.calls += 1
        return super().train(False)


def test_a_module_with_a_mode_of_its_own_is_asked_each_time(tmp_path):
    model = llama()
    model.own = Frozen()
    before = model.own.calls
    trainer = causal(tmp_path, model)
    trainer.train()
    assert model.own.calls - before >= 3
    assert not model.own.training
    assert model.training


def test_a_copy_of_the_model_in_a_step_has_methods_of_its_own(tmp_path):
    copies = []

    class Copies(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            copies.append(copy.deepcopy(model))

    trainer = causal(tmp_path, llama())
    trainer.add_callback(Copies())
    trainer.train()
    one = copies[-1]
    for each in one.parameters():
        each.grad = torch.ones_like(each)
    one.zero_grad()
    assert all(each.grad is None for each in one.parameters())
    one.eval()
    assert not any(each.training for each in one.modules())
    assert all(each.training for each in trainer.model.modules())


def test_gradients_of_a_parameter_that_was_replaced_in_a_step_are_removed():
    model = llama()
    tree = ModuleTree(model)
    tree.parameters()
    norm = model.model.norm
    norm.weight = nn.Parameter(norm.weight.detach().clone())
    norm.weight.grad = torch.ones_like(norm.weight)
    tree.gradients_are_removed()
    model.zero_grad()
    assert norm.weight.grad is None
