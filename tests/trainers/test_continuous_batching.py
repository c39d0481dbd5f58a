"""Continuous batching in the trainers that generate: our attention steps aside for it, and weights keep their dtype."""

from contextlib import nullcontext as nothing

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

import liger_trainer
from liger_trainer import apply_liger_kernel
from liger_trainer.attention.interface import NAME
from liger_trainer.trainers.generation_trainers import check_continuous_batching
from tests.tiny_models import TINY_MODELS
from tests.trainers.parity import assert_same_logs
from tests.trainers.tiny import COMMON, WORDS, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

TRAINERS = {
    "grpo": (liger_trainer.LigerGRPOTrainer, liger_trainer.LigerGRPOConfig),
    "rloo": (liger_trainer.LigerRLOOTrainer, liger_trainer.LigerRLOOConfig),
}
BATCHING = {"num_blocks": 32, "max_batch_tokens": 64}
ARGUMENTS = {
    **COMMON, "max_steps": 2, "bf16": False, "gradient_checkpointing": False, "max_completion_length": 5,
    "num_generations": 4, "adam_epsilon": 1e-2, "beta": 0.0,
    "use_transformers_continuous_batching": True, "transformers_continuous_batching_config": BATCHING,
}  # fmt: skip


def lengths(completion_ids, **kwargs):
    return [float(len(set(ids))) + 0.01 * index for index, ids in enumerate(completion_ids)]


def build(trainer_class, config_class, folder, model="llama", dtype=None, peft=False, **options):
    args = config_class(output_dir=str(folder), **{**ARGUMENTS, **options})
    more = {"peft_config": LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])} if peft else {}
    model = TINY_MODELS[model]()
    return trainer_class(
        model if dtype is None else model.to(dtype), args=args, reward_funcs=lengths, processing_class=tokenizer(),
        train_dataset=Dataset.from_list([{"prompt": words} for words in WORDS]), **more,
    )  # fmt: skip


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_trains_as_the_stock_trainer(model, tmp_path):
    stock = build(GRPOTrainer, GRPOConfig, tmp_path / "stock", model)
    stock.train()
    ours = build(*TRAINERS["grpo"], tmp_path / "ours", model)
    config = ours.model.config
    assert config._attn_implementation == NAME
    ours.train()
    assert config._attn_implementation == NAME  # again: the loss is computed with it
    assert_same_logs(stock, ours)


@pytest.mark.parametrize(
    ("name", "peft", "dtype"),
    [("grpo", False, "bf16"), ("grpo", False, "fp16"), ("grpo", True, "bf16"), ("rloo", False, "bf16")],
)
def test_trained_weights_keep_their_dtype(name, peft, dtype, tmp_path):
    trainer = build(*TRAINERS[name], tmp_path, peft=peft, bf16=dtype == "bf16")
    trainer.args.fp16 = dtype == "fp16"  # the loss scaler needs a GPU; the branch of the generation does not
    model, reward, after = trainer.model, trainer.reward_funcs[0], []
    codes = torch.zeros(4).to(torch.float8_e4m3fn)
    list(model.modules())[-1].register_parameter("codes", torch.nn.Parameter(codes, requires_grad=False))

    def tensors():
        both = (*model.named_parameters(), *model.named_buffers())  # the table of rotations is a buffer
        return {name: value.detach().clone() for name, value in both}

    def look(**inputs):
        after.append(tensors())
        return reward(**inputs)

    before = tensors()
    trainer.reward_funcs[0] = look
    trainer.train()
    assert all(torch.equal(value.view(torch.uint8), before[name].view(torch.uint8)) for name, value in after[0].items())
    assert {name: value.dtype for name, value in tensors().items()} == {
        name: value.dtype for name, value in before.items()
    }
    assert (trainer.args.bf16, trainer.args.fp16) == (dtype == "bf16", dtype == "fp16")


def test_split_weights_in_another_dtype_are_refused(tmp_path, monkeypatch):
    for dtype in (torch.bfloat16, torch.float32):
        trainer = build(*TRAINERS["grpo"], tmp_path, dtype=dtype, bf16=True)
        monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
        refused = pytest.raises(ValueError, match=r"Load the model in torch\.bfloat16")
        with refused if dtype == torch.float32 else nothing():
            check_continuous_batching(trainer)


def test_bf16_head_in_fp32_keeps_its_bits(tmp_path):
    trainer = build(*TRAINERS["grpo"], tmp_path, cast_lm_head_to_fp32=True, bf16=True, learning_rate=1e-7, max_steps=1)
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    after = trainer.model.lm_head.weight
    assert after.dtype == torch.float32
    assert 0 < (after - before).abs().max() < 1e-5  # an update, not a rounding to bf16


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_batches_of_a_patched_model_are_those_of_the_model(model):
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16, 17]]
    options = {
        "generation_config": GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=2),
        "continuous_batching_config": ContinuousBatchingConfig(**BATCHING),
    }

    def generated(model):
        return [each.generated_tokens for each in model.eval().generate_batch(prompts, **options).values()]

    expected = generated(TINY_MODELS[model]())
    patched = TINY_MODELS[model]()
    apply_liger_kernel(patched)
    assert patched.config._attn_implementation == NAME
    for _ in range(2):
        assert generated(patched) == expected
        assert patched.config._attn_implementation == NAME
