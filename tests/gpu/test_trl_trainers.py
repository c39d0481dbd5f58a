"""The trainers over TRL on an accelerator: parity with TRL, no host syncs of ours, the memory of a chunk."""

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.trainers.fused_forward import StatisticsOptions, TokenStatistics
from liger_trainer.trainers.trl_mixin import install_fused_forward
from tests.device import no_host_sync, one_gpu, peak_memory_of_one_run
from tests.trainers.parity import KINDS, build, logged, lora, save_models

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), one_gpu]
MIB = 2**20
HEADS = {"plain": None, "lora": lora("q_proj"), "lora on the head": lora("q_proj", "lm_head")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


# What is drawn by sampling differs by a rounding.
@pytest.mark.parametrize(("kind", "compiled"), [("SFT", False), ("DPO", False), ("KTO", False), ("DPO", True)])
def test_logs_are_those_of_trl(kind, compiled, tmp_path, folders):
    logs = []
    for ours in (False, True):
        options = {"torch_compile": True} if ours and compiled else {}
        trainer = build(kind, ours, tmp_path / str(ours), folders["llama"], use_cpu=False, **options)
        trainer.train()
        logs.append(logged(trainer))
    for left, right in zip(*logs, strict=True):
        assert left == pytest.approx(right, abs=2e-3, rel=2e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", HEADS)
def test_bf16_trains(kind, head, tmp_path, folders):
    case = {} if HEADS[head] is None else {"peft_config": HEADS[head]}
    trainer = build(kind, True, tmp_path, folders["llama"], use_cpu=False, bf16=True, **case)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert len(losses) == 2
    assert torch.tensor(losses).isfinite().all()


def _model(head, vocab=32768):
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).cuda().to(torch.bfloat16)
    if HEADS[head] is not None:
        model = peft.get_peft_model(model, HEADS[head])
    apply_liger_kernel(model, {"logits_memory": 16 * MIB})
    base = model.get_base_model() if HEADS[head] is not None else model
    install_fused_forward(base, StatisticsOptions(TokenStatistics._fields))
    return model.train()


def _step(model, ids):
    output = model(input_ids=ids, labels=ids, fused_lm_head=True)
    (0.01 * output.log_probs.sum() + 0.001 * output.entropy.sum()).backward()


@pytest.mark.parametrize("head", HEADS)
def test_a_step_does_not_wait_for_the_device(head):
    model, ids = _model(head), torch.randint(0, 32768, (2, 300), device="cuda")
    _step(model, ids)  # kernels are compiled here
    with no_host_sync():
        _step(model, ids)


@pytest.mark.parametrize("head", HEADS)
def test_the_logits_take_the_memory_of_a_chunk(head):
    """All of them would be 1 GiB in bf16, and as much again for their gradient."""
    model, ids = _model(head, vocab=65536), torch.randint(0, 65536, (1, 8192), device="cuda")
    _step(model, ids[:, :512])
    model.zero_grad(set_to_none=False)
    peak = peak_memory_of_one_run(lambda: _step(model, ids))
    assert peak < 600 * MIB, f"{peak / MIB:.0f} MiB"
