"""The Liger trainers with `cp_size=2` on two gloo processes, beside the stock trainers in one process.

Trainer, accelerate and torch's split of the batch are as ever; attention alone is `gathered_attention`.
"""

import contextlib
import json
import os
from pathlib import Path

import pytest
from transformers import Trainer

from liger_trainer.parallel.sequences import split_sequences
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.stock_trainer import stock_trainer_report
from liger_trainer.trainers.trainer import LigerTrainer
from tests.patching.mixing_models import built
from tests.trainers.builders import causal, sft
from tests.trainers.parity import assert_close_logs, build, results_of_processes
from tests.trainers.tiny import llama, logged, token_rows

CASES = {
    "trainer": {"gradient_accumulation_steps": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "SFT": {"pad_to_multiple_of": 4},
    "SFT, dft": {"pad_to_multiple_of": 4, "loss_type": "dft"},
    "SFT, label smoothing": {"pad_to_multiple_of": 4, "label_smoothing_factor": 0.1},
}
COUNTED_BY_PROCESS = {"total_flos", "num_tokens"}


def train(name, folder, ours, spread):
    """Logs of a training; `spread` splits each sequence over two processes."""
    from accelerate import ParallelismConfig

    case, output_dir = dict(CASES[name]), f"{folder}/{name}{ours}"
    if spread:
        case["parallelism_config"] = ParallelismConfig(cp_size=2)
    if name.startswith("SFT"):
        trainer = build("SFT", ours, output_dir, llama(), **case)
    else:
        trainer_class = LigerTrainer if ours else Trainer
        trainer = causal(output_dir, trainer_class=trainer_class, rows=token_rows(length=12), **case)
    trainer.train()
    return logged(trainer)


def attention_rows(report):
    return [(row.applied, row.reason) for row in report if row.component == "attention"]


def reported(folder):
    """What the reports say of attention: of our trainers at construction, of the stock one while it trains."""
    from accelerate import ParallelismConfig

    settings = {"parallelism_config": ParallelismConfig(cp_size=2), "pad_to_multiple_of": 4}
    ours = build("SFT", True, f"{folder}/reported", llama(), **settings)
    settings = {"parallelism_config": settings["parallelism_config"], "use_liger_kernel": True}
    stock = causal(f"{folder}/stock", trainer_class=Trainer, rows=token_rows(length=12), **settings)
    stock.train()
    return {"ours": attention_rows(ours.kernel_report), "stock": attention_rows(stock_trainer_report(stock.model))}


def work(folder):
    import accelerate
    import torch.distributed.tensor.experimental as experimental

    from tests.distributed.gathered_attention import gathered_attention

    split = experimental.context_parallel

    @contextlib.contextmanager
    def context_parallel(*args, **kwargs):
        with split(*args, **kwargs), gathered_attention():
            yield

    experimental.context_parallel = context_parallel
    # accelerate has nothing against CPUs here but this check, as its own tests need accelerators.
    accelerate.ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    results = {name: train(name, folder, ours=True, spread=True) for name in CASES}
    results["attention"] = reported(folder)
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spread")
    return folder, results_of_processes(work, folder, CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")


@pytest.mark.parametrize("name", CASES)
def test_two_processes_log_what_one_does(name, ranks):
    folder, results = ranks
    expected = train(name, folder, ours=False, spread=False)
    for rank in results:
        assert_close_logs(rank[name], expected, COUNTED_BY_PROCESS, absolute=2e-5, relative=2e-5)


@pytest.mark.parametrize("trainer", ["ours", "stock"])
def test_attention_is_left_to_the_launch(trainer, ranks):
    for rank in ranks[1]:
        assert rank["attention"][trainer] == [
            [False, "the launch splits sequences with `cp_size=2`, whose ring attention is torch's SDPA"]
        ]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (None, ""),
        ({"tp_size": 2}, ""),
        ({"cp_size": 4}, "the launch splits sequences with `cp_size=4`, whose ring attention is torch's SDPA"),
        ({"sp_size": 2}, "the launch splits sequences with `sp_size=2`, which brings Ulysses' attention"),
    ],
)
def test_which_launches_split_sequences(sizes, reason, monkeypatch):
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState

    config = None if sizes is None else ParallelismConfig(**sizes)
    monkeypatch.setattr(AcceleratorState, "_shared_state", {"parallelism_config": config})
    assert split_sequences() == reason
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})  # before any trainer is built
    assert split_sequences() == ""


def test_strict_kernels_leave_attention_to_the_launch(monkeypatch):
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState

    config = ParallelismConfig(sp_size=2)
    monkeypatch.setattr(AcceleratorState, "_shared_state", {"parallelism_config": config})
    ((applied, reason),) = attention_rows(apply_liger_kernel(llama(), strict=True))
    assert not applied
    assert "`sp_size=2`" in reason
    with pytest.raises(ValueError, match="attention"):
        apply_liger_kernel(llama(), {"attention": True}, strict=True)


@pytest.mark.parametrize("size", ["cp_size", "sp_size"])
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_losses_of_whole_sequences_are_refused(kind, size, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, f"get_{size}", lambda self: 2)
    with pytest.raises(ValueError, match=rf"`{size}=2`.*the loss of Liger{kind}Trainer needs whole ones"):
        build(kind, True, tmp_path, folders["llama"])


@pytest.mark.parametrize("size", ["cp_size", "sp_size"])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_layers_with_a_state_are_refused(family, size, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, f"get_{size}", lambda self: 2)
    with pytest.raises(ValueError, match=rf"`{size}=2`.*has a state that goes on from part to part"):
        sft(tmp_path, built(family))
