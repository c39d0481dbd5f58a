"""Our attention with `cp_size=2` and FSDP2 on two gloo processes: losses and gradients of stock trainers in one."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback
from trl import SFTTrainer

from liger_trainer.attention.interface import PROVED, attention_forward, attention_mask
from liger_trainer.kernels.attention.plan import Ranks
from liger_trainer.parallel.sequence_parts import columns_of
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.trainers.sequence_parts import SequencePartsMixin, attended, part_of_batch
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.attention.families import TAKEN
from tests.distributed.accelerate_worker import shard_on_cpu
from tests.forked import torchrun
from tests.once import shared_folder
from tests.tiny_models import TINY_MODELS
from tests.trainers import parity
from tests.trainers.builders import causal, sft
from tests.trainers.parity import lora
from tests.trainers.tiny import logged, token_rows

WINDOW = 3
SETTINGS = {"max_steps": 2, "learning_rate": 1e-3, "max_grad_norm": 0.0, "adam_epsilon": 1e-3}
PACKED = {"packing": True, "max_length": 24}
ALIGNMENT: dict[str, tuple[str, dict[str, Any]]] = {
    "DPO": ("mistral", {}),
    "DPO, lengths": ("gemma3_text", {"loss_type": ["ipo", "sigmoid"], "ld_alpha": 0.5, "use_weighting": True}),
    "DPO, LoRA": ("gemma3_text", {"peft_config": lora(), "eval_strategy": "steps", "eval_steps": 1}),
    "KTO": ("mistral", {"gradient_accumulation_steps": 2}),
    "KTO, LoRA": ("gemma3_text", {"peft_config": lora()}),
    "GRPO, sequences": (
        "gemma3_text",
        {"importance_sampling_level": "sequence", "top_entropy_quantile": 0.7, "entropy_coef": 0.1, "max_steps": 3}
        | {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "loss_type": "luspo"},
    ),
    "GRPO, LoRA": ("mistral", {"peft_config": lora(), "beta": 0.1, "eval_strategy": "steps", "eval_steps": 1}),
    "RLOO": ("mistral", {"gradient_accumulation_steps": 2}),
}
"""Alignment with either way to spread sequences: a family of models, and settings."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "padded": ("llama", {}),
    "windows": ("mistral", {"gradient_accumulation_steps": 2}),
    "windows and all keys": ("gemma3_text", {"gradient_checkpointing": True}),
    "soft-caps": ("gemma2", {}),
    "sinks": ("gpt_oss", {}),
    "padding on the left": ("mistral", {"side": "left"}),
    "packed": ("gemma3_text", {"side": "packed"}),
    "label smoothing": ("mistral", {"label_smoothing_factor": 0.1}),
    "evaluation": ("mistral", {"eval_strategy": "steps", "eval_steps": 1}),
    "SFT": ("mistral", {"max_length": 64}),
    "SFT, packed": ("gemma3_text", PACKED),
    "SFT, packed, all keys": ("llama", {**PACKED, "per_device_train_batch_size": 1}),
    "SFT, dft": ("mistral", {"loss_type": "dft"}),
    **ALIGNMENT,
    "GRPO": ("mistral", {}),
    "GRPO, clipped": ("gemma3_text", {"max_steps": 4, "beta": 0.1, "steps_per_generation": 2, "num_iterations": 2}),
}


def rows(side: str | None, count: int = 16) -> list[dict[str, torch.Tensor]]:
    """Rows of ten tokens, which four chunks do not divide; padded on the right, on the left, or of two documents."""
    found = token_rows(count)
    if side == "left":
        found = [
            {name: value.roll(int((row["attention_mask"] == 0).sum())) for name, value in row.items()} for row in found
        ]
    if side == "packed":
        for place, row in enumerate(found):
            del row["attention_mask"]
            first = 3 + place % 5
            row["position_ids"] = torch.cat([torch.arange(first), torch.arange(10 - first)])
            row["labels"][first] = -100
    return found


def model_of(family: str) -> Any:
    """A tiny model, with windows if the family has any."""
    known = TAKEN[family]
    return TINY_MODELS[family](**known.fields, **({known.window: WINDOW} if known.window else {}), vocab_size=128)


FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


