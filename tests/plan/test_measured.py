"""The formulas against peaks measured on one H200; no case has a constant of its own."""

import pytest

from liger_trainer.plan.estimate import estimate
from liger_trainer.plan.settings import Setting
from tests.plan.cases import GIB, run_of

FOUR = Setting(batch=4)
WHOLE = Setting(batch=4, checkpointing=False)
OFFLOADED = Setting(batch=4, offloading=1.0)
LONG = Setting(tiled_mlp=True, offloading=1.0)
LLAMA = {"name": "llama3-8b", "length": 4096}
QWEN = {"name": "qwen3-30b-a3b", "length": 4096}
LORA = {**LLAMA, "rank": 16}
PAIRS = {**LORA, "loss": "log_probs", "length": 2048, "rows": 2}
LONG_PAIR = {**PAIRS, "length": 32768}
GRPO = {**LORA, "loss": "log_probs", "length": 2048, "prompt": 256}
PEFT = {"fused": False}  # PEFT's own LoRA layers, with our other kernels
STOCK = {"fused_experts": False}  # transformers' experts
RECOMPUTED = {"recompute_mlp": True}

CASES = {
    "full, llama": ({**LLAMA, **STOCK}, FOUR, 61.3, 0.10),
    "full, gemma": ({**LLAMA, **STOCK, "name": "gemma3-4b"}, FOUR, 31.15, 0.10),
    "full, 12 layers of qwen": ({**QWEN, **STOCK, "layers": 12}, FOUR, 62.7, 0.10),
    "our experts, 12 layers": ({**QWEN, "layers": 12}, FOUR, 61.5, 0.02),
    "our experts, adapters on attention and experts": ({**QWEN, "rank": 16}, FOUR, 68.9, 0.02),
    "PEFT, DPO, 4 pairs of 2048": ({**PAIRS, **PEFT}, FOUR, 23.8, 0.10),
    "PEFT, GRPO, 8 of 2048": ({**GRPO, **PEFT}, Setting(batch=8), 24.9, 0.10),
    "PEFT, DPO, 1 pair of 32768": ({**LONG_PAIR, **PEFT}, Setting(), 48.5, 0.10),
    "PEFT, DPO, 1 pair of 32768, tiled and offloaded": ({**LONG_PAIR, **PEFT}, LONG, 23.1, 0.10),
    "LoRA, offloaded": (LORA, OFFLOADED, 18.03, 0.10),
    "QLoRA, offloaded": ({**LORA, "bits": 4}, OFFLOADED, 8.49, 0.10),
    "LoRA, no checkpointing": (LORA, WHOLE, 70.4, 0.10),
    "LoRA, DPO, 4 pairs of 2048": (PAIRS, FOUR, 21.93, 0.05),
    "LoRA, GRPO, 8 of 2048": (GRPO, Setting(batch=8), 22.39, 0.05),
    "LoRA, DPO, 1 pair of 221184, tiled and offloaded": (
        {**PAIRS, **RECOMPUTED, "length": 221184},
        Setting(tiled_mlp=True, offloading=0.6),
        108.2,
        0.10,
    ),
    "FSDP2, 4 x 8 x 4096": (LLAMA, Setting("fsdp2", 4, 8), 38.02, 0.10),
    "FSDP2, 4 x 8 x 16384": ({**LLAMA, "length": 16384}, Setting("fsdp2", 4, 8), 77.4, 0.10),
    "FSDP2, 2 x 8 x 4096": (LLAMA, Setting("fsdp2", 2, 8), 65.8, 0.10),
    "FSDP2, 2 x 8 x 4096, recomputed": ({**LLAMA, **RECOMPUTED}, Setting("fsdp2", 2, 8), 64.9, 0.10),
    "FSDP2, 2 x 8 x 8192, recomputed": ({**LLAMA, **RECOMPUTED, "length": 8192}, Setting("fsdp2", 2, 8), 72.3, 0.10),
    "FSDP2, 2 x 8 x 16384, recomputed": ({**LLAMA, **RECOMPUTED, "length": 16384}, Setting("fsdp2", 2, 8), 96.8, 0.10),
    "FSDP2, 2 x 8 x 32768, recomputed, tiled, half offloaded": (
        {**LLAMA, **RECOMPUTED, "length": 32768},
        Setting("fsdp2", 2, 8, tiled_mlp=True, offloading=0.5),
        104.1,
        0.05,
    ),
    "expert parallel, 4 layers, 2 x 8 x 4096": (
        {**QWEN, "layers": 4},
        Setting("expert_parallel", 2, 8, expert_parallel_size=2),
        17.83,
        0.05,
    ),
    "expert parallel, 4 layers, 2 x 8 x 4096, no checkpointing": (
        {**QWEN, "layers": 4},
        Setting("expert_parallel", 2, 8, expert_parallel_size=2, checkpointing=False),
        25.86,
        0.05,
    ),
    # Liger's kernels, whose layers save the same tensors, around PEFT's; no constant was chosen by these.
    "Liger, full, no checkpointing": ({**LLAMA, **PEFT}, WHOLE, 114.7, 0.10),
    "Liger, adapters, no checkpointing": ({**LORA, **PEFT}, WHOLE, 101.6, 0.10),
    "Liger, adapters": ({**LORA, **PEFT}, FOUR, 23.8, 0.10),
}


@pytest.mark.parametrize(("run", "setting", "measured", "tolerance"), CASES.values(), ids=CASES)
def test_peak(run, setting, measured, tolerance):
    memory = estimate(run_of(**run), setting)
    assert memory.total / GIB == pytest.approx(measured, rel=tolerance), memory
