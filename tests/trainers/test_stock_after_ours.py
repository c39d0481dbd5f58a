"""A stock trainer of TRL gives bitwise the same logs and weights before and after one of ours in the same process."""

import importlib

import pytest
import torch
import trl
from datasets import Dataset

import liger_trainer
from tests.tiny_models import TINY_MODELS
from tests.trainers.tiny import COMMON, WORDS, logged, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

ARGUMENTS = {**COMMON, "max_steps": 2, "bf16": False, "gradient_checkpointing": False}
GENERATION = {"num_generations": 4, "max_completion_length": 6}


def pair(i):
    return {"prompt": WORDS[i % 4] + " ", "chosen": WORDS[(i + 1) % 4], "rejected": WORDS[(i + 2) % 4][:9]}


def lengths(completions, **kwargs):
    return [float(len(text)) for text in completions]


ROWS = {
    "SFT": lambda i: {"text": WORDS[i % 4]},
    "DPO": pair,
    "ORPO": pair,
    "CPO": pair,
    "Reward": pair,
    "KTO": lambda i: {"prompt": WORDS[i % 4] + " ", "completion": WORDS[(i + 1) % 4], "label": i % 3 == 0},
    "GRPO": lambda i: {"prompt": WORDS[i % 4]},
    "RLOO": lambda i: {"prompt": WORDS[i % 4]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    TINY_MODELS["llama"]().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def trained(source, prefix, kind, folder, tmp_path):
    generates = kind in ("GRPO", "RLOO")
    args = getattr(source, f"{prefix}{kind}Config")(
        output_dir=str(tmp_path), **ARGUMENTS, **(GENERATION if generates else {})
    )
    # Those two split a model that they load over the devices.
    model = TINY_MODELS["llama"]() if kind in ("ORPO", "CPO") else folder
    trainer = getattr(source, f"{prefix}{kind}Trainer")(
        model,
        args=args,
        train_dataset=Dataset.from_list([ROWS[kind](i) for i in range(16)]),
        processing_class=tokenizer(),
        **({"reward_funcs": lengths} if generates else {}),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", ROWS)
def test_stock_trainer_is_what_it_was(kind, folder, tmp_path):
    stock = importlib.import_module(f"trl.experimental.{kind.lower()}") if kind in ("ORPO", "CPO") else trl
    before = trained(stock, "", kind, folder, tmp_path / "before")
    ours = trained(liger_trainer, "Liger", kind, folder, tmp_path / "ours")
    after = trained(stock, "", kind, folder, tmp_path / "after")
    assert ours.kernel_report.applied
    first, second = (
        [{k: v for k, v in log.items() if k != "step_time"} for log in logged(trainer)] for trainer in (before, after)
    )
    assert first == second
    for (name, a), b in zip(before.model.named_parameters(), after.model.named_parameters()):
        assert torch.equal(a, b[1]), name
    assert all("liger_trainer" not in type(module).__module__ for module in after.model.modules())
    assert [name for name, module in after.model.named_modules() if "forward" in vars(module)] == [
        name for name, module in before.model.named_modules() if "forward" in vars(module)
    ]
