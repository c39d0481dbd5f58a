"""The Liger trainers on a model that two gloo processes split, beside the stock trainers in one process."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Trainer

from liger_trainer.trainers.generation_trainers import seed_groups_alike
from liger_trainer.trainers.trainer import LigerTrainer
from liger_trainer.trainers.trl_mixin import _check_whole_head
from tests.trainers.builders import causal
from tests.trainers.parity import assert_close_logs, build, results_of_processes
from tests.trainers.tiny import llama, logged, tokenizer

pytest.importorskip("transformers.distributed")

LORA = "SFT, lora"
CASES = {
    "trainer": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "SFT": {},
    LORA: {"peft_config": LoraConfig(target_modules=["q_proj", "v_proj"], r=4)},
    "DPO": {},
    "GRPO": {"gradient_accumulation_steps": 2},
}
COUNTED_BY_PROCESS = {"total_flos"}  # as if each process had tokens of its own


def train(name, folder, ours, split):
    """Logs of a training; `split` loads the model for two processes."""
    from transformers.distributed import DistributedConfig

    def model():
        options = {"distributed_config": DistributedConfig(tp_size=2)} if split else {}
        return AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32, **options)

    case, output_dir = dict(CASES[name]), f"{folder}/{name}{ours}"
    kind = name.partition(",")[0]
    if kind in ("trainer", "label smoothing"):
        trainer = causal(output_dir, model(), LigerTrainer if ours else Trainer, **case)
    else:
        if kind == "DPO":
            case["ref_model"] = model()
        trainer = build(kind, ours, output_dir, model(), **case)
    if ours:
        (head,) = (row for row in trainer.kernel_report if row.component == "linear_cross_entropy")
        assert "vocabulary parallel" in head.kernel, head
    trainer.train()
    return logged(trainer)


def work(folder):
    import accelerate

    # accelerate has nothing against CPUs here but this check, as its own tests need accelerators.
    accelerate.ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    results = {name: train(name, folder, ours=True, split=True) for name in CASES}
    results["stock, split"] = train(LORA, folder, ours=False, split=True)
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    llama().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return folder, results_of_processes(work, folder, CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")


@pytest.mark.parametrize("name", CASES)
def test_two_processes_log_what_one_does(name, ranks):
    folder, results = ranks
    # PEFT draws other weights for adapters of another width.
    expected = results[0]["stock, split"] if name == LORA else train(name, folder, ours=False, split=False)
    for rank in results:
        assert_close_logs(rank[name], expected, COUNTED_BY_PROCESS, absolute=2e-5, relative=2e-5)


def stub(**changed):
    args = {"use_vllm": False, "per_device_train_batch_size": 4, "steps_per_generation": 1, "num_generations": 4}
    args |= {"seed": 3, "process_index": 3, **changed}
    args = SimpleNamespace(**args)
    return SimpleNamespace(get_tp_size=lambda: 2, get_cp_size=lambda: 1, args=args, train_dataset=[])


def test_processes_of_a_group_seed_groups_alike():
    drawn = []
    for process in range(4):
        seed_groups_alike(stub(process_index=process))
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def test_what_cannot_be_generated_alike_is_refused():
    with pytest.raises(ValueError, match=r"`use_vllm` is true.*set `use_vllm=False`"):
        seed_groups_alike(stub(use_vllm=True))
    with pytest.raises(ValueError, match=r"generates 6 completions at a time.*must be a multiple"):
        seed_groups_alike(stub(per_device_train_batch_size=6))
    streamed = stub()
    streamed.train_dataset = iter([])
    with pytest.raises(ValueError, match="`train_dataset` is streamed"):
        seed_groups_alike(streamed)


def test_a_split_head_in_fp32_is_refused():
    with pytest.raises(ValueError, match=r"`cast_lm_head_to_fp32` is true and the model is split"):
        _check_whole_head(SimpleNamespace(tp_size=2))
    _check_whole_head(llama())
