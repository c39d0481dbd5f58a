"""Random bases in few bits: they are what `load_packed` makes, are drawn packed, and train in the benchmark."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from liger_trainer import load_packed
from liger_trainer.benchmarks.models import MODELS, model_config
from liger_trainer.benchmarks.packed_base import check_packed_base, pack_randomly, published
from liger_trainer.benchmarks.records import FP8_BASE, FP8_FORMATS, PACKED_BASES, Run
from liger_trainer.benchmarks.registry import BenchmarkError
from liger_trainer.benchmarks.training import Task, TrainingProcess
from liger_trainer.benchmarks.training_step import run
from liger_trainer.packed.experts import PackedExperts, packed_stacks
from liger_trainer.packed.loading import dequantise
from liger_trainer.packed.modules import PackedLinear
from liger_trainer.recipe.file import shipped_configs
from liger_trainer.tools.cli import bench_training, main
from tests import low_bit
from tests.packed_checkpoints import write_dense, write_latent_mixture, write_mixture

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")
GPT_OSS = {"hidden": 64, "intermediate": 96, "vocab": 512, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
SHAPES = {
    "gpt-oss-20b": dataclasses.replace(MODELS["gpt-oss-20b"], **GPT_OSS, experts=4, experts_per_token=2),
    "tiny-moe": MODELS["tiny-moe"],
    "tiny": MODELS["tiny"],
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(MODELS, "gpt-oss-20b", SHAPES["gpt-oss-20b"])


def without_data(name):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config(MODELS[name]), dtype=torch.bfloat16)


def drawn(name, kind):
    torch.manual_seed(0)
    return pack_randomly(name, kind, without_data(name), CPU)


@pytest.mark.parametrize(
    ("model", "kind", "trainer"),
    [
        ("tiny", "fp8_blocks", "causal_lm"),
        ("tiny", "fp8_rows", "reward"),
        ("tiny", "int4", "dpo"),
        ("tiny-moe", "fp8_rows", "causal_lm"),
        ("tiny-moe", "int4", "sft"),
        ("tiny-qwen3.5", "fp8_blocks", "causal_lm"),
        ("gpt-oss-20b", "mxfp4", "causal_lm"),
        ("gpt-oss-20b", "mxfp4", "sft"),
    ],
)
def test_a_packed_base_trains(model, kind, trainer, capsys):
    task = Task(model, trainer=trainer, batch=2, length=16, steps=3, device="cpu", lora=4, quantize=kind)
    losses = run(task, "liger_trainer")["losses"]
    assert len(losses) == 3
    assert losses[0] == pytest.approx({"dpo": 0.693, "reward": 0.693}.get(trainer, 6.24), abs=0.3)
    shown = capsys.readouterr()
    assert "keep their random values" not in shown.out + shown.err


@pytest.mark.parametrize("kind", FP8_FORMATS)
def test_a_base_in_fp8_multiplies_as_it_is(kind):
    task = Task("tiny", batch=2, length=16, steps=2, device="cpu", lora=4, quantize=kind)
    decoded, in_fp8 = (run(task, provider)["losses"] for provider in ("liger_trainer", FP8_BASE))
    assert in_fp8 != decoded
    assert in_fp8 == pytest.approx(decoded, rel=2e-2)


def test_every_process_draws_the_same_weights():
    """Whatever the hashes of its strings are, by which sets are ordered."""
    script = (
        "import torch; from tests.benchmarks.test_packed_base import drawn; model = drawn('tiny-moe', 'int4');"
        "print([each.double().sum().item() for each in model.state_dict().values()])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
            check=True, cwd=Path(__file__).parents[2],
        ).stdout
        for seed in "12"
    }  # fmt: skip
    assert len(said) == 1


def test_what_is_published_in_16_bits_stays_so():
    with torch.device("meta"):
        config = model_config(MODELS["qwen3.5-35b-a3b"], layers=4)
        found = published("qwen3.5-35b-a3b", AutoModelForCausalLM.from_config(config), "fp8_blocks")
    delta = {f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")}
    attention = {f"self_attn.{name}_proj" for name in "qkvo"}
    shared = {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
    assert {name.split(".", 3)[3] for name in found.linears} == delta | attention | shared
    assert {name.split(".", 3)[3] for name in found.stacks} == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*itertools.product(("tiny", "tiny-moe"), ("fp8_rows", "int4")), ("tiny", "fp8_blocks"), ("gpt-oss-20b", "mxfp4")],
)
def test_weights_are_as_wide_as_those_of_random_models(name, kind):
    model, plain = drawn(name, kind), AutoModelForCausalLM.from_config(model_config(MODELS[name]), dtype=torch.bfloat16)
    packed = dict(model.state_dict())
    assert model.config.quantization_config.to_dict()["quant_method"]
    assert not any(each.requires_grad for each in model.parameters())
    ids = torch.arange(32).view(2, 16)
    logits = model(ids).logits
    dequantise(model)
    assert torch.equal(model(ids).logits, logits)
    expected = dict(plain.named_buffers())
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[key]), key
    for key, weight in plain.state_dict().items():
        mine = model.state_dict()[key]
        assert (mine.shape, mine.dtype) == (weight.shape, weight.dtype)
        if key not in packed or packed[key].shape != weight.shape:  # was packed
            assert mine.float().std() == pytest.approx(0.02, rel=0.25), key
            assert mine.float().mean().abs() < 0.005
    assert any(key not in packed or packed[key].shape != each.shape for key, each in plain.state_dict().items())


CHECKPOINTS = {
    "dense in blocks": (lambda folder: write_dense(folder, "fp8 blocks"), "fp8_blocks"),
    "mixture in blocks": (lambda folder: write_mixture(folder), "fp8_blocks"),
    "mixture in rows": (lambda folder: write_mixture(folder, "fp8 rows"), "fp8_rows"),
    "mixture in int4": (lambda folder: write_mixture(folder, "int4"), "int4"),
    "latent attention": (write_latent_mixture, "fp8_rows"),
    "gpt-oss": (low_bit.write_mxfp4, "mxfp4"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_same_is_packed_as_of_a_checkpoint(name, tmp_path):
    write, kind = CHECKPOINTS[name]
    write(tmp_path)
    loaded = load_packed(str(tmp_path), dtype="auto")
    config = loaded.config
    del config.quantization_config
    with torch.device("meta"):
        model = type(loaded)(config).to(torch.bfloat16)
    pack_randomly("tiny" if "dense" in name else "tiny-moe", kind, model, CPU)
    mine, others = (
        {path: each for path, each in each.named_modules() if isinstance(each, PackedLinear | PackedExperts)}
        for each in (model, loaded)
    )
    assert mine.keys() == others.keys()
    for path, module in mine.items():
        if isinstance(module, PackedLinear):
            assert_alike(module.packed, others[path].packed)
            continue
        stacks = packed_stacks(others[path])
        assert packed_stacks(module).keys() == stacks.keys()
        for leaf, stack in packed_stacks(module).items():
            assert (stack.transposed, stack.dtype) == (stacks[leaf].transposed, stacks[leaf].dtype)
            assert_alike(stack.weight, stacks[leaf].weight)


def assert_alike(one, other):
    assert type(one) is type(other)
    assert (one.shape, one.codes.shape, one.codes.dtype) == (other.shape, other.codes.shape, other.codes.dtype)
    if not hasattr(one, "group_of"):  # whose groups are of 128 columns, and those of the checkpoint of 32
        assert one.scales.shape == other.scales.shape


class Largest(TorchDispatchMode):
    """The most bytes that one floating tensor takes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu" and each.is_floating_point():
                self.bytes = max(self.bytes, each.numel() * each.element_size())
        return result


