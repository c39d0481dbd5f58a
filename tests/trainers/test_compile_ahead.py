"""The kernels of a first step are compiled while its trainer is built, and nothing of the model changes by that."""

import contextlib
import random
import types
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    Qwen3Config,
)

from liger_trainer import (
    LigerDPOConfig,
    LigerDPOTrainer,
    LigerGRPOConfig,
    LigerGRPOTrainer,
    LigerRewardConfig,
    LigerRewardTrainer,
    LigerTrainer,
    LigerTrainingArguments,
)
from liger_trainer.kernels import runtime
from liger_trainer.patching import head
from liger_trainer.recipe.families import FAMILIES
from liger_trainer.trainers import compile_ahead
from tests.aot import NotedKernels
from tests.patching.test_kernels_of_proofs import proofs_on_an_h100
from tests.trainers.tiny import tokenizer

pytestmark = [
    pytest.mark.skipif(runtime.INTERPRETED, reason="Triton's interpreter compiles nothing"),
    pytest.mark.filterwarnings("ignore"),
]
LENGTH = 256


def _model(family: str, lora: bool = False, layers: int = 0) -> torch.nn.Module:
    # A gradient in any memory order has strides of 16 elements or a multiple of them.
    sizes = FAMILIES[family] if "text_config" in FAMILIES[family] else {**FAMILIES[family], "head_dim": 32}
    sizes = {**sizes, "max_position_embeddings": LENGTH} | ({"num_hidden_layers": layers} if layers else {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.bfloat16)
    return get_peft_model(model, LoraConfig(target_modules="all-linear", lora_dropout=0.1)) if lora else model


def _rows():
    return [{"input_ids": torch.randint(0, 64, (LENGTH,)), "labels": torch.randint(0, 64, (LENGTH,))}] * 4


@contextlib.contextmanager
def _noted(folder, monkeypatch):
    """Trainers are built as on an H100; yields the kernels of the proofs, and those that are compiled ahead."""
    proofs, ahead = NotedKernels(), NotedKernels()
    monkeypatch.setattr(compile_ahead, "compiler_for", lambda device: contextlib.nullcontext(ahead))
    monkeypatch.setattr(head, "probe_head", lambda *args: 0.0)  # no kernel computes what it would compare
    with proofs_on_an_h100(proofs, folder):
        yield proofs, ahead


def _trainer(model, folder, model_init=None, **arguments):
    args = LigerTrainingArguments(str(folder), use_cpu=True, report_to="none", bf16=False, **arguments)
    return LigerTrainer(model, args, train_dataset=_rows(), model_init=model_init)


@pytest.mark.parametrize(
    ("family", "lora", "count"),
    [("llama", False, 5), ("qwen3", False, 5), ("qwen3", True, 6), ("qwen3_moe", False, 6), ("qwen3_5", False, 5)],
)
def test_a_first_step_launches_kernels_that_were_compiled_ahead(family, lora, count, tmp_path, monkeypatch):
    """`count` are compiled besides those of the proofs."""
    step, rows = NotedKernels(), _rows()
    with _noted(tmp_path / "cache", monkeypatch) as (proofs, ahead):
        trainer = _trainer(_model(family, lora), tmp_path / "run", per_device_train_batch_size=1)
        trainer.model.train()
        with step.noting():
            trainer.model(**{name: each[None] for name, each in rows[0].items()}).loss.backward()
    assert step.names(ahead, proofs) == {}
    assert (found := ahead.names(proofs)).total() == count, found


def test_a_layer_of_each_kind_takes_the_step(tmp_path, monkeypatch):
    built = []
    native = compile_ahead.few_layers
    monkeypatch.setattr(compile_ahead, "few_layers", lambda model: built.append(native(model)) or built[-1])
    model = _model("qwen3", layers=8)
    with _noted(tmp_path / "cache", monkeypatch):
        _trainer(model, tmp_path / "run")
    (few,) = built
    assert (len(few.model.layers), few.config.num_hidden_layers) == (2, 2)
    assert (len(model.model.layers), model.config.num_hidden_layers) == (8, 8)
    own = {each.data_ptr() for each in model.parameters()}
    assert all(each.data_ptr() in own for each in few.parameters())


@pytest.mark.parametrize("training", [False, True])
def test_the_model_stays_as_it_is(training, tmp_path, monkeypatch):
    model = _model("qwen3", lora=True).train(training)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *args: calls.append("forward"))
        module.register_full_backward_pre_hook(lambda *args: calls.append("backward"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: calls.append("gradient"))
    with _noted(tmp_path / "cache", monkeypatch) as (_, ahead):
        trainer = _trainer(model, tmp_path / "run")
        drawn, noted = torch.get_rng_state(), ahead.names()
        compile_ahead.compile_ahead(trainer, model)
    assert noted
    assert calls == []
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training == training for module in model.modules())
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def _preferring(config, trainer, rows, folder, model, arguments, **others):
    """A trainer of alignment on rows that are tokens already."""

    class Tokenised(trainer):
        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

    given = {"use_cpu": True, "report_to": "none", "bf16": False, "per_device_train_batch_size": 2} | arguments
    args, data = config(str(folder / "run"), **given), Dataset.from_list(rows)
    return Tokenised(model, args=args, train_dataset=data, processing_class=tokenizer(), **others)


