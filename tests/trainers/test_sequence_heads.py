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
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import SFTTrainer

from liger_trainer.attention.config_names import NAME
from liger_trainer.attention.interface import attention_forward
from liger_trainer.kernels.attention.plan import Ranks
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.trainers import sequence_parts
from liger_trainer.trainers.sequence_parts import SequencePartsMixin, added_parts, collated_columns, of_one_rank
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.distributed.accelerate_launch import as_launched
from tests.distributed.accelerate_worker import prepare_process, weights_of
from tests.distributed.accelerate_zero3 import release_groups
from tests.trainers import parity
from tests.trainers.builders import causal, sft
from tests.trainers.parity import lora
from tests.trainers.test_sequence_parts import ALIGNMENT, SETTINGS, model_of, rows
from tests.trainers.tiny import llama, logged

pytest.importorskip("deepspeed")

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
    # All rows have as many tokens in each part, so the mean over processes is that over tokens.
    "z-loss": ("qwen3_moe", {"side": "packed", "router_z_loss_coef": 0.3}),
    "evaluation": ("mistral", {"eval_strategy": "steps", "eval_steps": 1}),
    # DeepSpeed gathers rows of one length alone with gloo.
    "SFT": ("mistral", {"max_length": 64, "pad_to_multiple_of": 64}),
    "SFT, packed": ("gemma3_text", {"packing": True, "max_length": 24, "pad_to_multiple_of": 96}),
    "SFT, LoRA": ("mistral", {"max_length": 64, "pad_to_multiple_of": 64, "peft_config": lora()}),
    # These divide rows of any length themselves.
    **ALIGNMENT,
    "DPO, epochs": ("mistral", {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2}),
    "GRPO": ("mistral", {"beta": 0.1}),
}
LAUNCHES: dict[str, list[str]] = {"zero2": [*CASES], "zero3": ["padded", "SFT", "DPO", "GRPO"]}


def train(name: str, folder: Any, ours: bool, spread: bool) -> dict[str, Any]:
    """The logs of a training and its weights, but for ZeRO-3's; `spread` splits each sequence over two processes."""
    family, case = CASES[name]
    case = {**OPTIONS, **case}
    if spread:
        handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
        case |= {"use_cpu": False, "parallelism_config": ParallelismConfig(sp_size=2, sp_handler=handler)}
    model = llama(num_key_value_heads=1) if family == "one head of keys" else model_of(family)
    if name == "z-loss":
        model.config.output_router_logits, model.router_aux_loss_coef = True, 0.0
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
    after = {} if is_deepspeed_zero3_enabled() else weights_of(trainer)
    return {
        "logs": logged(trainer),
        "learnt": {key: after[key] - value for key, value in before.items() if key in after and value.requires_grad},
        "attention": [(row.kernel, row.reason) for row in attention],
        "handler": handler.sp_attn_implementation if spread else "",
        "function": ALL_ATTENTION_FUNCTIONS[NAME] is attention_forward,
    }


def work(folder: str, launch: str) -> None:
    """What both processes run."""
    prepare_process()
    found = {}
    for name in LAUNCHES[launch]:
        found[name] = train(name, folder, ours=True, spread=True)
        release_groups()
    torch.save(found, Path(folder, f"{launch}{os.environ['RANK']}.pt"))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("spread")
    for family in ("mistral", "gemma3_text"):  # a reference is loaded from where the policy was
        model_of(family).save_pretrained(folder / family)
    for launch in LAUNCHES:
        flags = ["--config_file", f"configs/accelerate/{launch}.yaml", "--mixed_precision", "no"]
        flags += ["--num_processes", "2", "worker.py"]
        done = as_launched(flags, work, str(folder), launch, environment={"CUDA_VISIBLE_DEVICES": ""})
        assert done.returncode == 0, done.stderr[-3000:]
    return folder, {launch: [torch.load(folder / f"{launch}{rank}.pt") for rank in range(2)] for launch in LAUNCHES}


