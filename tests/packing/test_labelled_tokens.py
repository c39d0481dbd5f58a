"""Trainers whose layers with shared keys run on labelled tokens alone, against TRL's: logs, and all gradients."""

from __future__ import annotations

import pytest

from liger_trainer.attention import interface
from liger_trainer.packing import proof
from liger_trainer.patching import labelled_tokens
from tests.packing.training import assert_close_gradients, save_models, trained
from tests.trainers.parity import OF_DIFFERENCES, assert_close_logs, lora
from tests.trainers.tiny import logged

pytestmark = pytest.mark.filterwarnings("ignore")

CHECKPOINTED = {"gradient_checkpointing": True}
CASES = {
    "SFT padded": ("SFT", {}),
    "SFT padded, accumulated": ("SFT", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "SFT padded, dft": ("SFT", {"loss_type": "dft"}),
    "SFT padding-free": ("SFT", {"padding_free": True, "max_length": None, **CHECKPOINTED}),
    "SFT packed": ("SFT", {"packing": True}),
    "DPO": ("DPO", CHECKPOINTED),
    "DPO not shared": ("DPO", {"own": {"share_prompt": False}}),
    "DPO split": ("DPO", {"own": {"tokens_per_micro_batch": 60}, **CHECKPOINTED}),
    "KTO lora": ("KTO", {"peft_config": lora("q_proj", "k_proj", "v_proj")}),
    "GRPO": ("GRPO", {"beta": 0.1}),
    "GRPO entropy": ("GRPO", {"entropy_coef": 0.1, "temperature": 0.7, "learning_rate": 1e-5}),
    "GRPO split": ("GRPO", {"beta": 0.1, "own": {"tokens_per_micro_batch": 20}, **CHECKPOINTED}),
}
OTHERS = {"DPO": ["rewards/accuracies"]}
"""What is logged and differs: the order of equal completions is that of rounding errors."""


@pytest.fixture(scope="session")
def folder_of_model(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("shared"), only=("gemma4",))["gemma4"]


@pytest.fixture
def placed(monkeypatch):
    """Of each forward that left tokens out, how many ran of how many."""
    seen, native = [], labelled_tokens._placed

    def noted(rows, places, shape):
        seen.append((rows.shape[1], shape.numel()))
        return native(rows, places, shape)

    monkeypatch.setattr(labelled_tokens, "_placed", noted)
    return seen


@pytest.fixture(autouse=True)
def _plans(monkeypatch):
    """On the CPU too; but the small copies that prove packing run on the CPU wherever the model is."""
    prove = proof._agreement

    def proved(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interface, "TRITON_DEVICES", ())
            return prove(*args)

    monkeypatch.setattr(interface, "TRITON_DEVICES", ("cpu",))
    monkeypatch.setattr(proof, "_agreement", proved)


@pytest.mark.parametrize("name", CASES)
def test_logs_and_gradients_are_those_of_trl(name, tmp_path, folder_of_model, placed, monkeypatch):
    kind, case = CASES[name]
    case = dict(case)
    own = case.pop("own", {})
    stock, expected = trained(kind, False, tmp_path / "stock", folder_of_model, **case)
    assert not placed
    ours, found = trained(kind, True, tmp_path / "ours", folder_of_model, own=own, **case)
    assert placed, "all tokens ran"
    assert all(ran < 0.9 * tokens for ran, tokens in placed)
    assert len(logged(stock)) == 3
    assert_close_logs(logged(ours), logged(stock), OTHERS.get(kind, ()), OF_DIFFERENCES)
    assert_close_gradients(found, expected)
    steps = len(placed)
    if kind == "SFT":
        assert {"entropy", "mean_token_accuracy"} <= {*logged(ours)[0]}
    if kind in ("SFT", "DPO"):
        ours.evaluate(ours.train_dataset)
        assert len(placed) == steps, "an evaluation runs all tokens"