def test_the_model_is_never_held_in_16_bits(monkeypatch):
    wide = dataclasses.replace(MODELS["tiny-moe"], experts=64, expert_intermediate=128, vocab=128)
    monkeypatch.setitem(MODELS, "tiny-moe", wide)
    with Largest() as largest:
        model = drawn("tiny-moe", "fp8_rows")
    stack = packed_stacks(model.model.layers[0].mlp.experts)["gate_up_proj"].weight
    assert largest.bytes == stack.codes.numel()


REFUSED = {
    ("tiny", "mxfp4"): "'mxfp4', which does not fit tiny: it is the format of gpt-oss's experts; give fp8_blocks, fp8_",
    ("tiny-moe", "fp8_blocks"): "gate and up of an expert have 32 rows each, which blocks of 128 do not divide",
    ("gpt-oss-20b", "int4"): "does not fit gpt-oss-20b: its experts are published in MXFP4; give mxfp4",
    ("llama4-scout", "fp8_rows"): "does not fit llama4-scout: its experts do not stay packed; leave `--quantize` out",
}


@pytest.mark.parametrize(("name", "kind"), REFUSED)
def test_formats_that_do_not_fit_are_refused(name, kind):
    with pytest.raises(BenchmarkError, match=REFUSED[name, kind]):
        check_packed_base(name, kind)


@pytest.mark.parametrize(
    ("name", "kinds"),
    {
        "llama3-8b": PACKED_BASES[:2],
        "qwen3-30b-a3b": PACKED_BASES[:2],
        "glm-4.7-flash": PACKED_BASES[:2],
        "qwen3.5-35b-a3b": PACKED_BASES[:2],
        "gpt-oss-20b": ["mxfp4"],
    }.items(),
)
def test_formats_of_published_models_fit(name, kinds, monkeypatch):
    monkeypatch.undo()
    for kind in kinds:
        check_packed_base(name, kind)


