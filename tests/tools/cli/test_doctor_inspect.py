"""`doctor` reports what is wrong; `inspect` needs no weights; `recipes` lists and copies."""

import importlib.metadata
import importlib.util
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from liger_trainer.compat.private import TESTED
from liger_trainer.tools.cli import doctor, main, run_recipe_file
from tests.tools.cli.runs import MODEL, message_of

CONFIG = {**MODEL, "num_hidden_layers": 2, "vocab_size": 64}


def find(findings, subject):
    return next(finding for finding in findings if finding.subject == subject)


def test_doctor_runs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in ("torch", "transformers", "trl", "supported"):
        assert word in shown


@pytest.fixture
def installed(monkeypatch):
    """Makes packages appear in these versions, or with None as missing."""
    real = importlib.metadata.version

    def install(**versions):
        def version(package):
            found = versions[package] if package in versions else real(package)
            if found is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)

    return install


def test_private_names_are_read_offline(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    doctor.private_names()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_versions_out_of_range_and_missing(installed):
    installed(peft=None, trl="1.9.0", transformers="4.57.0", torch="2.13.0+cpu")
    findings = doctor.versions()
    assert find(findings, "transformers").status == "error"
    assert "pip install 'transformers" in find(findings, "transformers").text
    assert find(findings, "trl").status == "error"
    assert find(findings, "torch").status == "ok"
    assert "not installed" in find(findings, "peft").text


def test_versions_newer_than_what_was_tested(installed):
    installed(transformers="5.99.0", torch=f"{TESTED['torch']}+cpu", rich="99.0")
    findings = doctor.versions()
    newer = find(findings, "transformers")
    assert newer.status == "note"
    assert newer.text == f"5.99.0 (supported <6,>=5.19): newer than what was tested ({TESTED['transformers']})"
    assert find(findings, "torch").status == find(findings, "rich").status == "ok"


@pytest.mark.parametrize("library", ["datasets", "tokenizers", "triton"])
def test_every_library_that_changes_what_is_trained_has_a_tested_version(library, installed):
    installed(**{library: TESTED[library]})
    assert find(doctor.versions(), library).status == "ok"
    newest = f"{TESTED[library]}.1"
    installed(**{library: newest})
    finding = find(doctor.versions(), library)
    assert finding.status == "note"
    assert finding.text.startswith(f"{newest} (supported ")
    assert finding.text.endswith(f": newer than what was tested ({TESTED[library]})")


def test_the_peft_that_transformers_asks_for(installed, monkeypatch):
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.22.0")
    installed(peft="0.21.2")
    finding = find(doctor.traps(), "peft")
    assert finding.status == "note"
    assert finding.text.startswith(
        "0.21.2 is older than the 0.22.0 that `model.add_adapter` of the installed transformers"
    )
    installed(peft="0.22.0")
    assert all(finding.subject != "peft" for finding in doctor.traps())


@pytest.mark.parametrize("command", [["train"], ["plan", "--gpus", "1"], ["inspect"]])
def test_commands_refuse_versions_out_of_range(command, installed, capsys):
    installed(trl="1.9")
    assert main([*command, "llama3_8b_sft"]) == 2
    assert run_recipe_file("llama3_8b_sft", []) == 2
    line = r"liger-trainer: trl: 1.9 \(supported .*\): pip install 'trl.*'\n"
    assert re.fullmatch(line * 2, capsys.readouterr().err)


def test_triton_may_be_missing(installed):
    installed(triton=None)
    assert doctor.unmet_requirement() is None


@pytest.mark.parametrize(
    ("name", "capability", "fast", "slow"),
    [
        ("Tesla T4", (7, 5), "fp16", "bf16 (emulated), attention (our kernels, no flash operator), fp8"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "bf16, torch's flash attention", "fp8"),
        ("NVIDIA H100", (9, 0), "bf16, torch's flash attention, fp8, torch's grouped matmul", ""),
        ("NVIDIA GeForce RTX 5090", (12, 0), "bf16, torch's flash attention", "fp8 (not tried)"),
    ],
)
def test_what_a_gpu_runs_fast(name, capability, fast, slow, monkeypatch):
    properties = SimpleNamespace(name=name, total_memory=16 * 2**30)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor, "_try_kernel", lambda kind: doctor.Finding("kernels", "ok", ""))
    card, speeds, _ = doctor.devices()
    assert f"{name}, 16 GiB, sm_{capability[0]}{capability[1]}" in card.text
    assert ("`fp16: true`" in card.text) == (card.status == "warning") == (capability < (8, 0))
    found, _, rest = speeds.text.partition("; not: ")
    assert fast in found
    assert rest.startswith(slow)
    assert bool(slow) == bool(rest)


