"""LigerTrainer against the stock Trainer: the same losses, weights, evaluation and metrics."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments

from liger_trainer.callbacks.memory import MemoryCallback
from liger_trainer.callbacks.non_finite import NonFiniteGuardCallback
from liger_trainer.callbacks.throughput import ThroughputCallback
from liger_trainer.trainers import base as mixin
from liger_trainer.trainers.trainer import LigerTrainer
from tests.callbacks.test_callbacks import Reporter
from tests.trainers.builders import causal, losses_and_norms
from tests.trainers.parity import assert_close_logs, assert_close_weights
from tests.trainers.tiny import COMMON, gemma2, llama, logged, mixtral, token_rows

CASES = {
    "plain": {},
    "softcap": {"model": gemma2},
    "moe": {"model": mixtral},
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "label_smoothing_accumulation": {
        "label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2,
    },
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "evaluation_smoothed": {"eval_strategy": "steps", "eval_steps": 1, "label_smoothing_factor": 0.1},
    "no_clipping": {"max_grad_norm": 0.0},
}  # fmt: skip


def build(folder, trainer_class=LigerTrainer, model=None, **options):
    return causal(folder, model and model(), trainer_class, eval_dataset=token_rows()[:4], **options)


def lora_llama():
    model = llama()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_logs_and_weights_are_those_of_the_stock_trainer(name, tmp_path):
    case = dict(CASES[name])
    stock = build(tmp_path / "stock", Trainer, **case)
    stock.train()
    ours = build(tmp_path / "ours", **case)
    ours.train()
    assert ours.kernel_report.applied
    tolerance = 2e-2 if case.get("bf16") else 1e-5
    assert_close_logs(logged(ours), logged(stock), absolute=tolerance, relative=tolerance)
    if not case.get("bf16"):
        assert_close_weights(ours, stock, tolerance=2e-3)


def test_accumulation_is_one_big_batch(tmp_path):
    big = build(tmp_path, optim="sgd", per_device_train_batch_size=4)
    big.train()
    small = build(tmp_path, optim="sgd", per_device_train_batch_size=1, gradient_accumulation_steps=4)
    small.train()
    for left, right in zip(logged(big), logged(small)):
        if "loss" in left:
            assert right["loss"] == pytest.approx(left["loss"], abs=1e-5)
            assert right["grad_norm"] == pytest.approx(left["grad_norm"], rel=1e-4)
    for (name, a), b in zip(big.model.named_parameters(), small.model.parameters()):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6, msg=name)


def test_evaluation_before_training_uses_the_kernels_once(tmp_path, monkeypatch, capsys):
    applied = []
    original = mixin.apply_kernels
    monkeypatch.setattr(mixin, "apply_kernels", lambda *args, **kwargs: applied.append(1) or original(*args, **kwargs))
    trainer = build(tmp_path)
    assert applied == [1]
    stock = build(tmp_path, Trainer)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], abs=1e-5)
    trainer.train()
    trainer.evaluate()
    assert applied == [1]
    assert capsys.readouterr().out.count(str(trainer.kernel_report)) == 1


def test_report_can_be_silenced_and_kernels_switched_off(tmp_path, capsys):
    trainer = build(tmp_path, kernel_report=False)
    trainer.train()
    assert trainer.kernel_report.applied
    assert "liger_trainer kernels" not in capsys.readouterr().out
    off = build(tmp_path, use_liger_kernel=False)
    off.train()
    assert off.kernel_report is None
    assert "forward" not in off.model.model.norm.__dict__


def test_stock_arguments_switch_the_kernels_on(tmp_path):
    trainer = LigerTrainer(llama(), TrainingArguments(str(tmp_path), **COMMON), train_dataset=token_rows())
    assert trainer.kernel_report.applied
    assert trainer.args.use_liger_kernel is True  # evaluation then leaves the logits out


def test_model_init_is_patched_each_time(tmp_path):
    trainer = build(tmp_path, model_init=lambda: llama())
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert "forward" in trainer.model.model.norm.__dict__


def test_metrics_get_the_same_logits(tmp_path):
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction)
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    stock = build(tmp_path, Trainer, compute_metrics=compute_metrics).evaluate()
    ours = build(tmp_path, compute_metrics=compute_metrics).evaluate()
    torch.testing.assert_close(
        torch.tensor(seen[1].predictions), torch.tensor(seen[0].predictions), rtol=1e-5, atol=1e-5
    )
    assert ours["eval_accuracy"] == stock["eval_accuracy"]
    assert ours["eval_loss"] == pytest.approx(stock["eval_loss"], abs=1e-5)


def test_predictions_and_preprocessed_logits(tmp_path):
    predictions = []
    for trainer_class in (Trainer, LigerTrainer):
        trainer = build(tmp_path, trainer_class)
        predictions.append([torch.tensor(trainer.predict(token_rows()).predictions)])
        trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
        predictions[-1].append(torch.tensor(trainer.predict(token_rows()).predictions))
    torch.testing.assert_close(predictions[1][0], predictions[0][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(predictions[1][1], predictions[0][1])


@pytest.mark.parametrize("where", ["compute_loss_func", "compute_loss"])
def test_loss_of_the_user(where, tmp_path):
    def loss_of(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[:, :-1].float()
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1), reduction=reduction)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    class Own:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = loss_of(outputs, labels)
            return (loss, outputs) if return_outputs else loss

    runs = []
    for base in (Trainer, LigerTrainer):
        cls = base if where == "compute_loss_func" else type("OwnTrainer", (Own, base), {})
        trainer = build(tmp_path, cls, gradient_accumulation_steps=2, per_device_train_batch_size=2)
        trainer.compute_loss_func = loss_of if where == "compute_loss_func" else None
        trainer.train()
        runs.append(losses_and_norms(trainer))
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_lora_with_checkpointing_is_saved_for_plain_peft(reentrant, tmp_path):
    runs = []
    for trainer_class in (Trainer, LigerTrainer):
        options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        trainer = build(tmp_path, trainer_class, model=lora_llama, **options)
        trainer.train()
        runs.append(losses_and_norms(trainer))
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
    trainer.save_model(str(tmp_path / "adapter"))
    plain = PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    batch = {key: value[None] for key, value in token_rows()[0].items()}
    assert plain(**batch).loss.item() == pytest.approx(trainer.model.eval()(**batch).loss.item(), abs=1e-5)


def test_saved_model_loads_in_plain_transformers(tmp_path):
    trainer = build(tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not any("forward" in module.__dict__ for module in plain.modules())
    for (name, a), b in zip(trainer.model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_torch_compile_of_the_trainer(tmp_path):
    runs = []
    for trainer_class in (Trainer, LigerTrainer):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        trainer = build(tmp_path, trainer_class, torch_compile=True, torch_compile_backend="aot_eager")
        trainer.train()
        runs.append(losses_and_norms(trainer))
    assert trainer.kernel_report.applied
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)


def test_strict_reaches_the_patching(tmp_path):
    with pytest.raises(ValueError, match="strict"):
        build(tmp_path, strict_kernels=True, liger_kernel_config={"geglu": True})


def test_callbacks_are_there_by_default_and_reach_every_reporter(tmp_path):
    reporter = Reporter()
    trainer = build(tmp_path, callbacks=[reporter], gradient_accumulation_steps=2)
    result = trainer.train()
    steps = [log for log in reporter.logs if "loss" in log]
    assert len(steps) == 3
    assert all({"tokens_per_second", "peak_memory_gib"} <= log.keys() for log in steps)
    assert {"train_tokens_per_second", "train_peak_memory_gib"} <= reporter.logs[-1].keys()
    assert result.metrics["train_tokens_per_second"] > 0
    throughput = next(c for c in trainer.callback_handler.callbacks if isinstance(c, ThroughputCallback))
    rows = token_rows()
    # 3 steps of 8 rows over 16 rows: an epoch and a half, in whatever order
    per_epoch = sum(int(row["attention_mask"].sum()) for row in rows)
    assert 1.2 * per_epoch < throughput._run_tokens < 1.8 * per_epoch


def test_users_callbacks_replace_ours(tmp_path):
    memory = MemoryCallback()
    trainer = build(tmp_path, callbacks=[memory])
    mine = [c for c in trainer.callback_handler.callbacks if isinstance(c, MemoryCallback)]
    assert mine == [memory]


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_guard_names_the_micro_batch(action, tmp_path):
    class Poison(LigerTrainer):
        micro_batches = 0

        def compute_loss(self, *args, **kwargs):
            self.micro_batches += 1
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.micro_batches == 5 else loss

    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_steps": 4}
    trainer = build(tmp_path, Poison, non_finite=action, **settings)
    reporter = Reporter()
    trainer.add_callback(reporter)
    trainer.train()
    steps = [log.get("non_finite_updates") for log in reporter.logs if "loss" in log]
    assert steps == ([None, 1.0] if action == "stop" else [None, 1.0, 1.0, 1.0])
    assert reporter.logs[-1]["train_non_finite_updates"] == 1.0
    (finding,) = trainer._guard.findings
    assert finding.startswith("Step 2: the loss of micro-batch 2 of 3 (nan)")
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert trainer.state.global_step == (2 if action == "stop" else 4)


@pytest.mark.parametrize("action", ["stop", "skip", "off"])
def test_guard_in_the_trainer_names_the_nan_before_clipping_spreads_it(action, tmp_path):
    class Poison(LigerTrainer):
        def _clip_grad_norm(self, model):
            if self.state.global_step == 1:
                model.model.layers[0].mlp.up_proj.weight.grad[0, 0] = float("nan")
            return super()._clip_grad_norm(model)

    trainer = build(tmp_path, Poison, non_finite=action)
    trainer.train()
    guards = [c for c in trainer.callback_handler.callbacks if isinstance(c, NonFiniteGuardCallback)]
    finite = all(torch.isfinite(p).all() for p in trainer.model.parameters())
    if action == "off":
        assert guards == []
        assert not finite
        return
    assert finite
    assert len(guards[0].findings) == 1
    assert "Step 2: the gradient of 'model.layers.0.mlp.up_proj.weight'" in guards[0].findings[0]
    assert trainer.state.global_step == (2 if action == "stop" else 3)
    assert (tmp_path / "checkpoint-2").is_dir() == (action == "stop")


def test_the_guard_clips_as_torch_does(tmp_path):
    """The guard's norms serve clipping too, and give bit for bit what clip_grad_norm_ gives."""
    torch.manual_seed(0)
    trainer = build(tmp_path, max_grad_norm=0.5)
    trainer.create_optimizer_and_scheduler(1)
    other = copy.deepcopy(trainer.model)
    for parameter, twin in zip(trainer.model.parameters(), other.parameters(), strict=True):
        parameter.grad = torch.randn_like(parameter)
        twin.grad = parameter.grad.clone()
    norm = trainer._clip_grad_norm(trainer.model)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5))
    for parameter, twin in zip(trainer.model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter.grad, twin.grad)


