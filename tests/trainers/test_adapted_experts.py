"""SFT of adapters on experts: TRL's own losses, gradient norms and adapters, with W + s B A in no step."""

from __future__ import annotations

import torch
from peft import LoraConfig
from trl import SFTTrainer

from liger_trainer import LigerSFTTrainer
from liger_trainer.patching.moe import experts_formula
from tests.trainers.builders import sft
from tests.trainers.tiny import mixtral


def trained(trainer_class, folder):
    adapters = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "optim": "sgd", "gradient_checkpointing": True}
    model = mixtral()
    torch.manual_seed(0)
    trainer = sft(folder, model, trainer_class, peft_config=adapters, **options)
    trainer.train()
    return trainer


def test_steps_are_those_of_trl(tmp_path, monkeypatch):
    stock = trained(SFTTrainer, tmp_path / "stock")
    adapted, native = [], experts_formula.moe_experts

    def counting(*args, **kwargs):
        adapted.append(len(kwargs["gate_up_adapters"]) + len(kwargs["down_adapters"]))
        return native(*args, **kwargs)

    monkeypatch.setattr(experts_formula, "moe_experts", counting)
    ours = trained(LigerSFTTrainer, tmp_path / "ours")
    layers = ours.model.config.num_hidden_layers
    assert adapted[-4 * 2 * layers :] == [2] * 4 * 2 * layers  # forward and recomputation
    for got, expected in zip(ours.state.log_history[:4], stock.state.log_history[:4]):
        for key in ("loss", "grad_norm"):
            assert abs(got[key] - expected[key]) <= 1e-4 * expected[key]
    expected = dict(stock.model.named_parameters())
    for name, parameter in ours.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-5)
