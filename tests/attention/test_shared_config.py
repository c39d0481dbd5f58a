"""Models with the same config, of which some are patched: each runs what is proved for it, and reverts alone."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from transformers import LlamaForCausalLM

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.attention import interface
from liger_trainer.attention.interface import NAME
from liger_trainer.kernels.attention.attention import attention_reference
from tests.tiny_models import TINY_MODELS, tiny_batch


@pytest.fixture
def ours(monkeypatch):
    """The calls of our attention, which runs as on a GPU."""
    calls = []

    def attention(*operands, **options):
        calls.append(options["plan"])
        return attention_reference(*operands, **options)

    monkeypatch.setattr(interface, "use_triton", lambda x: True)
    monkeypatch.setattr(interface, "attention", attention)
    return calls


def runs_ours(model, calls):
    calls.clear()
    model(**tiny_batch("llama", model))
    return bool(calls)


def two():
    patched = TINY_MODELS["llama"]()
    apply_liger_kernel(patched)
    torch.manual_seed(1)
    return patched, LlamaForCausalLM(patched.config)


def test_another_model_runs_its_default_until_it_is_patched(ours):
    patched, other = two()
    assert runs_ours(patched, ours)
    assert not runs_ours(other, ours)
    stock = LlamaForCausalLM(TINY_MODELS["llama"]().config)
    stock.load_state_dict(other.state_dict())
    batch = tiny_batch("llama", other)
    tokens = batch["attention_mask"].bool()  # padding attends to nothing
    torch.testing.assert_close(other(**batch).logits[tokens], stock(**batch).logits[tokens])
    report = apply_liger_kernel(other)
    assert any(row.component == "attention" and row.applied for row in report)
    assert runs_ours(other, ours)
    assert runs_ours(patched, ours)


@pytest.mark.parametrize("patch_other", [False, True])
def test_reverting_one_leaves_the_other(patch_other, ours):
    patched, other = two()
    if patch_other:
        apply_liger_kernel(other)
    revert_liger_kernel(other)
    assert not runs_ours(other, ours)
    assert runs_ours(patched, ours)
    revert_liger_kernel(patched)
    assert not runs_ours(patched, ours)
    assert patched.config._attn_implementation == "sdpa"


def test_a_copy_runs_ours_and_reverts_alone(ours):
    patched, _ = two()
    copied = copy.deepcopy(patched)
    assert runs_ours(copied, ours)
    revert_liger_kernel(copied)
    assert copied.config._attn_implementation == "sdpa"
    assert not runs_ours(copied, ours)
    assert runs_ours(patched, ours)


def test_a_pickle_has_the_name_that_was_there(tmp_path):
    patched, _ = two()
    assert pickle.loads(pickle.dumps(patched.config))._attn_implementation == "sdpa"
    assert patched.config._attn_implementation == NAME
    torch.save(patched, tmp_path / "model.pt")
    code = (
        "import sys, torch; model = torch.load(sys.argv[1], weights_only=False); "
        "model(input_ids=torch.tensor([[3, 4, 5]])); assert 'liger_trainer' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], check=True)


def test_a_model_that_was_pickled_is_patched_again(ours):
    patched, _ = two()
    file = io.BytesIO()
    torch.save(patched, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not runs_ours(loaded, ours)
    apply_liger_kernel(loaded)
    assert runs_ours(loaded, ours)