@pytest.mark.parametrize("lora", [False, True])
def test_a_loss_of_pairs_launches_kernels_that_were_compiled_ahead(lora, tmp_path, monkeypatch):
    step, rows = NotedKernels(), [{"prompt_ids": [5] * 100, "chosen_ids": [6] * 28, "rejected_ids": [7] * 28}] * 4
    with _noted(tmp_path / "cache", monkeypatch) as (proofs, ahead):
        model, reference, given = _model("qwen3", lora), None if lora else _model("qwen3"), {"max_length": LENGTH}
        trainer = _preferring(LigerDPOConfig, LigerDPOTrainer, rows, tmp_path, model, given, ref_model=reference)
        trainer.model.train()
        with step.noting():
            trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader()))).backward()
    assert ahead.names(proofs)["_cross_entropy_row_kernel"] == 2
    # A reference model of its own is asked for fewer statistics.
    assert step.names(ahead, proofs) == ({} if lora else {"_cross_entropy_row_kernel": 1})


def test_a_loss_of_groups_launches_kernels_that_were_compiled_ahead(tmp_path, monkeypatch):
    step, sizes = NotedKernels(), {"prompt": (2, 100), "completion": (2, 28)}
    inputs = {f"{name}_ids": torch.randint(5, 64, size) for name, size in sizes.items()}
    inputs |= {f"{name}_mask": torch.ones(size, dtype=torch.long) for name, size in sizes.items()}
    inputs |= {"advantages": torch.tensor([1.0, -1.0]), "num_items_in_batch": torch.tensor(56)}
    given, rows = {"num_generations": 2, "temperature": 0.7}, [{"prompt": "a cat"}] * 4
    with _noted(tmp_path / "cache", monkeypatch) as (proofs, ahead):
        rewards = {"reward_funcs": lambda **kwargs: [0.0, 0.0]}
        trainer = _preferring(LigerGRPOConfig, LigerGRPOTrainer, rows, tmp_path, _model("qwen3"), given, **rewards)
        trainer.current_gradient_accumulation_steps = 1  # as in a step of `train()`
        trainer.model.train()
        with step.noting():
            trainer.compute_loss(trainer.model, inputs).backward()
    assert ahead.names(proofs)["_cross_entropy_row_kernel"]
    assert step.names(ahead, proofs) == {}


def test_scores_of_sequences_launch_no_kernel_of_a_head(tmp_path, monkeypatch):
    step, rows = NotedKernels(), [{"chosen_ids": [6] * 128, "rejected_ids": [7] * 128}] * 4
    sizes = {**FAMILIES["qwen3"], "head_dim": 32, "max_position_embeddings": LENGTH, "num_labels": 1, "pad_token_id": 0}
    with _noted(tmp_path / "cache", monkeypatch) as (proofs, ahead):
        model = AutoModelForSequenceClassification.from_config(Qwen3Config(**sizes), dtype=torch.bfloat16)
        trainer = _preferring(LigerRewardConfig, LigerRewardTrainer, rows, tmp_path, model, {})
        trainer.model.train()
        with step.noting():
            trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader()))).backward()
    assert {*ahead.names(proofs)} == {"forward_kernel", "backward_kernel", "_backward_kernel"}
    assert step.names(ahead, proofs) == {}


