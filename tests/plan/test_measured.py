"""The formulas against peaks measured on one H200; no case has a constant of its own."""

import dataclasses

import pytest

from liger_trainer.plan.estimate import estimate
from liger_trainer.plan.settings import Setting
from tests.plan.cases import GIB, run_of

FULL = [
    ("llama3-8b", 0, 61.3),
    ("gemma3-4b", 0, 31.15),
    ("qwen3-30b-a3b", 12, 62.7),  # with transformers' experts
]


@pytest.mark.parametrize(("model", "layers", "measured"), FULL)
def test_full_fine_tuning(model, layers, measured):
    memory = estimate(run_of(model, 4096, layers, fused_experts=False), Setting(batch=4))
    assert memory.total / GIB == pytest.approx(measured, rel=0.10), memory


EXPERTS = [("12 layers", 12, 0, 61.5), ("48 layers, adapters on attention and experts", 0, 16, 68.9)]


@pytest.mark.parametrize(
    ("layers", "rank", "measured"), [case[1:] for case in EXPERTS], ids=[case[0] for case in EXPERTS]
)
def test_our_experts(layers, rank, measured):
    memory = estimate(run_of("qwen3-30b-a3b", 4096, layers, rank=rank), Setting(batch=4))
    assert memory.total / GIB == pytest.approx(measured, rel=0.02), memory


PEFT_LAYERS = [  # PEFT's own LoRA layers, with our other kernels
    ("DPO, 4 pairs of 2048", {"length": 2048, "rows": 2}, Setting(batch=4), 23.8),
    ("GRPO, 8 of 2048", {"length": 2048, "prompt": 256}, Setting(batch=8), 24.9),
    ("DPO, 1 pair of 32768", {"length": 32768, "rows": 2}, Setting(), 48.5),
    (
        "the same, tiled and offloaded",
        {"length": 32768, "rows": 2},
        Setting(tiled_mlp=True, offloading=1.0),
        23.1,
    ),
]


@pytest.mark.parametrize(
    ("work", "setting", "measured"), [case[1:] for case in PEFT_LAYERS], ids=[case[0] for case in PEFT_LAYERS]
)
def test_adapters_of_peft(work, setting, measured):
    memory = estimate(run_of("llama3-8b", rank=16, loss="log_probs", fused=False, **work), setting)
    assert memory.total / GIB == pytest.approx(measured, rel=0.10), memory


ADAPTERS = [  # all of ours
    ("LoRA, offloaded", None, Setting(batch=4, offloading=1.0), 18.03),
    ("QLoRA, offloaded", 4, Setting(batch=4, offloading=1.0), 8.49),
    ("LoRA, no checkpointing", None, Setting(batch=4, checkpointing=False), 70.4),
]


@pytest.mark.parametrize(
    ("bits", "setting", "measured"), [case[1:] for case in ADAPTERS], ids=[case[0] for case in ADAPTERS]
)
def test_adapters(bits, setting, measured):
    memory = estimate(run_of("llama3-8b", 4096, rank=16, bits=bits), setting)
    assert memory.total / GIB == pytest.approx(measured, rel=0.10), memory


LOG_PROBS = [
    ("DPO, 4 pairs of 2048", {"length": 2048, "rows": 2}, Setting(batch=4), 21.93),
    ("GRPO, 8 of 2048", {"length": 2048, "prompt": 256}, Setting(batch=8), 22.39),
]


@pytest.mark.parametrize(
    ("work", "setting", "measured"), [case[1:] for case in LOG_PROBS], ids=[case[0] for case in LOG_PROBS]
)
def test_adapters_under_log_probs(work, setting, measured):
    memory = estimate(run_of("llama3-8b", rank=16, loss="log_probs", **work), setting)
    assert memory.total / GIB == pytest.approx(measured, rel=0.05), memory


FSDP2 = [  # with the products of MLPs kept, and without
    ("8 x 4096", 4, 4096, False, 38.02),
    ("8 x 16384", 4, 16384, False, 77.4),
    ("8 x 4096 on two", 2, 4096, False, 65.8),
    ("8 x 4096 on two, recomputed", 2, 4096, True, 64.9),
    ("8 x 8192 on two, recomputed", 2, 8192, True, 72.3),
    ("8 x 16384 on two, recomputed", 2, 16384, True, 96.8),
]


@pytest.mark.parametrize(
    ("gpus", "length", "recompute", "measured"), [case[1:] for case in FSDP2], ids=[case[0] for case in FSDP2]
)
def test_several_gpus(gpus, length, recompute, measured):
    run = dataclasses.replace(run_of("llama3-8b", length), recompute_mlp=recompute)
    memory = estimate(run, Setting("fsdp2", gpus, 8))
    assert memory.total / GIB == pytest.approx(measured, rel=0.10), memory


def test_a_long_sequence_on_two_gpus():
    run = dataclasses.replace(run_of("llama3-8b", 32768), recompute_mlp=True)
    memory = estimate(run, Setting("fsdp2", 2, 8, tiled_mlp=True, offloading=0.5))
    assert memory.total / GIB == pytest.approx(104.1, rel=0.05), memory


EXPERT_PARALLEL = [("checkpointing", True, 17.83), ("no checkpointing", False, 25.86)]


@pytest.mark.parametrize(
    ("checkpointing", "measured"), [case[1:] for case in EXPERT_PARALLEL], ids=[case[0] for case in EXPERT_PARALLEL]
)
def test_experts_of_two_gpus(checkpointing, measured):
    """Four layers of Qwen3-30B-A3B, 8 x 4096 on each GPU."""
    run, split = run_of("qwen3-30b-a3b", 4096, 4), {"expert_parallel_size": 2, "checkpointing": checkpointing}
    memory = estimate(run, Setting("expert_parallel", 2, 8, **split))
    assert memory.total / GIB == pytest.approx(measured, rel=0.05), memory


def test_a_very_long_pair():
    run = dataclasses.replace(run_of("llama3-8b", 221184, rank=16, loss="log_probs", rows=2), recompute_mlp=True)
    memory = estimate(run, Setting(tiled_mlp=True, offloading=0.6))
    assert memory.total / GIB == pytest.approx(108.2, rel=0.10), memory


LIGER = [  # Liger's kernels, whose layers keep the same tensors, around PEFT's; no constant was chosen by these
    ("full, no checkpointing", 0, Setting(batch=4, checkpointing=False), 114.7),
    ("adapters, no checkpointing", 16, Setting(batch=4, checkpointing=False), 101.6),
    ("adapters", 16, Setting(batch=4), 23.8),
]


@pytest.mark.parametrize(("rank", "setting", "measured"), [case[1:] for case in LIGER], ids=[case[0] for case in LIGER])
def test_with_liger(rank, setting, measured):
    memory = estimate(run_of("llama3-8b", 4096, rank=rank, fused=False), setting)
    assert memory.total / GIB == pytest.approx(measured, rel=0.10), memory
