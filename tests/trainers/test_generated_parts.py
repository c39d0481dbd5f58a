"""GRPO and RLOO with `cp_size=2` or `sp_size=2`: groups of processes generate, count and learn as one of TRL each.

Four gloo processes under `accelerate launch`, two groups of two, are compared with TRL's own trainer on two. The second
process of a group would get other rewards, and other completions of a `rollout_func`.
"""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from transformers import TrainingArguments
from trl import GRPOConfig

import liger_trainer
from liger_trainer.kernels.attention.plan import Ranks
from liger_trainer.trainers import rows_once
from liger_trainer.trainers.generation_trainers import GenerationMixin, seed_groups_alike
from tests.distributed.accelerate_launch import as_launched
from tests.distributed.accelerate_worker import prepare_process, weights_of
from tests.distributed.accelerate_zero3 import HAS_DEEPSPEED, release_groups
from tests.trainers import parity
from tests.trainers.test_sequence_parts import model_of
from tests.trainers.tiny import logged, tokenizer

GROUPS = ["--use_parallelism_config", "--use_fsdp", "--fsdp_version", "2"]
GROUPS += ["--parallelism_config_cp_size", "2", "--parallelism_config_dp_shard_size", "2"]
LAUNCHES: dict[str, tuple[str, list[str], int]] = {
    "stock": ("fsdp2", [], 2),
    "cp_size": ("fsdp2", GROUPS, 4),
    "sp_size": ("zero2", [], 4),  # whose size a launch with DeepSpeed cannot give
}
# A group of completions is spread over both processes with rows of their own, or both groups of two.
SETTINGS = {"use_cpu": False, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.0}
SETTINGS |= {"optim": "sgd", "learning_rate": 0.5}


def judged(completions: list[str], log_extra: Any, log_metric: Any, **columns: Any) -> list[float]:
    """Rewards, which differ between the processes of a group, with a column and a metric of their own."""
    found = [value + 5.0 * _place_in_group() for value in parity.reward(completions)]
    log_extra("length", [len(text) for text in completions])
    log_metric("longest", max(map(len, completions)))
    return found


def _place_in_group() -> int:
    return int(os.environ["RANK"]) % 2 if int(os.environ["WORLD_SIZE"]) == 4 else 0


