"""The Liger trainers with `cp_size=2` and the launch's attention on two gloo processes, beside stock ones in one.

Trainer, accelerate and torch's split of the batch are as ever; attention alone is `gathered_attention`. With our own
attention: `test_sequence_parts.py`.
"""

import contextlib
import json
import os
import types
from pathlib import Path

import pytest
from transformers import Trainer

from liger_trainer.parallel.sequences import split_sequences
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.stock_trainer import stock_trainer_report
from liger_trainer.trainers.checks.launch import check_masks_of_ulysses
from liger_trainer.trainers.trainer import LigerTrainer
from tests.attention import families as attention_families
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
        case["liger_kernel_config"] = {"attention": False}
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
    """What the reports say of attention: of our trainers at construction, of the stock one while it trains.

    Ours is right where weights are not dropped, and where no layer is compiled.
    """
    from accelerate import ParallelismConfig

    settings = {"parallelism_config": ParallelismConfig(cp_size=2), "pad_to_multiple_of": 4}
    drops = build("SFT", True, f"{folder}/drops", llama(attention_dropout=0.1), **settings)
    compiled = build("SFT", True, f"{folder}/compiled", llama(), torch_compile=True, **settings)
    settings = {"parallelism_config": settings["parallelism_config"], "use_liger_kernel": True}
    stock = causal(f"{folder}/stock", trainer_class=Trainer, rows=token_rows(length=12), **settings)
    stock.train()
    reports = {"drops": drops.kernel_report, "compiled": compiled.kernel_report}
    return {
        name: attention_rows(each) for name, each in {**reports, "stock": stock_trainer_report(stock.model)}.items()
    }


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


@pytest.mark.parametrize(
    ("trainer", "why"),
    [
        ("drops", "; ours is off, as its attention drops weights (`attention_dropout`)"),
        ("compiled", ""),
        ("stock", ""),
    ],
)
def test_attention_is_left_to_the_launch(trainer, why, ranks):
    reason = "the launch splits sequences with `cp_size=2`, whose ring attention is torch's SDPA"
    for rank in ranks[1]:
        assert rank["attention"][trainer] == [[False, reason + why]]


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


class Masked(types.SimpleNamespace):
    """A trainer with `sp_size=2`, as far as its launch is checked."""

    def __init__(self, model, implementation, **args):
        handler = types.SimpleNamespace(sp_attn_implementation=implementation)
        super().__init__(
            model=model,
            _exchanges_heads=False,
            args=types.SimpleNamespace(n_gpu=1, **args),
            accelerator=types.SimpleNamespace(parallelism_config=types.SimpleNamespace(sp_handler=handler)),
            get_cp_size=lambda: 1,
            get_sp_size=lambda: 2,
            is_distributed_loading_by_transformers=False,
        )


@pytest.mark.parametrize(
    ("family", "args", "lost"),
    [
        ("mistral", {}, "sliding"),
        ("gemma3_text", {}, "sliding_attention"),
        ("llama", {"packing": True}, "`packing`"),
        ("llama", {"padding_free": True}, "`padding_free`"),
    ],
)
def test_masks_that_ulysses_would_drop_are_refused(family, args, lost):
    model = attention_families.build(family, 3 if family != "llama" else None)
    with pytest.raises(
        ValueError, match=f"`sp_attn_implementation='sdpa'`.*: with {lost}, tokens would see all before them"
    ):
        check_masks_of_ulysses(Masked(model, "sdpa", **args))
    check_masks_of_ulysses(Masked(model, "flash_attention_2", **args))
    for fine in ({"packing": False}, {"packing": True, "packing_strategy": "wrapped"}):
        check_masks_of_ulysses(Masked(llama(), "sdpa", **fine))
    exchanging = Masked(model, "sdpa", **args)
    exchanging._exchanges_heads = True  # by ours, whose plans have windows and documents
    check_masks_of_ulysses(exchanging)
