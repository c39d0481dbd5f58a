"""Training steps of several processes: the same path as on GPUs, FSDP2 under `accelerate launch`, on gloo."""

import dataclasses
import math
import os

import pytest

from liger_trainer.benchmarks.records import Run, TrainingRecord
from liger_trainer.benchmarks.registry import BenchmarkError
from liger_trainer.benchmarks.report import make_console, sweep, training_table
from liger_trainer.benchmarks.training import (
    OUT_OF_MEMORY,
    ProcessError,
    Task,
    TrainingProcess,
    launch_command,
    run_provider,
)
from liger_trainer.benchmarks.training_step import run
from liger_trainer.recipe.file import shipped_configs
from liger_trainer.tools.cli import main

# accelerate has FSDP on accelerators alone, so its processes pretend to have some.
AS_ON_GPUS = """
import os
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from liger_trainer.benchmarks.training_step import training_provider

if "RANK" in os.environ:  # not in the command's own process, which reads this file too
    torch.distributed.init_process_group("gloo")
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


class IsSplit(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        assert all(isinstance(weight, DTensor) and weight.dtype == torch.float32 for weight in model.parameters())


@training_provider("short")
def short(setup):
    setup.callbacks.append(IsSplit())
    if setup.task.length > 16 and os.environ["RANK"] == "1":  # the other one waits for it
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    return setup.trainer(use_liger_kernel=False)


@training_provider("shared")
def shared(setup):
    trainer = setup.trainer(ours=True)
    assert trainer._ranks.ranks == 2
    return trainer
"""
SPLIT = """
import torch
from liger_trainer.benchmarks.training_step import training_provider

@training_provider("split")
def split(setup):
    experts = setup.model.model.layers[0].mlp.experts.gate_up_proj.to_local()
    assert experts.shape[0] == 2
    both = [torch.empty_like(experts) for _ in range(2)]
    torch.distributed.all_gather(both, experts.contiguous())
    assert not torch.equal(*both)
    return setup.trainer(ours=True)
"""
ENDLESS = """
import os, pathlib, time
from liger_trainer.benchmarks.training_step import training_provider

@training_provider("endless")
def endless(setup):
    pathlib.Path(__file__).with_name(os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)
"""
TINY = ["--model", "tiny", "--layers", "1", "--batch", "2", "--steps", "2", "--warmup", "1", "--device", "cpu"]