def test_a_gpu_that_triton_does_not_know():
    found = doctor.speeds("gpu 0", (7, 0))
    assert found.status == "warning"
    assert "sm_75" in found.text


def test_trap_of_a_kernels_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert all(finding.subject != "kernels/" for finding in doctor.traps())
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    assert find(doctor.traps(), "kernels/").status == "error"


def test_trap_of_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert find(doctor.traps(), "TRITON_INTERPRET").status == "warning"


def test_traps_of_several_gpus_and_liger(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(doctor, "installed_version", lambda package: "0.8.5" if package == "liger-kernel" else None)
    findings = doctor.traps()
    assert "all 4" in find(findings, "several GPUs").text
    assert "0.8.5" in find(findings, "liger-kernel").text


@pytest.mark.parametrize("installed", [True, False])
def test_flash_attn_is_a_choice(monkeypatch, installed):
    find = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: (installed or None) if name == "flash_attn" else find(name, *more),
    )
    lines = [finding.text for finding in doctor.traps() if finding.subject == "flash-attn"]
    assert lines == installed * ["not needed for packing or windows; runs where `attn_implementation` names it"]


def test_a_kernel_that_cannot_run_is_a_finding(monkeypatch):
    import liger_trainer.functional

    def broken(*arguments):
        raise RuntimeError("no compiler\nand much more")

    monkeypatch.setattr(liger_trainer.functional, "rms_norm", broken)
    finding = doctor._try_kernel("cpu")
    assert finding.status == "error"
    assert "no compiler" in finding.text
    assert "much more" not in finding.text


@pytest.mark.gpu
def test_gpu_is_listed_and_its_kernels_run(device):
    findings = doctor.devices()
    assert find(findings, "gpu 0").status == "ok"
    assert find(findings, "kernels").status == "ok"


def inspected(capsys, *arguments):
    assert main(["inspect", *map(str, arguments)]) == 0
    return re.sub(r" in [\d.]+ s\.", "", capsys.readouterr().out)  # which differs from run to run


def test_inspect_takes_a_config_a_folder_and_a_recipe(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    shown = inspected(capsys, path)
    assert "LlamaRMSNorm" in shown
    assert inspected(capsys, tmp_path) == shown
    assert "LlamaMLP" in inspected(capsys, "quickstart")


def test_inspect_needs_no_memory_for_the_weights(tmp_path, capsys):
    size = {**CONFIG, "hidden_size": 16384, "intermediate_size": 65536, "vocab_size": 300_000, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({**size, "num_attention_heads": 128, "num_key_value_heads": 8}))
    assert "LlamaMLP" in inspected(capsys, tmp_path)


def test_inspect_follows_the_switches(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert inspected(capsys, tmp_path) != inspected(capsys, tmp_path, "--liger_kernel_config", '{"rms_norm": false}')


@pytest.mark.parametrize("arguments", [["no/such-model"], ["none.yaml"], ["quickstart", "--liger_kernel_config", "{"]])
def test_inspect_refuses_in_one_message(arguments, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["inspect", *arguments]) == 2
    message_of(capsys.readouterr().err)


def test_recipes_lists_and_copies_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes"]) == 0
    assert "llama3_8b_sft" in capsys.readouterr().out
    assert main(["recipes", "quickstart"]) == 0
    assert "pydoc_topics" in Path("quickstart.yaml").read_text()
    assert main(["recipes", "quickstart"]) == 2
    assert "not overwritten" in capsys.readouterr().err
