"""Adapters under FSDP1, which PEFT does not save: refused before a run, unless the installed PEFT finds them."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from liger_trainer.trainers import fsdp_adapters
from liger_trainer.trainers.fsdp_adapters import check_fsdp1_adapters
from tests.trainers.tiny import llama


def trainer(version=1, adapters=True, save_strategy="steps"):
    plugin = None if version is None else SimpleNamespace(fsdp_version=version)
    model = llama()
    return SimpleNamespace(
        accelerator=SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)),
        model=get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")) if adapters else model,
        args=SimpleNamespace(save_strategy=save_strategy),
    )


@pytest.fixture(autouse=True)
def lossy(monkeypatch):
    monkeypatch.setattr(fsdp_adapters, "_are_found_in_units", lambda: False)


def test_a_run_that_saves_is_refused():
    with pytest.raises(ValueError, match=r"saves and loads no adapter inside a unit of FSDP1.*fsdp_version: 2"):
        check_fsdp1_adapters(trainer())


def test_one_that_does_not_save_is_warned(caplog):
    check_fsdp1_adapters(trainer(save_strategy="no"))
    assert "for a model that is to be saved" in caplog.text


@pytest.mark.parametrize("options", [{"version": 2}, {"version": None}, {"adapters": False}], ids=str)
def test_others_are_not_concerned(options, caplog):
    check_fsdp1_adapters(trainer(**options))
    assert not caplog.records


def test_a_peft_that_finds_them_is_not_refused(monkeypatch):
    monkeypatch.setattr(fsdp_adapters, "_are_found_in_units", lambda: True)
    check_fsdp1_adapters(trainer())


def test_the_installed_peft_is_asked(monkeypatch):
    """With a stand-in for a PEFT that looks for names as they are in a state dict, and for one that does not."""
    monkeypatch.undo()
    for finds in (True, False):
        found = {"unit.linear.lora_A.weight": None} if finds else {}
        monkeypatch.setattr("peft.get_peft_model_state_dict", lambda model, state_dict, found=found: found)
        before = torch.get_rng_state()
        assert fsdp_adapters._are_found_in_units.__wrapped__() is finds
        assert torch.equal(torch.get_rng_state(), before)