def test_lengths_in_the_same_processes(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(AS_ON_GPUS)
    several = ["--gpus", "2", "--accelerate_config", "fsdp2", "--length", "64,16,32", "--seconds", "120"]
    mine = ["--providers", "short,liger_trainer", "--provider_file", str(tmp_path / "mine.py")]
    assert main(["bench", "training", *TINY, *several, *mine, "--output", str(tmp_path)]) == 0
    found = Run.read(tmp_path / "results.json")
    stock, too_long, *ours = found.training
    assert (stock.provider, stock.length, stock.failure) == ("short", 16, "")
    assert (too_long.provider, too_long.length, too_long.failure) == ("short", 32, OUT_OF_MEMORY)
    assert [(record.provider, record.length, record.failure) for record in ours] == [
        ("liger_trainer", length, "") for length in (16, 32, 64)
    ]
    assert {(record.gpus, record.accelerate_config) for record in found.training} == {(2, "fsdp2")}
    assert stock.losses == pytest.approx(ours[0].losses, abs=0.04)  # FSDP2 hands out losses in bf16
    assert len(stock.losses) == 2
    assert all(record.tokens_per_second > 0 for record in (stock, *ours))
    assert "accelerate" in found.versions
    lengths, rows = sweep(found.training)
    assert lengths == [16, 32, 64]
    assert rows[0][1][1:] == ["OOM", "–"]
    printed = capsys.readouterr().out
    assert "2 GPUs · fsdp2" in printed
    assert "OOM" in printed


def test_a_configuration_for_one_process_is_refused_for_several(capsys):
    assert main(["bench", "training", *TINY, "--gpus", "2", "--accelerate_config", "single_gpu"]) == 2
    assert "'single_gpu', which is for one process, and `--gpus` is 2; give ddp or fsdp2" in capsys.readouterr().err


def test_nothing_measured_is_a_failure(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from liger_trainer.benchmarks.training_step import training_provider\n"
        "@training_provider('failing')\ndef failing(setup):\n    raise ValueError('not today')\n"
    )
    mine = ["--length", "16", "--provider_file", str(tmp_path / "mine.py")]
    assert main(["bench", "training", *TINY, *mine, "--providers", "failing"]) == 1
    assert main(["bench", "training", *TINY, *mine, "--providers", "failing,liger_trainer"]) == 0


def test_fsdp1_in_every_setting(tmp_path):
    """LigerAdamW is refused there in one line, since FSDP1 cannot save its states."""
    (tmp_path / "mine.py").write_text(AS_ON_GPUS)
    several = ["--gpus", "2", "--accelerate_config", "fsdp1", "--length", "16", "--seconds", "120", "--steps", "5"]
    providers = "liger_trainer activation_memory=1MiB,liger_trainer fp8,liger_trainer optim=liger_adamw"
    mine = ["--providers", providers, "--provider_file", str(tmp_path / "mine.py")]
    assert main(["bench", "training", *TINY, *several, *mine, "--output", str(tmp_path)]) == 0
    *trained, refused = Run.read(tmp_path / "results.json").training
    assert [record.failure for record in trained] == ["", ""]
    assert trained[0].kept_gibibytes is not None
    assert trained[0].losses == pytest.approx(trained[1].losses, abs=0.04)
    assert refused.failure.startswith("ValueError: LigerAdamW has states of several dtypes for bf16 weights")


def test_experts_that_processes_share(tmp_path, capsys):
    """No process makes more of the model than its own part, and the parts differ."""
    options = [
        "--model",
        "tiny-moe",
        "--layers",
        "1",
        "--batch",
        "2",
        "--steps",
        "2",
        "--warmup",
        "1",
        "--length",
        "16",
    ]
    options += ["--gpus", "2", "--expert_parallel", "2", "--device", "cpu", "--seconds", "120"]
    (tmp_path / "mine.py").write_text(SPLIT)
    mine = ["--providers", "hf,split", "--provider_file", str(tmp_path / "mine.py")]
    assert main(["bench", "training", *options, *mine, "--output", str(tmp_path)]) == 0
    stock, ours = Run.read(tmp_path / "results.json").training
    assert (stock.failure, ours.failure) == ("", "")
    assert (ours.expert_parallel, ours.accelerate_config) == (2, "ddp")
    assert stock.losses == pytest.approx(ours.losses, abs=0.04)
    assert "2 GPUs · ddp · experts shared by 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "tiny"], "tiny has no experts that transformers can split; give a divisor"),
        (["--expert_parallel", "3", "--gpus", "3"], "tiny-moe has 4 experts a layer; give a divisor"),
        (["--gpus", "3"], "give a multiple of it for each of `--gpus`"),
        (["--accelerate_config", "fsdp2"], "`--accelerate_config` splits the model with FSDP2; leave that out"),
        (["--lora", "4", "--quantize", "fp8_blocks"], "`--quantize` is for whole models; leave that out"),
        (["--lora", "4"], "`--lora` is 4: adapters on experts cannot be split; leave one out"),
    ],
)
def test_experts_that_processes_cannot_share(options, words, capsys):
    several = ["--model", "tiny-moe", "--gpus", "2", "--expert_parallel", "2", "--device", "cpu"]
    assert main(["bench", "training", *several, *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("trainer", "lora"), [("causal_lm", 0), ("dpo", 0), ("dpo", 4)])
def test_sequences_that_processes_share(trainer, lora, tmp_path, capsys):
    """Two processes train on the rows of one, and count half of their tokens each."""
    (tmp_path / "mine.py").write_text(AS_ON_GPUS)
    work = {"trainer": trainer, "layers": 1, "batch": 2, "length": 16, "steps": 3, "warmup": 1, "device": "cpu"}
    work["lora"] = lora
    whole = Task("tiny", **work)
    shared = dataclasses.replace(whole, gpus=2, context_parallel=2, accelerate_config=str(shipped_configs()["fsdp2"]))
    assert shared.samples == whole.samples
    assert shared.completion_tokens == whole.completion_tokens
    assert [2 * tokens for tokens in shared.step_tokens] == whole.step_tokens
    together = run_provider(shared, "shared", tmp_path / "mine.py", seconds=240.0)
    alone = run_provider(whole, "liger_trainer")
    assert (together.failure, alone.failure) == ("", "")
    assert together.losses == pytest.approx(alone.losses, abs=0.02)
    if trainer == "dpo":  # rounded to bf16 it would be 0.6914
        assert together.losses[0] == round(math.log(2), 4)
    make_console().print(training_table([together]))
    assert "2 GPUs · fsdp2 · sequences shared by 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "3"], "`--context_parallel` is 2; give a multiple of it for each of `--gpus`"),
        (["--gpus", "2"], "`--context_parallel` is 2, which needs `--accelerate_config fsdp2`"),
        (["--gpus", "2", "--accelerate_config", "zero3"], "which needs `--accelerate_config fsdp2`"),
    ],
)
def test_sequences_that_processes_cannot_share(options, words, capsys):
    shared = ["--model", "tiny", "--context_parallel", "2", "--device", "cpu"]
    assert main(["bench", "training", *shared, *options]) == 2
    assert words in capsys.readouterr().err