@pytest.mark.parametrize("labels", [1, 3])
def test_a_classifier_launches_kernels_that_were_compiled_ahead(labels, tmp_path, monkeypatch):
    """Nothing is said of labels: those of a batch are of rows, and none is made up of tokens."""
    step, sizes = NotedKernels(), {**FAMILIES["llama"], "head_dim": 32, "max_position_embeddings": LENGTH}
    config = LlamaConfig(**sizes, num_labels=labels, pad_token_id=0)
    with _noted(tmp_path / "cache", monkeypatch) as (proofs, ahead):
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
        calls = mock.Mock(wraps=model.loss_function)
        monkeypatch.setattr(type(model), "loss_function", calls)
        trainer = _trainer(model, tmp_path / "run", per_device_train_batch_size=2)
        assert not calls.called
        trainer.model.train()
        with step.noting():
            scores = trainer.model(input_ids=torch.randint(1, 64, (2, LENGTH))).logits
            scores.sum().backward()
    assert ahead.names(proofs)
    assert step.names(ahead, proofs) == {}


def test_a_model_that_the_trainer_builds_has_its_kernels_compiled_ahead(tmp_path, monkeypatch):
    step, rows, built = NotedKernels(), _rows(), []
    with _noted(tmp_path / "cache", monkeypatch) as (proofs, ahead):
        trainer = _trainer(
            None,
            tmp_path / "run",
            model_init=lambda: built.append(_model("llama")) or built[-1],
            per_device_train_batch_size=1,
        )
        assert built == [trainer.model]
        trainer.model.train()
        with step.noting():
            trainer.model(**{name: each[None] for name, each in rows[0].items()}).loss.backward()
    assert ahead.names(proofs)
    assert step.names(ahead, proofs) == {}


def test_what_a_model_draws_or_warns_of_is_not_seen(tmp_path, monkeypatch):
    calls = []

    def draw(*args):
        calls.append((random.random(), np.random.rand(), torch.rand(1)))
        warnings.warn("a batch of zeros", stacklevel=1)

    native = LlamaForCausalLM.forward
    monkeypatch.setattr(
        LlamaForCausalLM, "forward", lambda self, *args, **kwargs: draw() or native(self, *args, **kwargs)
    )
    with _noted(tmp_path / "cache", monkeypatch):
        trainer = _trainer(_model("llama"), tmp_path / "run")
        calls.clear()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            filters = list(warnings.filters)
            before = random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()
            compile_ahead.compile_ahead(trainer, trainer.model)
            assert (random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()) == before
            assert warnings.filters == filters
            assert len(calls) == 1
            assert not seen
            draw()
            assert len(seen) == 1


@pytest.mark.parametrize("change", ["no data", "frozen", "codes"])
def test_without_a_step_or_with_weights_of_other_kinds_nothing_is_compiled(change, tmp_path, monkeypatch):
    model = _model("llama")
    args = LigerTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", bf16=False)
    with _noted(tmp_path / "cache", monkeypatch) as (_, ahead):
        trainer = LigerTrainer(model, args, train_dataset=None if change == "no data" else _rows())
        assert bool(ahead.names()) == (change != "no data")
        again = NotedKernels()
        monkeypatch.setattr(compile_ahead, "compiler_for", lambda device: contextlib.nullcontext(again))
        if change == "frozen":
            model.requires_grad_(False)
        if change == "codes":
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.int8), False)
        compile_ahead.compile_ahead(trainer, model)
        assert not again.names()


def test_what_fails_is_left_to_the_step(tmp_path, monkeypatch):
    failing = mock.Mock(side_effect=torch.OutOfMemoryError)
    monkeypatch.setattr(compile_ahead, "few_layers", failing)
    with _noted(tmp_path / "cache", monkeypatch) as (_, ahead):
        assert _trainer(_model("llama"), tmp_path / "run").kernel_report is not None
    assert failing.called
    assert not ahead.names()


def test_a_batch_is_as_large_as_is_known():
    def batch(rows, length=None, config=None, **sizes):
        args = types.SimpleNamespace(per_device_train_batch_size=rows, max_length=length)
        return compile_ahead._batch(types.SimpleNamespace(args=args), config or LlamaConfig(**sizes))

    assert batch(4, 512) == (4, 512)
    assert batch(4, max_position_embeddings=131072) == (4, 4096)
    assert batch(1, max_position_embeddings=2048) == (1, 2048)
    assert batch(2, config=MambaConfig()) == (2, 8192)  # its tokens have no positions
    assert batch(10**6, 512) == (16384, 1)