@pytest.mark.parametrize(("launch", "name"), [(launch, name) for launch, names in LAUNCHES.items() for name in names])
def test_processes_that_exchange_heads_learn_what_one_does(
    launch: str, name: str, processes: tuple[Path, dict[str, list[dict[str, Any]]]]
) -> None:
    folder, results = processes
    expected = train(name, folder, ours=name == "z-loss", spread=False)
    for rank in results[launch]:
        found = rank[name]
        assert found["attention"], "it has no attention"
        assert all(kernel for kernel, _ in found["attention"]), found["attention"]
        assert (found["handler"], found["function"]) == ("sdpa", True), "DeepSpeed's attention was left in place"
        assert len(found["logs"]) == len(expected["logs"])
        for one, other in zip(found["logs"], expected["logs"]):
            for key in other.keys() - {"total_flos", "epoch", "step_time", "eval_step_time"}:
                assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), key
        if launch == "zero3":
            continue
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


def launched(**zero: Any) -> Any:
    """A trainer with `sp_size=2`, as far as it looks at its launch."""
    sizes = types.SimpleNamespace(cp_enabled=False, sp_enabled=True, sp_size=2, cp_size=1)
    plugin = types.SimpleNamespace(deepspeed_config={"zero_optimization": zero})
    accelerator = types.SimpleNamespace(parallelism_config=sizes, num_processes=4, device=torch.device("cpu"))
    accelerator.state, accelerator._prepare_deepspeed = types.SimpleNamespace(deepspeed_plugin=plugin), None
    return types.SimpleNamespace(accelerator=accelerator, args=types.SimpleNamespace(torch_compile=False))


def test_gradients_are_divided_where_deepspeed_adds_them_up() -> None:
    assert [added_parts(launched(stage=stage)) for stage in range(4)] == [2, 2, 2, 1]
    with pytest.raises(ValueError, match=r"`sp_size` is 2 and `reduce_scatter` is false .* with ZeRO-3"):
        added_parts(launched(stage=3, reduce_scatter=False))
    assert added_parts(launched(stage=2, reduce_scatter=False)) == 2
    alone = launched()
    alone.accelerator.parallelism_config = None
    assert added_parts(alone) == 1


def test_terms_of_the_loss_are_divided_too(tmp_path: Path) -> None:
    model: Any = model_of("qwen3_moe")
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.0
    trainer = causal(tmp_path, model, router_z_loss_coef=1.0)
    gradients = []
    for trainer._added_parts in (1, 4):
        model.zero_grad()
        batch = {"input_ids": torch.arange(8)[None], "labels": torch.full((1, 8), -100)}  # the term is all there is
        trainer.compute_loss(model.train(), batch).backward()
        gradients.append(model.model.layers[0].mlp.gate.weight.grad.clone())
    torch.testing.assert_close(gradients[1] * 4, gradients[0])
    assert gradients[0].abs().max() > 0


@pytest.mark.parametrize("divides", [False, True])
def test_a_forward_that_divides_batches_gets_those_of_its_group(divides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stock(types.SimpleNamespace):
        get_cp_size = staticmethod(lambda: 1)
        get_sp_size = staticmethod(lambda: 2)

    class Trained(SequencePartsMixin, Stock):
        _forward_takes_parts = divides

    made: list[Any] = []
    group = types.SimpleNamespace(group_name="pair")
    mesh = types.SimpleNamespace(get_local_rank=lambda: 1, size=lambda: 2, get_group=lambda: group)

    def init_device_mesh(*shape: Any, **names: Any) -> Any:
        made.append((*shape, *names.values()))
        return {"tp": mesh}

    monkeypatch.setattr(sequence_parts, "init_device_mesh", init_device_mesh)
    trainer: Any = Trained(**vars(launched(stage=2)))
    model: Any = llama()
    apply_liger_kernel(model)
    trainer._split_sequences(model)
    if not divides:
        assert (made, trainer._ranks, trainer.get_cp_size(), trainer.get_sp_size()) == ([], None, 1, 2)
        return
    assert made == [("cpu", (2, 2), ("dp", "tp"))]
    assert trainer._forward_ranks == Ranks(1, 2, "pair", "sp_size")
    assert (trainer._group, trainer.get_cp_size(), trainer.get_sp_size()) == (group, 2, 1)
    assert trainer.accelerator._prepare_device_mesh() == {"tp": mesh}
    assert trainer.accelerator.deepspeed_ulysses_dl_adapter("loader", model) == "loader"


def test_only_columns_of_tokens_are_collated() -> None:
    batch = {"input_ids": 1, "position_ids": 2, "cu_seq_lens_q": 3, "cu_seq_lens_k": 3, "max_length_q": 4}
    assert collated_columns(lambda rows: {**batch, "max_length_k": 4}, []) == {"input_ids": 1, "position_ids": 2}
