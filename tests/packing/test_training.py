"""Trainers on packed rows against TRL's on padded batches: what they log, and the gradients of all parameters."""

import functools

import pytest
import torch
from transformers import GPTNeoXForSequenceClassification
from transformers.modeling_layers import GenericForSequenceClassification

from liger_trainer.attention import interface, masks
from liger_trainer.kernels.attention.plan import dense
from tests.packing.training import PackedBatches, assert_close_gradients, prompts_of_one_length, save_models, trained
from tests.trainers.parity import OF_DIFFERENCES, TOLERANCE, assert_close_logs, lora
from tests.trainers.test_parity import DPO_LOSSES, GRPO_LOSSES
from tests.trainers.tiny import logged

pytestmark = pytest.mark.filterwarnings("ignore")

CHECKPOINTED = {"gradient_checkpointing": True}
REENTRANT = {**CHECKPOINTED, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
SPLIT = {"own": {"tokens_per_micro_batch": 60}}
SHORT = {"own": {"tokens_per_micro_batch": 20}}  # what is generated may have fewer than 60
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj")
ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
CENTERED = {"center_rewards_coefficient": 0.1}  # or the gradients of like answers nearly cancel
SCORED = lora(*PROJECTIONS, task_type="SEQ_CLS")
MIXING = {  # layers that mix tokens by a recurrence or a convolution
    "DPO lfm2": ("DPO", {"model": "lfm2", **CHECKPOINTED}),
    "DPO nemotron_h": ("DPO", {"model": "nemotron_h"}),
    "DPO qwen3_5": ("DPO", {"model": "qwen3_5_text", **REENTRANT}),
    "DPO qwen3_5 lora": ("DPO", {"model": "qwen3_5_text", "peft_config": lora(*PROJECTIONS)}),
    "DPO lfm2 split": ("DPO", {"model": "lfm2", **SPLIT, **CHECKPOINTED}),
    "KTO qwen3_5 lora": ("KTO", {"model": "qwen3_5_text", "peft_config": lora(*PROJECTIONS), **CHECKPOINTED}),
    "KTO nemotron_h split": ("KTO", {"model": "nemotron_h", **SPLIT}),
    "Reward qwen3_5": ("Reward", {"model": "qwen3_5_text", **CENTERED, **CHECKPOINTED}),
    "Reward qwen3_5 lora": ("Reward", {"model": "qwen3_5_text", "peft_config": SCORED, **CENTERED}),
    "GRPO qwen3_5": ("GRPO", {"model": "qwen3_5_text", "beta": 0.1}),
    "GRPO qwen3_5 lora": (
        "GRPO",
        {"model": "qwen3_5_text", "peft_config": lora(*PROJECTIONS), "beta": 0.1, **REENTRANT},
    ),
    "GRPO lfm2": ("GRPO", {"model": "lfm2", "beta": 0.1}),
    "GRPO nemotron_h accumulated": ("GRPO", {"model": "nemotron_h", "beta": 0.1, **ACCUMULATED}),
}
TREE = {"data": prompts_of_one_length, "per_device_train_batch_size": 8, "beta": 0.1}
TREES = {  # common beginnings inside each other; pairs have some in every case
    "GRPO tree": ("GRPO", TREE),
    "GRPO tree gemma2": ("GRPO", {**TREE, "model": "gemma2", **CHECKPOINTED}),
    "GRPO tree entropy": ("GRPO", {**TREE, "entropy_coef": 0.1, "loss_type": "dapo"}),
    "GRPO tree mixture": ("GRPO", {**TREE, "model": "mixtral", "router_aux_loss_coef": 0.1}),
    "GRPO tree split": ("GRPO", {**TREE, "own": {"tokens_per_micro_batch": 110}, **CHECKPOINTED}),
    "RLOO tree": ("RLOO", TREE),
}
SMOOTHED = {"label_smoothing": 1e-3}
OPTIONS = {
    "gemma2": {"model": "gemma2"},
    "lora": {"peft_config": lora("q_proj", "k_proj", "v_proj", "down_proj")},
    "checkpointed": CHECKPOINTED,
    "reentrant": REENTRANT,
    "split": SPLIT,
    "split, checkpointed": {**SPLIT, **CHECKPOINTED},
    "split, lora": {**SPLIT, "peft_config": lora("q_proj", "v_proj")},
    "not shared": {"own": {"share_prompt": False}},
    "accumulated": ACCUMULATED,
}
ROUTERS = {"router_aux_loss_coef": 0.1}
MIXTURE = {"model": "mixtral", **ROUTERS}

CASES = {
    **MIXING,
    **TREES,
    **{
        f"DPO {loss}": ("DPO", {"loss_type": [loss], **(SMOOTHED if loss in ("exo_pair", "robust") else {})})
        for loss in DPO_LOSSES
    },
    "DPO keeps the end": ("DPO", {"max_length": 30, "truncation_mode": "keep_end"}),
    "DPO without some completions": ("DPO", {"max_length": 14}),
    "DPO mixture": ("DPO", MIXTURE),
    "DPO precomputed": ("DPO", {"precompute_ref_log_probs": True}),
    **{f"DPO {name}": ("DPO", case) for name, case in OPTIONS.items()},
    "KTO": ("KTO", {}),
    "KTO apo_zero_unpaired": ("KTO", {"loss_type": "apo_zero_unpaired"}),
    "KTO cut": ("KTO", {"max_length": 24}),
    "KTO mixture": ("KTO", MIXTURE),
    "KTO split": ("KTO", {**SPLIT, **CHECKPOINTED}),
    **{f"GRPO {loss}": ("GRPO", {"loss_type": loss, "beta": 0.04}) for loss in GRPO_LOSSES},
    "GRPO entropy": ("GRPO", {"entropy_coef": 0.1, "temperature": 0.7}),
    "GRPO mixture": ("GRPO", MIXTURE),
    **{f"GRPO {name}": ("GRPO", {"beta": 0.1, **OPTIONS[name]}) for name in ("gemma2", "lora", "reentrant")},
    "GRPO split, checkpointed": ("GRPO", {"beta": 0.1, **SHORT, **CHECKPOINTED}),
    "RLOO": ("RLOO", {}),
    "RLOO gemma2": ("RLOO", {"model": "gemma2"}),
    "RLOO split": ("RLOO", {**SHORT, **CHECKPOINTED}),
    "ORPO": ("ORPO", {}),
    "ORPO gemma2": ("ORPO", {"model": "gemma2"}),
    "ORPO split": ("ORPO", SPLIT),
    **{f"CPO {loss}": ("CPO", {"loss_type": loss}) for loss in ("sigmoid", "hinge", "ipo", "simpo", "alphapo")},
    # Layers that have the keys of earlier ones.
    "DPO gemma4": ("DPO", {"model": "gemma4", **CHECKPOINTED}),
    "DPO gemma3n": ("DPO", {"model": "gemma3n"}),
    "GRPO gemma4 split": ("GRPO", {"model": "gemma4", "beta": 0.1, **SHORT, **CHECKPOINTED}),
    "KTO gemma4 lora": ("KTO", {"model": "gemma4", "peft_config": lora("q_proj", "k_proj", "v_proj")}),
    "CPO split": ("CPO", {**SPLIT, **CHECKPOINTED}),
    "Reward": ("Reward", CENTERED),
    "Reward gemma2": ("Reward", {"model": "gemma2", **CENTERED}),
    "Reward gemma3 of images and text": ("Reward", {"model": "gemma3", **CENTERED}),
    "Reward gpt_neox": ("Reward", {"model": "gpt_neox", **CENTERED}),
    "Reward lora": ("Reward", {"peft_config": lora("q_proj", "v_proj", task_type="SEQ_CLS"), **CENTERED}),
    "Reward split": ("Reward", {**SPLIT, **CHECKPOINTED, **CENTERED}),
}
OTHERS = {
    # The completions of some pairs are equal, and their order is that of rounding errors.
    "DPO": ["rewards/accuracies"],
    "Reward": ["accuracy"],
    # And TRL averages the logits of padding too.
    "ORPO": ["rewards/accuracies", "logits/chosen", "logits/rejected"],
    "CPO": ["rewards/accuracies", "logits/chosen", "logits/rejected"],
}
"""What is logged and differs."""


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("uneven"))


