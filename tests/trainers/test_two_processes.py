"""Two gloo processes: the stock trainers' numbers."""

import json
from pathlib import Path

from transformers import Trainer
from trl import SFTTrainer

from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.forked import torchrun
from tests.trainers.builders import causal, sft
from tests.trainers.parity import assert_close_logs, build, lora
from tests.trainers.tiny import COMMON, llama, logged

PAIRS = {"ours": "stock", "sft_ours": "sft_stock", "dpo_ours": "dpo_stock", "head_ours": "head_naive"}
PAIRS |= {"dpo_several": "dpo_stock", "grpo_several": "grpo_stock"}  # forwards for a batch, as many on both processes


def preference(output_dir, ours, settings, kind="DPO", most=None, **case):
    """Logs of DPO, whose reference model is loaded from the folder of the policy, or of GRPO."""
    settings = {
        **settings,
        "gradient_checkpointing": True,
        "own": {"logits_memory": 128 * 4 * 7, "kernel_report": most is None, "tokens_per_micro_batch": most},
    }
    model = f"{Path(output_dir).parent}/model"
    trainer = build(kind, ours, output_dir, model, **{**settings, **case})
    trainer.train()
    return logged(trainer)


def work(output_dir):
    settings = {**COMMON, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    results = {}
    for name, build_trainer, trainer_class in (
        ("stock", causal, Trainer),
        ("ours", causal, LigerTrainer),
        ("sft_stock", sft, SFTTrainer),
        ("sft_ours", sft, LigerSFTTrainer),
    ):
        trainer = build_trainer(f"{output_dir}/{name}", trainer_class=trainer_class, **settings)
        trainer.train()
        results[name] = logged(trainer)
    for name, ours in (("dpo_stock", False), ("dpo_ours", True)):
        results[name] = preference(f"{output_dir}/{name}", ours, settings)
    for name, ours in (("head_naive", False), ("head_ours", True)):
        results[name] = preference(f"{output_dir}/{name}", ours, settings, naive=not ours, peft_config=lora("lm_head"))
    results["dpo_several"] = preference(f"{output_dir}/dpo_several", True, settings, most=22)
    for name, most in (("grpo_stock", None), ("grpo_several", 14)):
        results[name] = preference(f"{output_dir}/{name}", most is not None, settings, "GRPO", most)
    Path(output_dir, f"rank{trainer.args.process_index}.json").write_text(json.dumps(results))


def test_two_processes(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    done = torchrun(work, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        results = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for ours, stock in PAIRS.items():
            assert_close_logs(results[ours], results[stock])
    assert done.stdout.count("liger_trainer kernels in") == 4  # the main process alone reports
