"""Adapters that FSDP1 does not save (unless the installed PEFT finds them), or FSDP2 cannot load: refused at once."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from liger_trainer.trainers.checks import launch
from liger_trainer.trainers.checks.launch import check_fsdp1_adapters, check_fsdp2_tied_head
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
    monkeypatch.setattr(launch, "_are_found_in_units", lambda: False)


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
    monkeypatch.setattr(launch, "_are_found_in_units", lambda: True)
    check_fsdp1_adapters(trainer())


def test_the_installed_peft_is_asked(monkeypatch):
    """As with a PEFT that looks for names as they are in a state dict, and with one that does not."""
    monkeypatch.undo()
    for finds in (True, False):
        found = {"unit.linear.lora_A.weight": None} if finds else {}
        monkeypatch.setattr("peft.get_peft_model_state_dict", lambda model, state_dict, found=found: found)
        before = torch.get_rng_state()
        assert launch._are_found_in_units.__wrapped__() is finds
        assert torch.equal(torch.get_rng_state(), before)


WRAPPED = {
    "adapter": {"target_modules": ["q_proj", "lm_head"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]},
}


def tied(lora, tie=True, version=2, efficient=True):
    plugin = SimpleNamespace(fsdp_version=version, cpu_ram_efficient_loading=efficient)
    config = LoraConfig(r=2, task_type="CAUSAL_LM", **lora)
    return SimpleNamespace(
        accelerator=SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)),
        model=get_peft_model(llama(tie_word_embeddings=tie), config),
    )


@pytest.mark.parametrize("name", WRAPPED)
def test_a_tied_head_that_accelerate_cannot_tie_again_is_refused(name):
    with pytest.raises((KeyError, AttributeError)):  # what accelerate would meet
        tied(WRAPPED[name]).model.to("meta").tie_weights()
    advice = "fsdp_cpu_ram_efficient_loading: false" if name == "adapter" else "adapters of the layers alone"
    with pytest.raises(ValueError, match=rf"`lm_head.weight` is tied.*{advice}"):
        check_fsdp2_tied_head(tied(WRAPPED[name]))


@pytest.fixture
def mesh():
    """Two GPUs of which one is here, and nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", WRAPPED)
def test_a_tied_head_that_shares_a_weight_between_units_is_refused(name, mesh):
    """Loaded as accelerate does without `fsdp_cpu_ram_efficient_loading`."""
    refused = None if name == "adapter" else pytest.raises(ValueError, match="units of their own")
    with refused or contextlib.nullcontext():
        check_fsdp2_tied_head(tied(WRAPPED[name], efficient=False))
    model = tied(WRAPPED[name]).model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    norm = model.get_base_model().model.norm
    together = getattr(embedding, "weight", None) is not None and embedding.weight is getattr(head, "weight", None)
    with pytest.raises((ValueError, TypeError)) if refused else contextlib.nullcontext():
        if not together:
            fully_shard(embedding, mesh=mesh)
        fully_shard([norm, embedding, head] if together else [norm, head], mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))


def test_dora_is_refused_under_fsdp1():
    run = trainer(save_strategy="no")
    run.model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ValueError, match="`use_dora` does not work with FSDP1"):
        check_fsdp1_adapters(run)


@pytest.mark.parametrize(
    "options",
    [
        {"lora": {"target_modules": ["q_proj"]}},
        {"lora": {"target_modules": ["q_proj", "embed_tokens"]}},
        {"lora": WRAPPED["adapter"], "tie": False},
        {"lora": WRAPPED["saved"], "tie": False},
        {"lora": WRAPPED["adapter"], "version": 1},
        {"lora": WRAPPED["adapter"], "efficient": False},
    ],
    ids=str,
)
def test_what_can_be_tied_is_not_refused(options):
    check_fsdp2_tied_head(tied(**options))
    if options.get("efficient", True) and options.get("version", 2) == 2:
        tied(**options).model.to("meta").tie_weights()