def test_each_base_is_a_run_of_those_that_train_it(tmp_path, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(
        TrainingProcess, "__enter__", lambda self: seen.append((self.task.quantize, self.arguments[2])) or self
    )
    monkeypatch.setattr(TrainingProcess, "__exit__", lambda *arguments: None)
    monkeypatch.setattr(TrainingProcess, "result", lambda *arguments: {"tokens_per_second": 2.0})
    options = ["bench", "training", "--device", "cpu", "--lora", "4", "--output", str(tmp_path)]
    bases = ["--quantize", "bf16,fp8_blocks", "--providers", "hf,liger_trainer activation_offloading"]
    assert main([*options, *bases]) == 0
    ours = "liger_trainer activation_offloading"
    assert seen == [("", "hf"), ("", ours), ("fp8_blocks", ours)]
    shown = capsys.readouterr()
    assert "hf cannot train adapters on a base in 'fp8_blocks'; liger_trainer keeps it packed. Left out." in shown.err
    assert "LoRA r=4 on fp8_blocks" in shown.out
    assert [record.quantize for record in Run.read(tmp_path / "results.json").training] == ["", "", "fp8_blocks"]
    assert main([*options, "--quantize", "fp8_rows", "--providers", "hf,liger-kernel"]) != 0
    assert "hf, liger-kernel cannot train adapters on a base in 'fp8_rows'" in capsys.readouterr().err
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("config", "way"), [("fsdp1", "FSDP1"), ("zero2", "DeepSpeed"), ("zero3", "DeepSpeed"), ("mine.yaml", "FSDP1")]
)
def test_a_launch_that_splits_codes_is_refused_before_it_starts(config, way, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(TrainingProcess, "__enter__", lambda self: pytest.fail("it was measured"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("distributed_type: FSDP\n")  # accelerate's default is version 1
    options = ["--device", "cpu", "--lora", "4", "--quantize", "bf16,int4", "--accelerate_config", config]
    assert main(["bench", "training", *options, "--providers", "liger_trainer"]) != 0
    assert capsys.readouterr().err.strip() == (
        f"liger-trainer: `--accelerate_config` is {config!r}: {way} splits the model, which takes no base in 'int4'. "
        "Give ddp or fsdp2, or `--quantize bf16`."
    )


FP8_BASES = [FP8_BASE, "liger_trainer fp8 base activation_offloading=0.5"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ["--quantize", "int4"],
            "cannot multiply in fp8 with a base in 'int4' (`--quantize bf16,fp8_blocks,fp8_rows`)",
        ),
        (["--accelerate_config", "fsdp2"], "cannot store a base in fp8 that FSDP2 splits, only a whole one"),
        (["--accelerate_config", "zero3"], "cannot store a base in fp8 that DeepSpeed splits, only a whole one"),
        ([], "cannot multiply in fp8 here, which needs a GPU of NVIDIA's Hopper generation or newer"),
    ],
    ids=str,
)
def test_providers_that_store_their_base_in_fp8_where_they_cannot(options, reason, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(TrainingProcess, "__enter__", lambda self: seen.append(self.arguments[2]) or self)
    monkeypatch.setattr(TrainingProcess, "__exit__", lambda *arguments: None)
    monkeypatch.setattr(TrainingProcess, "result", lambda *arguments: {"tokens_per_second": 2.0})
    monkeypatch.setattr(bench_training, "has_fp8", lambda device, has=bool(options): has)
    options = ["bench", "training", "--device", "cpu", "--lora", "4", *options, "--providers"]
    assert main([*options, ",".join(FP8_BASES)]) != 0
    assert f"{', '.join(FP8_BASES)} {reason}" in (error := capsys.readouterr().err)
    assert error.endswith(". Add another to `--providers`, such as liger_trainer.\n")
    assert not seen
    assert main([*options, ",".join([*FP8_BASES, "liger_trainer"])]) == 0
    assert f"{', '.join(FP8_BASES)} {reason}" in capsys.readouterr().err
    assert seen == ["liger_trainer"]


def test_a_base_in_fp8_runs_in_whole_processes(monkeypatch):
    monkeypatch.setattr(bench_training, "has_fp8", lambda device: True)
    for config in ("", str(shipped_configs()["ddp"])):
        task = Task("tiny", device="cpu", accelerate_config=config)
        assert bench_training._that_train(FP8_BASES, task) == FP8_BASES


def test_a_mistake_in_the_second_model_stops_before_the_first(capsys, monkeypatch):
    monkeypatch.setattr(TrainingProcess, "__enter__", lambda self: pytest.fail("it was measured"))
    options = ["bench", "training", "--device", "cpu", "--lora", "4", "--model", "tiny,tiny-moe"]
    assert main([*options, "--quantize", "fp8_blocks"]) != 0
    assert "does not fit tiny-moe" in capsys.readouterr().err
    assert main([*options, "--quantize", "fp8_block"]) != 0
    assert "No format 'fp8_block'. Did you mean 'fp8_blocks'?" in capsys.readouterr().err