class Gradients(TrainerCallback):
    """Keeps the gradients of the first step."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self.sharded = False

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        if not self.found:
            self.sharded = any(isinstance(each.grad, DTensor) for each in model.parameters())
            gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
            self.found = {
                name: each.full_tensor() if isinstance(each, DTensor) else each.clone()
                for name, each in gradients.items()
            }


def train(name: str, folder: Any, ours: bool, spread: bool) -> dict[str, Any]:
    """The logs of a training and the gradients of its first step; `spread` splits each sequence over two processes."""
    from accelerate import ParallelismConfig

    family, case = CASES[name]
    case, keeps = {**SETTINGS, **case}, Gradients()
    case["callbacks"] = [keeps]
    if spread:
        case["use_cpu"] = False  # which would be DDP
        case["parallelism_config"] = ParallelismConfig(cp_size=2)
    model, output_dir = model_of(family), f"{folder}/{name}{ours}"
    kind = name.partition(",")[0]
    if kind in ("DPO", "KTO", "GRPO", "RLOO"):
        del case["callbacks"]
        trainer = parity.build(kind, ours, output_dir, f"{folder}/{family}", **case)
        trainer.add_callback(keeps)
    elif name.startswith("SFT"):
        trainer = sft(output_dir, model, LigerSFTTrainer if ours else SFTTrainer, **case)
    else:
        given = rows(case.pop("side", None))
        if "eval_strategy" in case:
            case["eval_dataset"] = rows(None, 8)
        trainer = causal(output_dir, model, LigerTrainer if ours else Trainer, given, **case)
    trainer.train()
    attention = (
        [] if not ours else [(row.kernel, row.reason) for row in trainer.kernel_report if row.component == "attention"]
    )
    return {"logs": logged(trainer), "gradients": keeps.found, "sharded": keeps.sharded, "attention": attention}


def work(folder: str) -> None:
    """What both processes run."""
    shard_on_cpu()
    torch.save({name: train(name, folder, True, True) for name in CASES}, Path(folder, f"rank{os.environ['RANK']}.pt"))


BATCH = {
    "input_ids": torch.arange(3, 23).view(2, 10),
    "labels": torch.arange(3, 23).view(2, 10),
    "attention_mask": torch.tensor([[1] * 10, [0] * 3 + [1] * 5 + [0] * 2]),
    "beta": torch.ones(2),
}


def of_both(batch: dict[str, Any], option: str = "cp_size") -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The parts of two processes, and the columns that they have together, in order."""
    ranks = [Ranks(rank, 2, "none", option) for rank in range(2)]
    parts, batches = zip(*(part_of_batch(batch, each) for each in ranks))
    order = torch.cat([columns_of(each, 12) for each in ranks]).argsort()
    assert batches[0].keys() == batches[1].keys()
    whole = {name: torch.cat([each[name] for each in batches], 1)[:, order] for name in batches[0] if name != "beta"}
    return list(parts), whole


@pytest.mark.parametrize("option", ["cp_size", "sp_size"])
def test_processes_have_the_columns_of_the_batch_together(option: str) -> None:
    parts, whole = of_both(BATCH, option)
    assert [each.begins for each in parts] == [[[0, 10], [0, 3, 8, 10]]] * 2
    assert whole["input_ids"].tolist() == [[*range(3, 13), 0, 0], [*range(13, 23), 0, 0]]
    assert whole["position_ids"].tolist() == [[*range(10), 0, 0]] * 2
    assert whole["attention_mask"][:, 10:].sum() == 0
    # The label of the token behind each, wherever that is.
    assert whole["shift_labels"].tolist() == [[*range(4, 13), *[-100] * 3], [*range(14, 23), *[-100] * 3]]
    assert "beta" in part_of_batch(BATCH, Ranks(0, 2, "none"))[1]
    assert BATCH.keys() == {"input_ids", "labels", "attention_mask", "beta"}, "the batch itself has changed"


def test_processes_that_exchange_heads_have_one_part_each() -> None:
    parts, batch = part_of_batch(BATCH, Ranks(1, 2, "none", "sp_size"))
    assert batch["input_ids"].tolist() == [[*range(9, 13), 0, 0], [*range(19, 23), 0, 0]]
    plan = parts.plan(0, 0)
    assert plan.exchanged == parts.ranks
    assert plan.offsets.tolist() == [0, 10, 12, 15, 20, 22, 24]
    with pytest.raises(ValueError, match="`sp_size` is 2: a batch needs `input_ids`, and this one has labels"):
        part_of_batch({"labels": BATCH["labels"]}, parts.ranks)
    refused = r"`sp_size` is 2, and the model has masks that are not made by transformers\. Set `sp_size=1`"
    parts = part_of_batch(BATCH, parts.ranks)[0]
    with pytest.raises(ValueError, match=refused), attended(parts):
        pass


