"""What is importable by Liger's names, and that it is called as Liger's is."""

from __future__ import annotations

import inspect
import json
import pathlib

import pytest
import torch

from liger_trainer.liger import modules

RECORDED = json.loads((pathlib.Path(__file__).parents[1] / "peers" / "liger_signatures.json").read_text())
# Parameters whose defaults are not Liger's: the first has no effect, the other would overwrite the caller's logits.
OTHER_DEFAULTS = ("in_place", "inplace")


def recorded():
    for module, signatures in RECORDED["signatures"].items():
        for name, signature in signatures.items():
            yield pytest.param(module, name, signature, id=f"{module.removeprefix('liger_kernel.')}.{name}")


def parameters(text: str) -> list[inspect.Parameter]:
    """The parameters of a signature in the file."""
    return list(inspect.signature(eval(f"lambda {text}: None", {"torch": torch})).parameters.values())


@pytest.mark.parametrize(("module", "name", "signature"), [*recorded()])
def test_called_as_ligers(module, name, signature):
    holder, _, method = name.partition(".")
    if holder in modules.ABSENT:
        with pytest.raises(AttributeError, match=f"does not offer {module}.{holder}: "):
            modules.find(module, holder)
        return
    found = modules.find(module, holder)
    applied = holder.endswith("Function")
    function = found.apply if applied else getattr(found, method) if method else found
    ours = [each for each in inspect.signature(function).parameters.values() if each.name not in ("self", "cls", "ctx")]
    theirs = parameters(signature)
    if module.endswith("fused_linear_distillation"):
        ours = [
            each for each in inspect.signature(found.forward).parameters.values() if each.name not in ("cls", "ctx")
        ]
    for mine, liger in zip(ours, theirs, strict=False):
        if not applied:  # whose arguments torch takes by position only
            assert mine.name == liger.name
        assert mine.kind == liger.kind
        if liger.default is not inspect.Parameter.empty and mine.name not in OTHER_DEFAULTS:
            assert mine.default == liger.default, mine.name
    assert len(ours) >= len(theirs)
    more = [each for each in ours[len(theirs) :] if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    assert all(each.default is not inspect.Parameter.empty for each in more)


@pytest.mark.parametrize("name", RECORDED["all"])
def test_all_of_transformers(name):
    assert modules.find("liger_kernel.transformers", name) is not None


def test_packages_hold_what_their_modules_do():
    functions = modules.names("liger_kernel.ops")
    losses = modules.names("liger_kernel.chunked_loss")
    assert {"LigerRMSNormFunction", "LigerFusedLinearCrossEntropyFunction", "LigerEmbeddingFunction"} <= set(functions)
    assert {"LigerFusedLinearDPOLoss", "LigerFusedLinearKTOLoss"} <= set(losses)
    assert "liger_fused_linear_dpo" not in losses
    assert "liger_rms_norm" not in modules.names("liger_kernel.transformers")


def test_what_frameworks_import():
    names = {
        "chunked_loss.functional": "liger_fused_linear_dpo",
        "ops.grpo_loss": "fused_selective_log_softmax",
        "ops.utils": "is_hip",
        "transformers.functional": "CrossEntropyOutput",
        "transformers.monkey_patch": "MODEL_TYPE_TO_APPLY_LIGER_FN",
        "transformers.trainer.orpo_trainer": "_FSDPForwardRedirection",
        "transformers.trainer_integration": "_apply_liger_kernel",
        "utils": "PEFT_AVAILABLE",
    }
    for module, name in names.items():
        assert modules.find(f"liger_kernel.{module}", name)


def test_one_name_in_two_modules():
    in_ops = modules.find("liger_kernel.ops.fused_linear_jsd", "LigerFusedLinearJSDFunction")
    in_losses = modules.find("liger_kernel.chunked_loss.jsd_loss", "LigerFusedLinearJSDFunction")
    assert in_ops is modules.find("liger_kernel.ops", "LigerFusedLinearJSDFunction")
    assert in_ops is not in_losses


def test_what_is_not_there_is_an_error_that_says_why():
    with pytest.raises(AttributeError, match="GrpoLossFunction: call liger_kernel"):
        modules.find("liger_kernel.ops.grpo_loss", "GrpoLossFunction")
    with pytest.raises(AttributeError, match=r"transformers\.LigerNorm: it is not in the table"):
        modules.find("liger_kernel.transformers", "LigerNorm")
    with pytest.raises(ModuleNotFoundError, match=r"liger_kernel\.megatron"):
        modules.names("liger_kernel.megatron")


def test_absent_names_are_ligers_and_not_offered():
    offered = {name for module in modules.MODULES for name in modules.names(f"liger_kernel.{module}")}
    assert not offered & modules.ABSENT.keys()
