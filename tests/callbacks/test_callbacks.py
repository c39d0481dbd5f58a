"""Throughput, memory, kernel report and the guard, under a stock Trainer on a tiny model."""

import math
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainerState, TrainingArguments

from liger_trainer.callbacks import memory
from liger_trainer.callbacks.kernel_report import KernelReportCallback
from liger_trainer.callbacks.logged import LoggedMetricsCallback
from liger_trainer.callbacks.memory import MemoryCallback
from liger_trainer.callbacks.non_finite import NonFiniteError, NonFiniteGuardCallback
from liger_trainer.callbacks.throughput import ThroughputCallback, flops_per_token, peak_flops
from liger_trainer.patching.report import KernelReport, KernelReportRow

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


def tiny(**kwargs):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **kwargs}))


def rows(n=16, length=8):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (n, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    return [{"input_ids": i, "labels": i.clone(), "attention_mask": m} for i, m in zip(ids, mask)]


def arguments(tmp_path, **kwargs):
    defaults = {
        "output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, "max_steps": 4, "logging_steps": 2,
        "per_device_train_batch_size": 2, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2,
    }  # fmt: skip
    return TrainingArguments(**{**defaults, **kwargs})


class Reporter(TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_throughput_reaches_reporters_and_history(tmp_path):
    reporter, throughput = Reporter(), ThroughputCallback()
    args = arguments(tmp_path, include_num_input_tokens_seen="non_padding", gradient_accumulation_steps=2)
    trainer = Trainer(tiny(), args, train_dataset=rows(), callbacks=[reporter])
    trainer.callback_handler.callbacks.insert(0, throughput)
    trainer.train()
    steps = [log for log in reporter.logs if "loss" in log]
    assert len(steps) == 2
    assert all(log["tokens_per_second"] > 0 for log in steps)
    assert "mfu" not in steps[0]  # a CPU's peak is not known
    assert [log["tokens_per_second"] for log in trainer.state.log_history if "loss" in log] == [
        log["tokens_per_second"] for log in steps
    ]
    assert trainer.state.log_history[-1]["train_tokens_per_second"] > 0
    assert throughput._run_tokens == 4 * 2 * 2 * 6  # steps x micro-batches x rows x tokens that are not padding


class Reducing(LoggedMetricsCallback):
    """Counts the calls in which a callback may reduce over processes."""

    def __init__(self):
        self.steps = []

    def metrics(self, args, state):
        self.steps.append(state.global_step)
        return {"mine": 1.0}


def test_a_log_of_the_users_reduces_nothing(tmp_path):
    """One process may log alone: a collective in it would wait for the others for ever."""
    reporter, reducing = Reporter(), Reducing()
    trainer = Trainer(tiny(), arguments(tmp_path), train_dataset=rows(), callbacks=[reporter])
    trainer.callback_handler.callbacks.insert(0, reducing)
    trainer.train()
    trainer.log({"loss": 1.0})
    assert reducing.steps == [2, 4]
    assert ["mine" in log for log in reporter.logs] == [True, True, False, False]


def test_throughput_counts_batches_and_leaves_evaluation_out(tmp_path):
    args = arguments(tmp_path)
    state = Trainer(tiny(), args, train_dataset=rows()).state
    throughput = ThroughputCallback()
    throughput.on_train_begin(args, state, None)
    throughput.count(
        [{"input_ids": torch.zeros(2, 5)}, {"input_ids": torch.zeros(1, 5), "attention_mask": torch.ones(1, 5)}]
    )
    time.sleep(0.02)
    throughput.on_step_end(args, state, None)
    time.sleep(0.3)
    throughput.on_evaluate(args, state, None)
    rate = throughput.metrics(args, state)["tokens_per_second"]
    assert 15 / 0.25 < rate < 15 / 0.02
    assert throughput.metrics(args, state) == {}  # nothing was counted since
    assert throughput.summary(args, state)["tokens_per_second"] > 15 / 0.25


def test_throughput_counts_both_sides_of_a_pair(tmp_path):
    throughput = ThroughputCallback()
    masks = {"chosen_attention_mask": torch.ones(2, 5), "rejected_attention_mask": torch.tensor([[1, 1, 0]])}
    throughput.count([{**masks, "prompt_attention_mask": torch.ones(2, 3)}])  # the prompt is part of both
    assert throughput._pending == 12


def test_flops_formula():
    model = tiny(tie_word_embeddings=False)
    embedding = model.get_input_embeddings().weight.numel()
    n = sum(p.numel() for p in model.parameters()) - embedding
    assert flops_per_token(model) == 6 * n
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert flops_per_token(model) == 4 * n
    tied = tiny(tie_word_embeddings=True)
    assert flops_per_token(tied) == 6 * n  # the embedding counts as the head


def test_flops_of_a_mixture_of_experts_count_the_routed_share():
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=1))
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    rest = sum(p.numel() for p in model.parameters()) - experts - model.get_input_embeddings().weight.numel()
    assert experts > 0
    assert flops_per_token(model) == pytest.approx(6 * (rest + experts / 4))


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA Unheard Of", None),
    ],
)
def test_peak_table(name, flops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), True) == flops
    assert peak_flops(torch.device("cuda"), False) is None
    assert peak_flops(torch.device("cpu"), True) is None


