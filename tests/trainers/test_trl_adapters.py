"""Adapters that TRL refuses, ignores or breaks on, in every trainer, against logits that the model builds."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainers.parity import KINDS, assert_parity, assert_same_logs, build, lora

pytestmark = pytest.mark.filterwarnings("ignore")

ADAPTERS = {
    "lora": ("llama", lora("q_proj", "lm_head")),
    "dora": ("llama", lora("q_proj", "lm_head", use_dora=True)),
    "token rows of a tied head": ("gemma2", lora("q_proj", trainable_token_indices=[5, 6, 20])),
    "token rows of the head": ("llama", lora("q_proj", trainable_token_indices={"lm_head": [5, 6, 20]})),
}
# Several chunks for the tiny models: five tokens in each.
CHUNKED = {"own": {"logits_memory": 128 * 4 * 5}, "max_steps": 1, "logging_steps": 1}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_the_head(kind, adapter, tmp_path, folders, never_built):
    model, config = ADAPTERS[adapter]
    case = {**CHUNKED, "max_steps": 2, "peft_config": config, "learning_rate": 1e-2}
    stock, ours = assert_parity(kind, tmp_path, folders[model], naive=True, **case)
    fresh = build(kind, True, tmp_path / "fresh", folders[model], **case)
    trained = dict(ours.model.named_parameters())
    for (name, before), expected in zip(fresh.model.named_parameters(), stock.model.parameters()):
        # Adam makes a sign of the smallest gradients, so their rounding shows.
        torch.testing.assert_close(trained[name], expected, rtol=0, atol=2e-3, msg=name)
        if before.requires_grad and "lm_head" in name:
            assert not torch.equal(trained[name], before), f"{name} was not trained"


@pytest.mark.parametrize("kind", KINDS)
def test_trl_still_refuses_or_breaks(kind, tmp_path, folders):
    with pytest.raises(ValueError, match="lm_head"):
        build(kind, False, tmp_path, folders["llama"], peft_config=ADAPTERS["lora"][1])


def test_fp32_head_with_an_adapter(tmp_path, folders):
    """TRL refuses it: its fp32 forward would leave the adapter out, of generation too."""
    case = {"cast_lm_head_to_fp32": True, "peft_config": lora("q_proj", "lm_head"), "beta": 0.1, **CHUNKED}
    with pytest.raises(ValueError, match="lm_head"):
        build("GRPO", False, tmp_path, folders["llama"], **case)
    ours = build("GRPO", True, tmp_path / "ours", folders["llama"], model_init_kwargs={"dtype": "bfloat16"}, **case)
    model = ours.model
    assert "lm_head" not in model._modules, "the head has one name"
    ids = torch.tensor([[5, 6, 7, 8]])
    head = model.get_base_model().lm_head
    assert {p.dtype for p in head.parameters()} == {torch.float32}
    logits = model(input_ids=ids).logits
    hidden = model.get_base_model().model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(logits, type(head).forward(head, hidden.float()))
    assert logits.dtype == torch.float32
    found = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    expected = (logits[:, :-1] / ours.temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(found, expected)
    ours.train()


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_a_trained_adapter_is_its_own_reference(kind, tmp_path, folders):
    """Given a PEFT model, TRL copies its adapter to "ref" and switches between the two."""

    def adapted(targets):
        torch.manual_seed(1)
        return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folders["llama"]), lora(*targets))

    for naive, targets in ((False, ["q_proj"]), (True, ["q_proj", "lm_head"])):
        trainers = []
        for ours in (False, True):
            trainer = build(kind, ours, tmp_path / f"{ours}", adapted(targets), naive and not ours, learning_rate=1e-2)
            assert "ref" in trainer.model.peft_config
            trainer.train()
            trainers.append(trainer)
        assert_same_logs(*trainers)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
def test_prompt_learning(kind, tmp_path, folders):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    assert_parity(kind, tmp_path, folders["llama"], peft_config=config)


def test_modules_to_save_alone(tmp_path, folders):
    """A head that is saved whole beside frozen layers: the reference is the original head."""
    config = lora("q_proj", modules_to_save=["lm_head", "embed_tokens"])
    _, ours = assert_parity("DPO", tmp_path, folders["llama"], peft_config=config, learning_rate=1e-2)
    wrapper = ours.model.get_base_model().lm_head
    assert not torch.equal(wrapper.modules_to_save["default"].weight, wrapper.original_module.weight)


def test_the_naive_head_agrees_with_trls(tmp_path, folders):
    """What the tests above compare with."""
    stock = build("DPO", False, tmp_path / "a", folders["gemma2"])
    naive = build("DPO", False, tmp_path / "b", folders["gemma2"], naive=True)
    assert "naive" in naive.model.forward.__qualname__
    for trainer in (stock, naive):
        trainer.train()
    assert_same_logs(stock, naive)
