"""A teacher under FSDP2: each process has its share of every layer, and the losses are those of whole teachers."""

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from transformers import Qwen3Config, Qwen3ForCausalLM

from liger_trainer.trainers.splitting import split_teacher
from tests import forked
from tests.distributed.accelerate_launch import as_launched
from tests.distributed.accelerate_worker import prepare_process
from tests.distributed.nodes import free_port
from tests.trainers.parity import assert_close_logs
from tests.trainers.test_parity_distillation import LIVELY, TRAINERS, build, capped, made, student
from tests.trainers.test_reference_layers import accelerator  # noqa: F401
from tests.trainers.tiny import logged

CASES = {
    "as deep": {"teacher": capped},
    "tied": {"teacher": lambda: student(tie_word_embeddings=True, hidden_size=48)},
    "adapter on the head": {"peft": ["q_proj", "lm_head"]},
    "kernels off": {"liger": {"use_liger_kernel": False}},
}
ROWS = 4


def work(folder, launch):
    """What every process runs."""
    prepare_process()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    found = {}
    for name, case in CASES.items():
        for kind in TRAINERS:
            own = {"top_k": 1} if kind == "distillation" else {}  # so that all processes generate the same
            own |= {"per_device_train_batch_size": ROWS // processes, "train_sampling_strategy": "sequential"}
            more = {"beta": 0.5, "use_cpu": False, **own, **case}
            trainer = build(kind, True, Path(folder, kind), **more)
            random.seed(5)
            torch.manual_seed(5)
            trainer.train()
            assert not trainer.teacher_model.training
            found[f"{kind} {name}"] = {"logs": logged(trainer), "units": units(trainer.teacher_model)}
    Path(folder, f"{launch}{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))
    if processes > 1:
        torch.distributed.destroy_process_group()


def units(model):
    """The names of the modules that FSDP2 gathers by themselves."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    alone = {"CUDA_VISIBLE_DEVICES": ""}
    done = [forked.run(work, str(folder), "single", environment=alone)]
    for config in ("ddp", "fsdp2"):
        flags = ["--config_file", f"configs/accelerate/{config}.yaml", "--mixed_precision", "no"]
        flags += ["--num_processes", "2", "--main_process_port", str(free_port()), "worker.py"]
        done.append(as_launched(flags, work, str(folder), config, environment=alone))
    for each in done:
        assert each.returncode == 0, each.stderr[-3000:]
    names = ("single0", "ddp0", "ddp1", "fsdp20", "fsdp21")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", TRAINERS)
def test_losses_are_those_of_a_whole_teacher_and_layers_are_units(kind, name, results):
    single, *whole = (results[launch][f"{kind} {name}"] for launch in ("single0", "ddp0", "ddp1"))
    layers = 2 if "teacher" in CASES[name] else 1
    for rank, expected in enumerate(whole):
        found = results[f"fsdp2{rank}"][f"{kind} {name}"]
        assert expected["units"] == []
        assert found["units"] == ["", *(f"model.layers.{layer}" for layer in range(layers))]
        assert_close_logs(found["logs"], expected["logs"])
        for key in ("loss", "grad_norm"):
            several, one = ([log[key] for log in each["logs"] if key in log] for each in (found, single))
            assert several == pytest.approx(one, rel=1e-5)


def qwen():
    return made(Qwen3ForCausalLM, Qwen3Config(**LIVELY, head_dim=8))


@pytest.mark.parametrize("named", [None, ["LlamaDecoderLayer"], ["Qwen3MLP"]])
def test_layers_of_another_class_than_the_students(named, accelerator):  # noqa: F811
    plugin = accelerator.state.fsdp_plugin
    plugin.transformer_cls_names_to_wrap = named
    teacher = qwen()
    split_teacher(teacher, accelerator)
    ends = ".mlp" if named == ["Qwen3MLP"] else ""
    assert units(teacher) == ["", *(f"model.layers.{layer}{ends}" for layer in range(2))]
    assert plugin.transformer_cls_names_to_wrap == named


def test_containers_are_no_units(accelerator):  # noqa: F811
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100)
    accelerator.state.fsdp_plugin = plugin
    teacher = qwen()
    split_teacher(teacher, accelerator)
    assert "model.layers.0" in units(teacher)
    assert "model.layers" not in units(teacher)


def test_weights_of_several_dtypes_are_split(accelerator):  # noqa: F811
    accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16)
    teacher = qwen().to(torch.bfloat16)
    teacher.model.layers[0].input_layernorm.float()
    split_teacher(teacher, accelerator)
    assert teacher(input_ids=torch.arange(3, 11)[None]).logits.dtype == torch.bfloat16


def test_a_quantised_teacher_stays_whole(accelerator):  # noqa: F811
    teacher = qwen()
    teacher.is_quantized = True
    split_teacher(teacher, accelerator)
    assert not units(teacher)


def test_without_fsdp2_a_teacher_stays_whole():
    teacher = qwen()
    split_teacher(teacher, SimpleNamespace(is_fsdp2=False))
    assert not units(teacher)
    assert all(parameter.requires_grad for parameter in teacher.parameters())
