"""LigerORPOTrainer, LigerCPOTrainer and LigerRewardTrainer against TRL's: the same numbers in every log."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForSequenceClassification, T5Config, T5ForConditionalGeneration
from trl import RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import liger_trainer
from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.trainers import fused_forward
from tests.tiny_models import TINY_MODELS
from tests.trainers.parity import assert_close_weights, assert_same_logs
from tests.trainers.tiny import COMMON, SIZES, WORDS, logged, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

# With its usual epsilon Adam makes a sign of the smallest gradients, rounding included.
ARGUMENTS = {
    **COMMON, "max_steps": 2, "bf16": False, "gradient_checkpointing": False, "max_length": 40, "adam_epsilon": 1e-2,
}  # fmt: skip

ORPO = (ORPOTrainer, ORPOConfig, liger_trainer.LigerORPOTrainer, liger_trainer.LigerORPOConfig)
CPO = (CPOTrainer, CPOConfig, liger_trainer.LigerCPOTrainer, liger_trainer.LigerCPOConfig)
REWARD = (RewardTrainer, RewardConfig, liger_trainer.LigerRewardTrainer, liger_trainer.LigerRewardConfig)

LORA = {"peft": {"target_modules": ["q_proj", "v_proj"]}}
LORA_HEAD = {"peft": {"target_modules": ["q_proj", "lm_head"]}}
SAVED_HEAD = {"peft": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}}

PAIR_CASES = {
    "defaults": {},
    "beta": {"beta": 0.7},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "softcap": {"model": "gemma2"},
    "scaled_logits": {"model": "granite"},
    "moe": {"model": "qwen3_moe"},
    "lora": LORA,
    "lora_head": LORA_HEAD,
    "saved_head": SAVED_HEAD,
    "truncated": {"max_length": 24},
    "layers_only": {"ours": {"liger_kernel_config": {"linear_cross_entropy": False}}},
    "off": {"ours": {"use_liger_kernel": False}},
}
CASES = {
    **{f"orpo-{name}": (ORPO, case) for name, case in PAIR_CASES.items()},
    **{f"cpo-{name}": (CPO, case) for name, case in PAIR_CASES.items()},
    "orpo-padding_value": (ORPO, {"padding_value": 5}),
    **{
        f"cpo-{loss}-alpha{alpha}": (CPO, {"loss_type": loss, "cpo_alpha": alpha})
        for loss in ("sigmoid", "hinge", "ipo", "simpo")
        for alpha in (0.0, 1.0)
    },
    "cpo-label_smoothing": (CPO, {"label_smoothing": 0.2}),
    "cpo-simpo-label_smoothing": (CPO, {"loss_type": "simpo", "label_smoothing": 0.2}),
    "cpo-simpo-gamma": (CPO, {"loss_type": "simpo", "simpo_gamma": 1.5, "beta": 2.0}),
    "cpo-alphapo": (CPO, {"loss_type": "alphapo", "alpha": 0.25}),
    "cpo-alphapo-unshaped": (CPO, {"loss_type": "alphapo"}),
    "cpo-ipo-shaped": (CPO, {"loss_type": "ipo", "alpha": 0.25}),
    **{
        f"reward-{name}": (REWARD, {"model": "score", **case})
        for name, case in {
            "defaults": {},
            "centered": {"center_rewards_coefficient": 0.1},
            "margin": {"margin": True},
            "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
            "checkpointing": {"gradient_checkpointing": True},
            "lora": {"peft": {"target_modules": ["q_proj"], "modules_to_save": ["score"], "task_type": "SEQ_CLS"}},
        }.items()
    },
    "orpo-encoder_decoder": (ORPO, {"model": "t5", "max_completion_length": 16}),
    "cpo-encoder_decoder": (CPO, {"model": "t5", "max_completion_length": 16}),
}


def pairs(n=16, margin=False):
    """Pairs of unequal lengths: one to three sentences against one cut short."""
    return Dataset.from_list(
        [
            {
                "prompt": WORDS[i % 4],
                "chosen": " " + " ".join(WORDS[(i + k) % 4] for k in range(1 + i % 3)),
                "rejected": " " + WORDS[(i + 3) % 4][: 4 + i],
                **({"margin": 0.1 * i} if margin else {}),
            }
            for i in range(n)
        ]
    )


def score():
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1))
    with torch.no_grad():
        model.score.weight.mul_(2.5)  # rewards that differ
    return model


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2))


def build(trainer_class, config_class, folder, **case):
    name, peft, data = case.pop("model", "llama"), case.pop("peft", None), pairs(margin=case.pop("margin", False))
    model = {"score": score, "t5": t5, **TINY_MODELS}[name]()
    more = {"peft_config": LoraConfig(r=4, lora_dropout=0.0, **peft)} if peft else {}
    args = config_class(output_dir=str(folder), **{**ARGUMENTS, "eval_strategy": "steps", "eval_steps": 2, **case})
    return trainer_class(
        model, args=args, train_dataset=data, eval_dataset=data.select(range(6)), processing_class=tokenizer(), **more
    )


def without_padding(trainer):
    """Makes TRL's trainer log the mean of the logits of tokens, as ours does, and not of padding."""
    forward = trainer.concatenated_forward

    def of_tokens(model, batch):
        results = list(forward(model, batch))
        pad = tokenizer().pad_token_id
        both = trainer.concatenated_inputs(batch, padding_value=pad)["concatenated_attention_mask"].bool().chunk(2)
        for place, is_token in zip((2, 3), both):
            results[place] = results[place][is_token[:, : results[place].shape[1]]]
        return tuple(results)

    trainer.concatenated_forward = of_tokens