def rolled_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of unequal lengths, which differ between the processes of a group."""
    trained = trainer.accelerator.process_index * 7 + trainer.state.global_step + _place_in_group()
    generator = torch.Generator().manual_seed(trained)
    lengths = torch.randint(2, 9, (len(prompts),), generator=generator).tolist()
    ids = [torch.randint(5, 110, (length,), generator=generator).tolist() for length in lengths]
    return {"prompt_ids": tokenizer()(prompts)["input_ids"], "completion_ids": ids, "logprobs": None}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "generated": ("GRPO", {"beta": 0.1}),
    "rolled out": ("GRPO", {"rollout_func": rolled_out, "scale_rewards": "batch", "loss_type": "cispo"}),
    "streamed": ("GRPO", {"data": lambda: parity.KINDS["GRPO"][0]().to_iterable_dataset()}),
    "RLOO": ("RLOO", {"beta": 0.1}),
}


def train(name: str, folder: str, launch: str) -> dict[str, Any]:
    """What a process logs and has learnt, and what it says of completions."""
    kind, case = CASES[name]
    more = {"reward_funcs": judged, **SETTINGS, **case}
    if launch == "sp_size":
        more["parallelism_config"] = ParallelismConfig(sp_size=2, dp_shard_size=2)
    trainer = parity.build(kind, launch != "stock", f"{folder}/{name} {launch}", f"{folder}/model", **more)
    before = {key: value.detach().clone() for key, value in trainer.model.named_parameters()}
    trainer.train()
    args, logs = trainer.args, trainer._logs
    return {
        "logs": logged(trainer),
        "learnt": {key: value - before[key] for key, value in weights_of(trainer).items() if key in before},
        "sizes": (args.generation_batch_size, args.steps_per_generation),
        "completions": {column: list(logs[column]) for column in ("prompt", "completion", "advantages")},
        "columns": {name: list(values) for which in ("rewards", "extra") for name, values in logs[which].items()},
    }


def work(folder: str, launch: str) -> None:
    """What every process runs."""
    prepare_process()
    found = {}
    for name in CASES:
        found[name] = train(name, folder, launch)
        if launch == "sp_size":
            release_groups()
    torch.save(found, Path(folder, f"{launch}{os.environ['RANK']}.pt"))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("groups")
    model_of("mistral").save_pretrained(folder / "model")
    found = {}
    for launch, (config, flags, count) in LAUNCHES.items():
        if config == "zero2" and not HAS_DEEPSPEED:
            continue
        flags = ["--config_file", f"configs/accelerate/{config}.yaml", "--mixed_precision", "no", *flags]
        flags += ["--num_processes", str(count), "worker.py"]
        done = as_launched(flags, work, str(folder), launch, environment={"CUDA_VISIBLE_DEVICES": ""})
        assert done.returncode == 0, done.stderr[-3000:]
        found[launch] = [torch.load(folder / f"{launch}{rank}.pt") for rank in range(count)]
    return found


@pytest.mark.parametrize("size", ["cp_size", "sp_size"])
@pytest.mark.parametrize("name", CASES)
def test_groups_learn_what_processes_of_trl_do(name: str, size: str, processes: dict[str, list[Any]]) -> None:
    if size not in processes:
        pytest.skip("DeepSpeed is not installed")
    stock = processes["stock"]
    for rank, result in enumerate(processes[size]):
        found, expected = result[name], stock[rank // 2][name]
        assert found["sizes"] == expected["sizes"]
        parity.assert_close_logs(found["logs"], expected["logs"], {"total_flos"})
        for column, values in {**expected["completions"], **expected["columns"]}.items():
            got = {**found["completions"], **found["columns"]}[column]
            assert got == (pytest.approx(values, abs=1e-5) if isinstance(values[0], float) else values), column
        if rank == 0:
            assert found["learnt"].keys() == expected["learnt"].keys()
            for key, learnt in expected["learnt"].items():
                # Each of two steps rounds weights of norms, next to 1, to 2^-23.
                atol = 1e-5 * float(learnt.abs().max()) + 2**-22
                torch.testing.assert_close(found["learnt"][key], learnt, rtol=1e-5, atol=atol, msg=key)


@pytest.mark.parametrize("name", ["LigerGRPOConfig", "LigerRLOOConfig"])
@pytest.mark.parametrize("size", ["cp_size", "sp_size"])
@pytest.mark.parametrize("launched", [False, True])
def test_processes_of_a_group_count_once(
    name: str, size: str, launched: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    config_class = getattr(liger_trainer, name)
    monkeypatch.setattr(TrainingArguments, "world_size", 8)
    sizes = {"parallelism_config": ParallelismConfig(**{size: 4}, dp_shard_size=2)}
    if launched:
        sizes = {}
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{size.upper()}", "4")
    seen, check = [], TrainingArguments.__post_init__
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: (seen.append(self.world_size), check(self)))
    args = config_class(str(tmp_path), use_cpu=True, per_device_train_batch_size=2, num_generations=4, **sizes)
    assert seen == [8], "DeepSpeed would check another number of rows"
    assert (args.generation_batch_size, args.steps_per_generation, args.world_size) == (4, 1, 8)
    assert args.parallelism_config is sizes.get("parallelism_config")
    with pytest.raises(ValueError, match=r"generation_batch_size \(2\) must be divisible by num_generations"):
        config_class(str(tmp_path), use_cpu=True, per_device_train_batch_size=1, num_generations=4, **sizes)


def test_rows_of_a_group_are_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [torch.tensor([3, 4]), torch.tensor([5, 6]), torch.tensor([7, 8]), torch.tensor([9, 10])]
    accelerator = types.SimpleNamespace(num_processes=4, process_index=3, device="cpu")
    once = rows_once.RowsOnce(accelerator, 2)
    assert (once.num_processes, once.process_index, once.device) == (2, 1, "cpu")
    monkeypatch.setattr(rows_once, "gather", lambda rows: torch.stack(processes))
    assert once.gather(processes[3]).tolist() == [3, 4, 7, 8]
    monkeypatch.setattr(rows_once, "gather", lambda numbers: torch.arange(4))
    assert once.gather(torch.tensor(3)).tolist() == [0, 2]
    monkeypatch.setattr(rows_once, "gather_object", lambda lists: [["a"], ["b"], ["c", "d"], []])
    assert once.gather_object([]) == ["a", "c", "d"]


def test_a_group_has_what_its_first_process_has_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = types.SimpleNamespace(_ranks=None)
    assert GenerationMixin._same_in_group(trainer, "own") == "own"
    trainer._ranks, trainer._group = "of a group", "their group"
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda said, **where: said.__setitem__(0, where))
    assert GenerationMixin._same_in_group(trainer, "own") == {"group_src": 0, "group": "their group"}


def group(**changed: Any) -> Any:
    """A trainer whose rows two processes share, as far as its checks look."""
    args = liger_trainer.LigerGRPOConfig("folder", use_cpu=True)
    values = {"args": args, "config_class": type(args), "train_dataset": iter([]), "tools": [], **changed}
    values.setdefault("_ranks", Ranks(0, 2, "none"))
    return types.SimpleNamespace(get_tp_size=lambda: 1, get_cp_size=lambda: 2, **values)


def test_what_a_group_cannot_generate_is_refused() -> None:
    seed_groups_alike(group())  # streamed, which accelerate splits by groups
    args = group().args
    args.use_vllm = True
    for changed, refused in (
        ({"args": args}, r"`use_vllm` is true and processes share each sequence \(`cp_size` is 2\)"),
        ({"tools": [print]}, r"`tools` or `environment_factory` is given and processes share each sequence"),
        ({"environment_factories": {"": dict}}, r"Set `cp_size=1`, or write a `rollout_func`"),
        (
            {"tools": [print], "_ranks": Ranks(0, 2, "none", "sp_size")},
            r"\(`sp_size` is 2\): each .* Set `sp_size=1`, or write a `rollout_func`",
        ),
        ({"args": GRPOConfig("folder", use_cpu=True)}, r"`args` is a GRPOConfig and .* Give a LigerGRPOConfig"),
    ):
        with pytest.raises(ValueError, match=refused):
            seed_groups_alike(group(**changed))
