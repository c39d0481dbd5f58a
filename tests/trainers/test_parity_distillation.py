"""LigerDistillationTrainer and LigerGKDTrainer against TRL's: the same numbers in every log, and the same weights."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer

from liger_trainer import LigerDistillationConfig, LigerDistillationTrainer, LigerGKDConfig, LigerGKDTrainer
from liger_trainer.head import divergence as head_divergence
from tests.trainers.tiny import COMMON, SIZES, WORDS, chat_dataset, gemma2, llama, logged, mixtral, tokenizer

TRAINERS = {
    "distillation": (DistillationTrainer, DistillationConfig, LigerDistillationTrainer, LigerDistillationConfig),
    "gkd": (GKDTrainer, GKDConfig, LigerGKDTrainer, LigerGKDConfig),
}
DEFAULTS = {**COMMON, "max_steps": 2, "bf16": False, "gradient_checkpointing": False}
OWN = {
    "distillation": {"max_completion_length": 6},
    "gkd": {"max_new_tokens": 6, "max_length": 48, "lmbda": 0.0},
}


def wide():
    """A teacher of another hidden size, another depth and another initialisation."""
    torch.manual_seed(7)
    return llama_of(hidden_size=48, num_hidden_layers=1, intermediate_size=80)


def llama_of(**sizes):
    from transformers import LlamaConfig

    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}))


def cohere():
    torch.manual_seed(0)
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25))


def granite():
    torch.manual_seed(0)
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0))


def capped():
    model = gemma2()
    model.config.final_logit_softcapping = 0.5  # so low that it counts at this size
    return model


BOTH = {
    "forward_kl": {"beta": 0.0},
    "jsd": {"beta": 0.3},
    "reverse_kl": {"beta": 1.0},
    "temperature": {"beta": 0.5, "temperature": 0.7},
    "softcap": {"model": capped, "beta": 0.5},
    "softcap_of_teacher": {"teacher": capped, "beta": 0.5},
    "scale": {"model": cohere, "teacher": granite, "beta": 0.5},
    "moe": {"model": mixtral},
    "lora": {"peft": ["q_proj", "v_proj"]},
    "lora_saved_head": {"peft": ["q_proj"], "modules_to_save": ["lm_head"]},
    "tied": {"model": lambda: llama(tie_word_embeddings=True)},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "kernels_without_head": {"ours": {"liger_kernel_config": {"linear_cross_entropy": False}}},
    "without_kernels": {"ours": {"use_liger_kernel": False}},
}
CASES = [(kind, name, case) for kind in TRAINERS for name, case in BOTH.items()] + [
    ("gkd", "on_policy", {"lmbda": 1.0}),
    ("gkd", "mixed", {"lmbda": 0.5, "max_steps": 4}),
    ("gkd", "sequence_level", {"lmbda": 0.0, "seq_kd": True}),
    ("gkd", "on_policy_accumulation", {"lmbda": 1.0, "gradient_accumulation_steps": 2}),
    ("distillation", "completions_of_any_token", {"generation_kwargs": {"top_k": 5}}),
]


def build(kind, ours, tmp_path, **case):
    case = dict(case)
    stock_class, stock_config, our_class, our_config = TRAINERS[kind]
    trainer_class, config_class = (our_class, our_config) if ours else (stock_class, stock_config)
    model, teacher = case.pop("model", llama)(), case.pop("teacher", wide)()
    peft, saved = case.pop("peft", None), case.pop("modules_to_save", None)
    more = case.pop("ours", {})
    rows = 16
    data = chat_dataset(rows) if kind == "gkd" else Dataset.from_list([{"prompt": WORDS[i % 4]} for i in range(rows)])
    extra = {"eval_dataset": data.select(range(4))} if "eval_strategy" in case else {}
    if peft:
        extra["peft_config"] = LoraConfig(r=4, target_modules=peft, modules_to_save=saved, lora_dropout=0.0)
    settings = {**DEFAULTS, **OWN[kind], **case, **(more if ours else {})}
    args = config_class(output_dir=str(tmp_path / ("ours" if ours else "stock")), **settings)
    return trainer_class(model, teacher, args, train_dataset=data, processing_class=tokenizer(), **extra)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name", "case"), CASES, ids=[f"{kind}-{name}" for kind, name, _ in CASES])
def test_logs_and_weights_are_those_of_trl(kind, name, case, tmp_path):
    trainers = [build(kind, ours, tmp_path, **case) for ours in (False, True)]
    logs = []
    for trainer in trainers:
        import random

        random.seed(5)
        torch.manual_seed(5)
        trainer.train()
        logs.append(logged(trainer))
    assert len(logs[0]) == len(logs[1])
    for left, right in zip(*logs):
        assert left.keys() == right.keys()
        for key in left:
            if key == "step_time":
                continue
            assert right[key] == pytest.approx(left[key], abs=1e-5, rel=1e-5), key
    for (name, a), b in zip(trainers[0].model.named_parameters(), trainers[1].model.parameters()):
        torch.testing.assert_close(b, a, rtol=0, atol=2e-3, msg=name)