@pytest.mark.parametrize("name", CASES)
def test_logs_and_weights_are_those_of_trl(name, tmp_path):
    (stock_trainer, stock_config, our_trainer, our_config), case = CASES[name]
    case = dict(case)
    only_ours = case.pop("ours", {})
    ours = build(our_trainer, our_config, tmp_path / "ours", **case, **only_ours)
    ours.train()
    stock = build(stock_trainer, stock_config, tmp_path / "stock", **case)
    if getattr(ours, "_fused", False):
        without_padding(stock)
    stock.train()
    assert sum("loss" in log for log in logged(ours)) == 2
    assert sum("eval_loss" in log for log in logged(ours)) == 1
    assert_same_logs(stock, ours)
    assert_close_weights(ours, stock, tolerance=1e-5)


@pytest.mark.parametrize("kind", [ORPO, CPO], ids=["orpo", "cpo"])
def test_no_logits_are_built(kind, tmp_path, monkeypatch):
    trainer = build(*kind[2:], tmp_path)
    seen, built = [], []
    of = fused_forward.token_statistics
    monkeypatch.setattr(
        fused_forward, "token_statistics", lambda logits, *args: seen.append(type(logits)) or of(logits, *args)
    )
    monkeypatch.setattr(DeferredLogits, "build", lambda self, *args: built.append(self))
    trainer.train()
    assert seen == [DeferredLogits] * 3  # two steps and an evaluation
    assert not built


def test_kernels_are_in_the_layers_of_a_reward_model(tmp_path):
    report = build(*REWARD[2:], tmp_path, model="score").kernel_report
    layers = {"attention", "rope", "swiglu", "rms_norm"}
    assert {row.component for row in report.applied} == {*layers, "padding_free", "share_prompt"}


@pytest.mark.parametrize("kind", [ORPO, CPO], ids=["orpo", "cpo"])
def test_model_as_a_path_and_its_own_configuration(kind, tmp_path):
    TINY_MODELS["llama"]().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    stock_config, our_trainer, our_config = kind[1:]
    options = {**ARGUMENTS, "max_steps": 1, "model_init_kwargs": {"device_map": None}}
    trainer = our_trainer(
        str(tmp_path / "model"), args=stock_config(output_dir=str(tmp_path), **options), train_dataset=pairs(4)
    )
    assert trainer.kernel_report.applied
    assert not isinstance(trainer.args, our_config)
    trainer.train()
    ids = torch.tensor([[5, 6, 7]])
    tokens = trainer.model.generate(ids, max_new_tokens=4, do_sample=False)
    trainer.save_model(str(tmp_path / "saved"))
    again = type(trainer.model).from_pretrained(tmp_path / "saved")
    assert torch.equal(again.generate(ids, max_new_tokens=4, do_sample=False), tokens)