def test_packed_rows_have_the_documents_of_their_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 0]])
    parts, whole = of_both({"input_ids": BATCH["input_ids"][:1], "position_ids": positions})
    assert parts[0].begins == [[0, 3, 9, 10]]
    assert whole["position_ids"][:, :10].tolist() == positions.tolist()
    assert whole["attention_mask"].tolist() == [[1] * 10 + [0] * 2]


def test_rows_without_masks_and_positions_are_documents() -> None:
    parts, _ = of_both({"input_ids": torch.ones(2, 12, dtype=torch.int64)})
    assert parts[0].begins == [[0], [0]]
    assert parts[0].length == 12


def test_batches_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="a batch needs `input_ids`, and this one has labels"):
        part_of_batch({"labels": BATCH["labels"]}, Ranks(0, 2, "none"))
    holes = BATCH["attention_mask"].clone()
    holes[0, 4] = 0
    for mask in (holes, torch.ones(2, 1, 10, 10)):
        with pytest.raises(ValueError, match="with `cp_size` or `sp_size` above 1 it must have a 1 for each token"):
            part_of_batch({**BATCH, "attention_mask": mask}, Ranks(0, 2, "none"))


def test_masks_that_are_no_plans_are_refused() -> None:
    parts = part_of_batch(BATCH, Ranks(0, 2, "none"))[0]
    refused = "`cp_size` is 2, and the model has masks that are not made by transformers"
    with pytest.raises(ValueError, match=refused), attended(parts):
        pass
    refused = "`cp_size` is 2, and the model has a mask that is neither causal"
    with pytest.raises(ValueError, match=refused), attended(parts):
        attention_mask(2, 6, 6, mask_function=lambda *index: True, config=None)


@pytest.mark.parametrize("option", ["cp_size", "sp_size"])
@pytest.mark.parametrize(
    ("config", "precomputes", "refused"),
    [
        (types.SimpleNamespace(is_prompt_learning=True), False, "SimpleNamespace puts virtual tokens before each"),
        (None, True, "`precompute_ref_log_probs` is true and `SIZE` is 2: TRL would take the rows .* or `SIZE=1`"),
    ],
)
def test_what_needs_whole_sequences_is_refused(option: str, config: Any, precomputes: bool, refused: str) -> None:
    trainer: Any = SequencePartsMixin()
    trainer.args = types.SimpleNamespace(torch_compile=False, precompute_ref_log_probs=precomputes)
    parallelism = types.SimpleNamespace(cp_enabled=option == "cp_size", sp_enabled=option == "sp_size", **{option: 2})
    trainer.accelerator = types.SimpleNamespace(parallelism_config=parallelism)
    model = model_of("llama")
    trainer._split_sequences(model)  # whose attention is not ours
    apply_liger_kernel(model)
    model.active_peft_config = config
    with pytest.raises(ValueError, match=refused.replace("SIZE", option)):
        trainer._split_sequences(model)


def test_our_attention_alone_takes_gathered_keys() -> None:
    model = model_of("mistral")
    module = model.model.layers[0].self_attn
    plan = part_of_batch(BATCH, Ranks(0, 2, "none"))[0].plan(0, 0)
    q, k = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 6, 8)
    with pytest.raises(ValueError, match=r"MistralAttention takes no keys of other processes\. Set `cp_size=1`"):
        attention_forward(module, q, k, k, plan)
    module.__dict__[PROVED] = True
    with pytest.raises(ValueError, match=r"MistralAttention drops attention weights \(0\.1\)\. Set `cp_size=1`"):
        attention_forward(module, q, k, k, plan, dropout=0.1)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    with shared_folder(tmp_path_factory, "spread") as folder:
        if not (folder / "done").exists():
            for family in ("mistral", "gemma3_text"):  # a reference is loaded from where the policy was
                model_of(family).save_pretrained(folder / family)
            done = torchrun(work, folder, environment={"CUDA_VISIBLE_DEVICES": "", **FSDP2})
            assert done.returncode == 0, done.stderr[-3000:]
            (folder / "done").touch()
    return folder, [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_learn_what_one_does(name: str, ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, results = ranks
    expected = train(name, folder, ours=False, spread=False)
    for rank in results:
        found = rank[name]
        assert found["sharded"], "FSDP2 did not run"
        assert found["attention"], "it has no attention"
        assert all(kernel for kernel, _ in found["attention"]), found["attention"]
        assert len(found["logs"]) == len(expected["logs"])
        for one, other in zip(found["logs"], expected["logs"]):
            for key in other.keys() - {"total_flos", "step_time", "eval_step_time"}:
                assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), key
        assert found["gradients"].keys() == expected["gradients"].keys()
        for key, gradient in expected["gradients"].items():
            torch.testing.assert_close(
                found["gradients"][key], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max())
            )