@pytest.fixture
def packed(monkeypatch):
    return PackedBatches(monkeypatch)


def padded_scores(forward):
    """In place of the forward of a reward model, which is for the proof and the batches that stay padded."""

    @functools.wraps(forward)
    def compute(self, input_ids=None, attention_mask=None, **kwargs):
        if self.training:
            pytest.fail("a batch stayed padded")
        return forward(self, input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    return compute


@pytest.mark.parametrize("name", CASES)
def test_logs_and_gradients_are_those_of_trl(name, tmp_path, models, packed, monkeypatch):
    kind, case = CASES[name]
    case = dict(case)
    own, model = case.pop("own", {}), models[case.pop("model", "llama")]
    stock, expected = trained(kind, False, tmp_path / "stock", model, **case)
    assert not packed.seen
    for scores in (GenericForSequenceClassification, GPTNeoXForSequenceClassification):
        monkeypatch.setattr(scores, "forward", padded_scores(scores.forward))
    ours, found = trained(kind, True, tmp_path / "ours", model, own=own, **case)
    assert len(logged(stock)) == 3
    assert_close_logs(logged(ours), logged(stock), OTHERS.get(kind, ()), OF_DIFFERENCES)
    assert_close_gradients(found, expected)
    assert packed.seen
    assert all(tokens < padded or rows > 1 for padded, tokens, rows in packed.seen)
    assert any(rows > 1 for _, _, rows in packed.seen) == ("tokens_per_micro_batch" in own)
    shares = kind != "KTO" and name != f"{kind} not shared"
    if name in MIXING or not shares:
        assert ours._packing.levels == int(shares)
    elif name in TREES or name in ("DPO sigmoid", "DPO mixture", "ORPO", "CPO simpo", "Reward"):
        assert ours._packing.levels > 1
    assert [log.get("shared_levels", 0) for log in ours.state.log_history if "loss" in log][-1] == ours._packing.levels


@pytest.mark.parametrize("model", ["gemma4", "gemma3n"])
def test_packing_of_shared_keys_is_that_of_trl(model, tmp_path, models, monkeypatch):
    """Which has masks for it; ours has plans."""
    monkeypatch.setattr(interface, "TRITON_DEVICES", ("cpu",))
    plans = []
    for module in (interface, masks):
        monkeypatch.setattr(
            module, "dense", lambda plan, *args, **more: plans.append(plan) or dense(plan, *args, **more)
        )
    stock, expected = trained("SFT", False, tmp_path / "stock", models[model], packing=True, **CHECKPOINTED)
    assert not plans
    ours, found = trained("SFT", True, tmp_path / "ours", models[model], packing=True, **CHECKPOINTED)
    assert_close_logs(logged(ours), logged(stock), (), OF_DIFFERENCES)
    assert_close_gradients(found, expected)
    assert all(plan.offsets is not None and len(plan.offsets) > 3 for plan in plans)
    assert {0, 4} <= {plan.window for plan in plans}


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_weights_in_bf16_have_gradients_as_near_as_those_of_trl(kind, tmp_path, models, packed):
    """To those of the same weights in fp32."""

    def gradients(ours, dtype):
        folder = tmp_path / f"{ours} {dtype}"
        found = trained(kind, ours, folder, models["rounded"], model_init_kwargs={"dtype": dtype}, max_steps=1)[1]
        return torch.cat([each.double().flatten() for each in found.values()])

    exact = gradients(False, "float32")
    assert (gradients(True, "float32") - exact).norm() < TOLERANCE * exact.norm()
    theirs, found = ((gradients(ours, "bfloat16") - exact).norm() for ours in (False, True))
    assert 0 < found <= 1.25 * theirs < 0.05 * exact.norm()
    assert packed.seen


def test_the_z_loss_of_routers_is_that_of_the_padded_batch(tmp_path, models, packed):
    own = {"router_z_loss_coef": 0.1}
    one, found = trained("DPO", True, tmp_path, models["mixtral"], own=own, **ROUTERS)
    seen = len(packed.seen)
    other, expected = trained("DPO", True, tmp_path, models["mixtral"], own={**own, "padding_free": False}, **ROUTERS)
    assert seen == len(packed.seen) > 0
    assert_close_logs(logged(one), logged(other), OTHERS["DPO"])
    assert_close_gradients(found, expected)
    plain = trained("DPO", True, tmp_path, models["mixtral"], **ROUTERS)[1]
    with pytest.raises(AssertionError):
        assert_close_gradients(found, plain)


@pytest.mark.parametrize("own", [{}, {"tokens_per_micro_batch": 60}], ids=["one row", "split"])
def test_layers_that_keep_results_change_no_bit(own, tmp_path, models, packed):
    logs = [
        logged(trained("GRPO", True, tmp_path, models["llama"], own={**own, **more}, beta=0.1, **CHECKPOINTED)[0])
        for more in ({}, {"activation_memory": "40KiB"}, {"activation_memory": "1GiB"})
    ]
    timeless = [[{k: v for k, v in log.items() if "time" not in k} for log in each] for each in logs]
    assert timeless[0] == timeless[1] == timeless[2]
    assert packed.seen