def test_gradients_of_two_dtypes_are_clipped_as_torch_does(tmp_path, monkeypatch):
    """A router in fp32 beside weights in bf16: bit for bit, and by our kernel, as torch would be slow."""
    torch.manual_seed(0)
    trainer = build(tmp_path, max_grad_norm=0.5)
    trainer.model.bfloat16().model.norm.float()
    trainer.create_optimizer_and_scheduler(1)
    other, scaled, rescale = copy.deepcopy(trainer.model), [], mixin.rescale_

    def rescaling(gradient, *factors):
        scaled.append(gradient)
        rescale(gradient, *factors)

    monkeypatch.setattr(mixin, "rescale_", rescaling)
    for place, (parameter, twin) in enumerate(zip(trainer.model.parameters(), other.parameters(), strict=True)):
        gradient = torch.randn_like(parameter)
        parameter.grad = gradient.t().contiguous().t() if place == 3 and gradient.dim() == 2 else gradient
        twin.grad = parameter.grad.clone()
    norm = trainer._clip_grad_norm(trainer.model)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5))
    for parameter, twin in zip(trainer.model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter.grad, twin.grad)
    assert len(scaled) == len([*other.parameters()]) - 1


def test_the_parameters_are_counted_once_a_training(tmp_path, monkeypatch):
    calls = []
    count = LlamaForCausalLM.num_parameters

    def counting(self, *args, **kwargs):
        calls.append(1)
        return count(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "num_parameters", counting)
    counted = []
    for steps in (2, 5):
        trainer = causal(tmp_path, max_steps=steps)
        calls.clear()
        trainer.train()
        counted.append(len(calls))
        stock = causal(tmp_path / "stock", trainer_class=Trainer, max_steps=steps)
        stock.train()
        assert trainer.state.total_flos == stock.state.total_flos > 0
    assert counted[0] == counted[1]