def test_memory(tmp_path):
    trainer = Trainer(tiny(), arguments(tmp_path), train_dataset=rows(), callbacks=[MemoryCallback()])
    trainer.train()
    assert 0.01 < trainer.state.log_history[0]["peak_memory_gib"] < 100
    assert trainer.state.log_history[-1]["train_peak_memory_gib"] >= trainer.state.log_history[0]["peak_memory_gib"]


def test_kernel_report_is_printed_once(tmp_path, capsys):
    report = KernelReport("Tiny", (KernelReportRow("rms_norm", "LlamaRMSNorm", 5, "rms_norm", 1e-7),))
    trainer = Trainer(tiny(), arguments(tmp_path), train_dataset=rows(), callbacks=[KernelReportCallback(report)])
    trainer.train()
    trainer.train()
    assert capsys.readouterr().out.count("LlamaRMSNorm") == 1


class Poison(TrainerCallback):
    """Makes one gradient NaN at one step, as an overflow would."""

    def __init__(self, step, parameter="model.layers.1.mlp.up_proj.weight"):
        self.step, self.parameter = step, parameter

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step:
            dict(model.named_parameters())[self.parameter].grad[0, 0] = float("nan")


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_guard_skips_the_update_exactly(optim, tmp_path, caplog):
    guard = NonFiniteGuardCallback("skip")
    snapshots = []

    class Snapshot(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
            moments = [v.clone() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
            snapshots.append([p.detach().clone() for p in model.parameters()] + moments)

    args = arguments(tmp_path, optim=optim, weight_decay=0.1)
    Trainer(tiny(), args, train_dataset=rows(), callbacks=[Poison(3), guard, Snapshot()]).train()
    assert len(snapshots) == 4
    assert all(torch.equal(a, b) for a, b in zip(snapshots[1], snapshots[2]))
    assert not all(torch.equal(a, b) for a, b in zip(snapshots[2], snapshots[3]))
    assert all(torch.isfinite(tensor).all() for tensor in snapshots[3])
    assert len(guard.findings) == 1
    assert "Step 3" in guard.findings[0]
    assert "'model.layers.1.mlp.up_proj.weight'" in guard.findings[0]
    assert guard.findings[0] in caplog.text


def test_guard_stops_with_a_checkpoint_of_the_last_good_state(tmp_path):
    guard = NonFiniteGuardCallback("stop")
    trainer = Trainer(tiny(), arguments(tmp_path), train_dataset=rows(), callbacks=[Poison(3), guard])
    trainer.train()
    assert trainer.state.global_step == 3
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    reference = Trainer(tiny(), arguments(tmp_path / "b", max_steps=4), train_dataset=rows())

    class StopAt2(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    reference.add_callback(StopAt2())
    reference.train()
    for (name, a), b in zip(saved.named_parameters(), reference.model.parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)


def test_guard_names_a_parameter_that_is_not_finite(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = math.inf
    trainer = Trainer(model, arguments(tmp_path), train_dataset=rows(), callbacks=[NonFiniteGuardCallback("stop")])
    found = "Stopped before step 1: parameter 'model.layers.0.self_attn.q_proj.weight' is not finite"
    with pytest.raises(NonFiniteError, match=found):
        trainer.train()


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_guard_ends_a_training_whose_update_overflows(action, tmp_path):
    args = arguments(tmp_path, learning_rate=math.inf)  # the gradients are finite, and stay so
    trainer = Trainer(tiny(), args, train_dataset=rows(), callbacks=[NonFiniteGuardCallback(action)])
    with pytest.raises(
        NonFiniteError, match=r"Stopped at step 2: parameter 'model\..*is not finite since the update before"
    ):
        trainer.train()
    assert not any(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_guard_looks_at_every_element(value, dtype, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 3, dtype=dtype))
    model[0].weight.requires_grad_(False).fill_(3e38)  # frozen and large, and finite
    args, guard = arguments(tmp_path), NonFiniteGuardCallback()
    state = TrainerState(global_step=7)
    guard.check_before_save(model, args, state, alike=True)
    with torch.no_grad():
        model[1].weight[2, 49] = value
    with pytest.raises(
        NonFiniteError, match=r"Stopped at step 7: parameter '1\.weight' is not finite\. .*no checkpoint"
    ):
        guard.check_before_save(model, args, state, alike=True)


def test_guard_does_not_read_the_bits_of_a_quantiser(tmp_path):
    model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    model.weight.requires_grad_(False).fill_(
        math.nan
    )  # packed bytes look like that in `bnb_4bit_quant_storage: bfloat16`
    model.is_quantized = True
    NonFiniteGuardCallback().check_before_save(model, arguments(tmp_path), TrainerState(), alike=True)


def test_guard_names_the_loss():
    model = torch.nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    guard = NonFiniteGuardCallback("skip")
    guard.observe_loss(torch.tensor(1.0))
    guard.observe_loss(torch.tensor(math.nan))
    optimizer = torch.optim.SGD(model.parameters())
    state = type("State", (), {"global_step": 6})()
    guard.on_pre_optimizer_step(None, state, None, model=model, optimizer=optimizer)
    assert "Step 7: the loss of micro-batch 2 of 2 (nan) is not finite" in guard.findings[0]
    assert model.weight.grad is None


def test_guard_rejects_an_unknown_action():
    with pytest.raises(ValueError, match="'stop' or 'skip'"):
        NonFiniteGuardCallback("explode")


def test_the_peak_has_the_memory_of_graphs_as_long_as_they_exist(monkeypatch):
    class Backend:
        peak = 7

        def max_memory_allocated(self, device):
            return self.peak

        def reset_peak_memory_stats(self, device):
            self.peak = 0

        def current_device(self):
            return 0

    class Graphs:
        device, reserved = torch.device("cuda"), 0

    backend, graphs = Backend(), Graphs()
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    memory.reset_peak(graphs.device)
    memory.add_reserve(graphs)
    backend.peak = 10  # with what was captured
    memory.remember_peak(graphs.device)
    backend.peak, graphs.reserved = 5, 3
    assert memory.peak_memory(graphs.device) == 10
    backend.peak = 8
    assert memory.peak_memory(graphs.device) == memory.peak_memory(torch.device("cuda", 0)) == 11
    assert memory.peak_memory(torch.device("cuda", 1)) == 8
    memory.reset_peak(graphs.device)
    assert memory.peak_memory(graphs.device) == 3
    del graphs
    assert memory.peak_memory(torch.device("cuda")) == 0