def test_a_length_that_takes_too_long_is_ended(tmp_path):
    (tmp_path / "mine.py").write_text(ENDLESS)
    task = Task("tiny", device="cpu", gpus=2, accelerate_config=str(shipped_configs()["ddp"]))
    with TrainingProcess(task, [16], "endless", tmp_path / "mine.py") as process:
        for rank in ("0", "1"):
            while not (tmp_path / rank).is_file():
                assert process.process.poll() is None
                with pytest.raises(ProcessError, match="no result in 0 s"):
                    process.result(seconds=0.4)
    for rank in ("0", "1"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / rank).read_text()), 0)


@pytest.mark.filterwarnings("ignore")
def test_what_is_no_fsdp_is_not_called_so(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(BenchmarkError, match="accelerate has no FSDP on cpu"):
        run(Task("tiny", layers=1, batch=1, length=8, device="cpu"), "hf")


def test_commands():
    assert launch_command(Task("tiny"))[1:] == ["-m", "liger_trainer.benchmarks.training_step"]
    command = launch_command(Task("tiny", gpus=4, accelerate_config="my.yaml"))
    options = {"--config_file": "my.yaml", "--num_processes": "4", "--fsdp_sync_module_states": "false"}
    for option, value in options.items():
        assert command[command.index(option) + 1] == value


def test_more_gpus_beside_fewer():
    def record(provider, gpus, length, rate=None, failure=""):
        measured = (rate, None if rate is None else 0.4567, None if rate is None else 38.04)
        more = {"gpus": gpus, "accelerate_config": "fsdp2", "failure": failure}
        return TrainingRecord("tiny", 0, "causal_lm", 8, length, True, provider, *measured, **more)

    records = [
        record("hf", 1, 4096, 8000.0),
        record("hf", 4, 4096, 7760.4),
        record("hf", 4, 8192, failure=OUT_OF_MEMORY),
        record("liger_trainer", 4, 8192, failure="no result in 9 s"),
        record("liger_trainer", 4, 4096, 9000.0),
    ]
    assert sweep(records) == (
        [4096, 8192],
        [
            ("hf, 1 GPU", ["8,000 / 38.0 / 46 %", "–"]),
            ("hf, 4 GPUs", ["7,760 / 38.0 / 46 %, 97.0 % of 1", "OOM"]),
            ("liger_trainer, 4 GPUs", ["9,000 / 38.0 / 46 %", "no result in 9 s"]),
        ],
    )
