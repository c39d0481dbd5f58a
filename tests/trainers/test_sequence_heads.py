"""Our attention with `sp_size=2` and DeepSpeed on two gloo processes: losses and weights of stock trainers in one."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import Trainer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import SFTTrainer

from liger_trainer.attention.config_names import NAME
from liger_trainer.attention.interface import attention_forward
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.trainers.sequence_parts import SequencePartsMixin, collated_columns, of_one_rank
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.distributed.accelerate_launch import as_launched
from tests.distributed.accelerate_worker import prepare_process, weights_of
from tests.distributed.accelerate_zero3 import release_groups
from tests.trainers.builders import causal, sft
from tests.trainers import parity
from tests.trainers.parity import lora
from tests.trainers.test_sequence_parts import SETTINGS, model_of, rows
from tests.trainers.tiny import llama, logged

pytest.importorskip("deepspeed")

LAUNCH = [
    "--config_file",
    "configs/accelerate/zero2.yaml",
    "--mixed_precision",
    "no",
    "--num_processes",
    "2",
    "worker.py",
]
OPTIONS = {**SETTINGS, "optim": "sgd", "learning_rate": 0.5, "pad_to_multiple_of": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "padded": ("llama", {}),
    "windows": ("mistral", {}),
    "windows and all keys": ("gemma3_text", {"gradient_checkpointing": True}),
    "one head of keys": ("one head of keys", {}),
    "soft-caps": ("gemma2", {}),
    "sinks": ("gpt_oss", {}),
    "padding on the left": ("mistral", {"side": "left"}),
    "packed": ("gemma3_text", {"side": "packed"}),
    "evaluation": ("mistral", {"eval_strategy": "steps", "eval_steps": 1}),
    # DeepSpeed gathers rows of one length alone with gloo.
    "SFT": ("mistral", {"max_length": 64, "pad_to_multiple_of": 64}),
    "SFT, packed": ("gemma3_text", {"packing": True, "max_length": 24, "pad_to_multiple_of": 96}),
    "SFT, LoRA": ("mistral", {"max_length": 64, "pad_to_multiple_of": 64, "peft_config": lora()}),
    # These divide rows of any length themselves.
    "DPO": ("mistral", {}),
    "DPO, lengths": ("gemma3_text", {"loss_type": ["ipo", "sigmoid"], "ld_alpha": 0.5, "use_weighting": True}),
    "DPO, LoRA": ("gemma3_text", {"peft_config": lora(), "eval_strategy": "steps", "eval_steps": 1}),
    "DPO, epochs": ("mistral", {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2}),
    "KTO": ("mistral", {"gradient_accumulation_steps": 2}),
    "KTO, LoRA": ("gemma3_text", {"peft_config": lora()}),
    "GRPO": ("mistral", {"beta": 0.1}),
    "GRPO, sequences": (
        "gemma3_text",
        {"importance_sampling_level": "sequence", "top_entropy_quantile": 0.7, "entropy_coef": 0.1, "max_steps": 3}
        | {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "loss_type": "luspo"},
    ),
    "GRPO, LoRA": ("mistral", {"peft_config": lora(), "beta": 0.1, "eval_strategy": "steps", "eval_steps": 1}),
    "RLOO": ("mistral", {"gradient_accumulation_steps": 2}),
}


def train(name: str, folder: Any, ours: bool, spread: bool) -> dict[str, Any]:
    """The logs of a training and its weights; `spread` splits each sequence over two processes."""
    family, case = CASES[name]
    case = {**OPTIONS, **case}
    if spread:
        handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
        case |= {"use_cpu": False, "parallelism_config": ParallelismConfig(sp_size=2, sp_handler=handler)}
    model = llama(num_key_value_heads=1) if family == "one head of keys" else model_of(family)
    output_dir = f"{folder}/{name}{ours}"
    kind = name.partition(",")[0]
    if kind in parity.KINDS and kind != "SFT":
        del case["pad_to_multiple_of"]
        trainer = parity.build(kind, ours, output_dir, f"{folder}/{family}", **case)
    elif kind == "SFT":
        trainer = sft(output_dir, model, LigerSFTTrainer if ours else SFTTrainer, **case)
    else:
        del case["pad_to_multiple_of"]
        # DeepSpeed wants positions in every batch.
        given = [{"position_ids": torch.arange(10), **row} for row in rows(case.pop("side", None))]
        if "eval_strategy" in case:
            case["eval_dataset"] = given[:8]
        trainer = causal(output_dir, model, LigerTrainer if ours else Trainer, given, **case)
    before = {key: value.detach().clone() for key, value in trainer.model.named_parameters()}
    trainer.train()
    attention = [each for each in trainer.kernel_report.rows if each.component == "attention"] if ours else []
    after = weights_of(trainer)
    return {
        "logs": logged(trainer),
        "learnt": {key: after[key] - value for key, value in before.items() if key in after and value.requires_grad},
        "attention": [(row.kernel, row.reason) for row in attention],
        "handler": handler.sp_attn_implementation if spread else "",
        "function": ALL_ATTENTION_FUNCTIONS[NAME] is attention_forward,
    }


def work(folder: str) -> None:
    """What both processes run."""
    prepare_process()
    found = {}
    for name in CASES:
        found[name] = train(name, folder, ours=True, spread=True)
        release_groups()
    torch.save(found, Path(folder, f"rank{os.environ['RANK']}.pt"))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("spread")
    for family in ("mistral", "gemma3_text"):  # a reference is loaded from where the policy was
        model_of(family).save_pretrained(folder / family)
    done = as_launched(LAUNCH, work, str(folder), environment={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_processes_that_exchange_heads_learn_what_one_does(
    name: str, processes: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, results = processes
    expected = train(name, folder, ours=False, spread=False)
    for rank in results:
        found = rank[name]
        assert found["attention"], "it has no attention"
        assert all(kernel for kernel, _ in found["attention"]), found["attention"]
        assert (found["handler"], found["function"]) == ("sdpa", True), "DeepSpeed's attention was left in place"
        assert len(found["logs"]) == len(expected["logs"])
        for one, other in zip(found["logs"], expected["logs"]):
            for key in other.keys() - {"total_flos", "epoch", "step_time", "eval_step_time"}:
                assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), key
        assert found["learnt"].keys() == expected["learnt"].keys()
        for key, learnt in expected["learnt"].items():
            atol = 1e-5 * float(learnt.abs().max()) + 1e-8
            torch.testing.assert_close(found["learnt"][key], learnt, rtol=1e-5, atol=atol, msg=key)


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 2, 3), (6, 2, 3), (8, 3, 2)])
def test_heads_that_processes_cannot_share_are_refused(heads: int, key_heads: int, size: int) -> None:
    trainer: Any = SequencePartsMixin()
    trainer.args = types.SimpleNamespace(torch_compile=False)
    sizes = types.SimpleNamespace(cp_enabled=False, sp_enabled=True, sp_size=size)
    trainer.accelerator = types.SimpleNamespace(parallelism_config=sizes)
    model: Any = llama()
    apply_liger_kernel(model)
    model.config.update({"num_attention_heads": heads, "num_key_value_heads": key_heads})
    refused = rf"`sp_size` is {size}, and attention has {heads} heads of queries and {key_heads} of keys"
    with pytest.raises(ValueError, match=refused):
        trainer._split_sequences(model)
    model.active_peft_config = types.SimpleNamespace(is_prompt_learning=True)
    with pytest.raises(
        ValueError, match=rf"`sp_size` is {size}, and SimpleNamespace puts virtual tokens .* `sp_size=1`"
    ):
        trainer._split_sequences(model)


def test_the_gradient_is_that_of_one_process() -> None:
    leaf = torch.tensor(3.0, requires_grad=True)
    loss, outputs = of_one_rank((leaf * 2, "outputs"), 4)
    assert (loss.item(), outputs) == (6.0, "outputs")
    loss.backward()
    assert leaf.grad == 0.5
    assert of_one_rank(leaf, 4).item() == 3.0


def test_only_columns_of_tokens_are_collated() -> None:
    batch = {"input_ids": 1, "position_ids": 2, "cu_seq_lens_q": 3, "cu_seq_lens_k": 3, "max_length_q": 4}
    assert collated_columns(lambda rows: {**batch, "max_length_k": 4}, []) == {"input_ids": 1, "position_ids": 2}
