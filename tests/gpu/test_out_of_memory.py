"""Real out-of-memory errors, under a limit of the process: what they say, and that what they propose is enough."""

import gc
import re

import pytest
import torch

from liger_trainer.configs.flags import LigerTrainingArguments
from liger_trainer.trainers.trainer import LigerTrainer
from tests.device import one_gpu
from tests.trainers.tiny import COMMON, llama, token_rows

pytestmark = [pytest.mark.gpu, one_gpu]

LIMIT = 1.5 * 2**30
# 31 M parameters, 0.5 GiB with gradients and moments; 8 rows of 2048 tokens keep more than 2 GiB for the backward.
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "max_position_embeddings": 2048}


@pytest.fixture(autouse=True)
def limit():
    gc.collect()  # an error keeps what its frames hold
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + LIMIT) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def build(tmp_path, **settings):
    settings = {"per_device_train_batch_size": 8, "learning_rate": 1e-4, "kernel_report": False, **settings}
    args = LigerTrainingArguments(output_dir=str(tmp_path), **{**COMMON, "use_cpu": False, "max_steps": 2, **settings})
    return LigerTrainer(llama(**SIZES), args, train_dataset=token_rows(n=32, length=2048))


def test_the_error_says_what_would_take_less(tmp_path):
    with pytest.raises(torch.OutOfMemoryError) as raised:
        build(tmp_path).train()
    text = str(raised.value)
    assert text.startswith(str(raised.value.__cause__))
    assert re.search(r"An allocation of [\d.]+ [KMG]iB failed, in or after a micro-batch of 8 × 2048 tokens", text)
    estimates = {line.strip().split("  (")[0]: line for line in text.split("each alone:")[1].splitlines()}
    assert gib(text.split("Estimated")[1]) * 2**30 > LIMIT
    less = estimates["per_device_train_batch_size: 4, gradient_accumulation_steps: 2"]
    assert gib(less) < gib(text.split("Estimated")[1])
    assert "gradient_checkpointing: true" in estimates


def gib(text):
    return float(re.search(r"([\d.]+) GiB", text).group(1))


def test_what_is_proposed_is_enough(tmp_path):
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "gradient_checkpointing": True}
    trainer = build(tmp_path, **settings)
    trainer.train()
    assert trainer.state.global_step == 2


def test_auto_find_batch_size_still_finds_one(tmp_path):
    trainer = build(tmp_path, auto_find_batch_size=True)
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer._train_batch_size < 8
