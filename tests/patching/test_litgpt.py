"""LitGPT's models: loss, gradients and report, with logits that are never built; and the steps of Lightning Fabric.

Each test runs on a tiny model of the same structure (`tests/tiny_litgpt.py`) and, where it is installed, on LitGPT's.
"""

from __future__ import annotations

import copy
import functools
import importlib
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.head import DeferredLogits
from tests import tiny_litgpt
from tests.documents import ROOT

SIZES = {"block_size": 32, "padded_vocab_size": 104, "n_layer": 2, "n_head": 4, "n_query_groups": 2, "n_embd": 32}
SIZES |= {"intermediate_size": 48, "rotary_percentage": 1.0, "norm_class_name": "RMSNorm", "norm_eps": 1e-5}
SIZES |= {"bias": False, "parallel_residual": False, "mlp_class_name": "LLaMAMLP"}
FAMILIES = {
    "llama": {},
    "gemma": {"mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh", "final_logit_softcapping": 3.0},
    "qwen3": {"norm_qk": True},
    "interleaved": {"rope_interleave": True},
    "pythia": {
        **{"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "bias": True, "lm_head_bias": True},
        **{"parallel_residual": True, "rotary_percentage": 0.5},
    },
}
TOKENS = torch.randint(0, 104, (2, 17), generator=torch.Generator().manual_seed(0))
ROTATIONS = {"rope", "rope (neighbours to halves)"}


@pytest.fixture(params=["tiny", "litgpt"])
def library(request):
    """The names of LitGPT that the tests use."""
    if request.param == "tiny":
        return tiny_litgpt
    why = "LitGPT is not installed (`pip install litgpt`); the tests with its tiny model ran"
    model = pytest.importorskip("litgpt.model", reason=why)
    lora, utils = importlib.import_module("litgpt.lora"), importlib.import_module("litgpt.utils")
    gpt, config = model.GPT, lora.Config
    return SimpleNamespace(GPT=gpt, Config=config, lora_gpt=lora.GPT, chunked_cross_entropy=utils.chunked_cross_entropy)


@pytest.fixture
def never_built(monkeypatch):
    monkeypatch.setattr(DeferredLogits, "_compute", lambda self: pytest.fail("the logits were built"))


def drawn(model):
    """The model with parameters that are not the initial ones, such as norms of ones and adapters of zeros."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def build(library, family="llama", **options):
    torch.manual_seed(0)
    return drawn(library.GPT(library.Config(**SIZES | FAMILIES[family] | options)))


def loss_and_gradients(library, model, chunk_size=128, head_chunk=0):
    """As in LitGPT's scripts: whole logits in pretraining, a list of them where adapters are trained."""
    targets = TOKENS[:, 1:].clone()
    targets[0, :3] = -100
    loss = library.chunked_cross_entropy(model(TOKENS[:, :-1], lm_head_chunk_size=head_chunk), targets, chunk_size)
    loss.backward()
    return {"loss": loss.detach(), **{name: each.grad for name, each in model.named_parameters()}}


def assert_same(ours, theirs, tolerance=6e-6):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        if expected is None:
            assert ours[name] is None, name
        else:
            error = (ours[name].double() - expected.double()).norm() / expected.double().norm()
            assert error <= tolerance, f"{name}: {error}"


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_against_float64(library, family, never_built):
    model = build(library, family)
    exact = copy.deepcopy(model).double()
    report = apply_liger_kernel(model)
    assert {row.kernel for row in report if row.component == "rope"} == ROTATIONS
    assert type(model(TOKENS)) is DeferredLogits
    assert_same(loss_and_gradients(library, model), loss_and_gradients(library, exact))


@pytest.mark.parametrize(("chunk_size", "head_chunk"), [(0, 0), (4, 0), (128, 6)])
def test_chunks_of_the_loss_and_of_the_head(library, chunk_size, head_chunk, never_built):
    model = build(library)
    native = copy.deepcopy(model)
    apply_liger_kernel(model)
    ours = loss_and_gradients(library, model, chunk_size, head_chunk)
    assert_same(ours, loss_and_gradients(library, native, chunk_size, head_chunk))


def test_report(library):
    report = apply_liger_kernel(build(library, "pythia"))
    assert {(row.target, row.kernel is None) for row in report} == {
        ("LayerNorm", False),
        ("apply_rope in CausalSelfAttention", False),
        ("apply_rope_interleave in CausalSelfAttention", False),
        ("GptNeoxMLP", True),
        ("GPT head", False),
    }
    (left,) = report.left_alone
    assert (left.component, left.count) == ("other", 2)
    (left,) = apply_liger_kernel(build(library, "llama"), {"swiglu": False, "geglu": False}).left_alone
    assert left.reason == "switched off in liger_kernel_config"


def test_strict_and_reverted(library):
    model = build(library, "pythia")
    native = copy.deepcopy(model)
    assert len(apply_liger_kernel(model, strict=True).applied) == 4  # no kernel for its MLP is no failure of one
    revert_liger_kernel(model)
    assert type(model(TOKENS)) is torch.Tensor
    torch.testing.assert_close(model(TOKENS), native(TOKENS), rtol=0, atol=0)


def test_evaluation_and_generation_build_their_logits(library):
    model = build(library).eval()
    apply_liger_kernel(model)
    with torch.no_grad():
        assert type(model(TOKENS)) is torch.Tensor


def with_adapters(library, **options):
    """A model whose adapters alone are trained."""
    model = drawn(library.lora_gpt(library.Config(**SIZES, lora_r=4, lora_alpha=16, **options)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


@pytest.mark.parametrize("lora_head", [False, True])
def test_adapters(library, lora_head, never_built):
    model = with_adapters(library, lora_mlp=True, lora_head=lora_head)
    exact = copy.deepcopy(model).double()
    report = apply_liger_kernel(model)
    applied = {(row.component, row.target): (row.kernel, row.count) for row in report.applied}
    assert applied["swiglu", "LLaMAMLP"] == ("swiglu", 2)
    assert applied["lora", "LoRALinear"] == ("lora_linear", 6)
    head = applied["linear_cross_entropy", "GPT head"][0]
    assert head.startswith("cross_entropy on chunks of LoRALinear" if lora_head else "linear")
    ours = loss_and_gradients(library, model, head_chunk=6)
    assert sum(gradient is not None for gradient in ours.values()) == 1 + 2 * (6 + lora_head)
    assert_same(ours, loss_and_gradients(library, exact, head_chunk=6))


@pytest.mark.parametrize("adapted", ["query, value", "key", "query, key, value"])
def test_adapters_of_queries_keys_and_values(library, adapted):
    model = with_adapters(library, lora_projection=True, **{f"lora_{name}": True for name in adapted.split(", ")})
    exact = copy.deepcopy(model).double()
    rows = {row.target: (row.kernel, row.count) for row in apply_liger_kernel(model) if row.component == "lora"}
    assert rows == {"LoRAQKVLinear": ("lora_linear", 2), "LoRALinear": ("lora_linear", 2)}
    assert_same(loss_and_gradients(library, model), loss_and_gradients(library, exact))


def test_dropout_of_adapters(library):
    """What the adapters add is 0 where the input was dropped, and twice the rest's."""
    model = with_adapters(library, lora_projection=True, lora_dropout=0.5)
    layer = model.transformer.h[0].attn.proj
    apply_liger_kernel(model)
    x = torch.eye(layer.linear.in_features)
    added = (layer(x) - layer.linear(x)).detach()
    kept = (added != 0).any(1)
    assert 0 < kept.sum() < len(x)
    whole = (x @ layer.lora_A.mT @ layer.lora_B.mT * layer.scaling).detach()
    torch.testing.assert_close(added[kept], 2 * whole[kept])
    torch.testing.assert_close(layer.eval()(x), layer.linear(x) + whole)


def test_merged_adapters_run_their_own_forward(library):
    model = with_adapters(library, lora_mlp=True)
    apply_liger_kernel(model)
    layer, x = model.transformer.h[0].mlp.fc_1, torch.randn(3, 32)
    layer.merged = True
    torch.testing.assert_close(layer(x), layer.linear(x), rtol=0, atol=0)


def test_a_scaling_that_is_trained_runs_their_own_forward(library):
    model = with_adapters(library, lora_mlp=True)
    apply_liger_kernel(model)
    layer = model.transformer.h[0].mlp.fc_1
    layer.scaling = nn.Parameter(torch.tensor(1.5))
    layer(torch.ones(3, 32)).square().sum().backward()
    assert layer.scaling.grad is not None


def test_adapters_of_another_formula_are_left_alone(monkeypatch):
    def other(self, x):
        return self.linear(x) + x @ self.lora_A.mT @ self.lora_B.mT

    monkeypatch.setattr(tiny_litgpt.LoRALinear, "forward", other)
    report = apply_liger_kernel(with_adapters(tiny_litgpt, lora_mlp=True))
    (row,) = [row for row in report if row.component == "lora"]
    assert (row.target, row.kernel) == ("LoRALinear", None)
    assert "relative difference" in row.reason


# ---------------------------------------------------------------------------------------------------------------------
# Lightning Fabric
# ---------------------------------------------------------------------------------------------------------------------


def _backward_hook(seen, gradient):
    seen.append(gradient)


_backward_hook.__module__ = "lightning.fabric.wrappers"


class FabricModule(nn.Module):
    """What Fabric 2.6 puts around a model: autocast, outputs in fp32, and a hook that sees the backward begin."""

    def __init__(self, module):
        super().__init__()
        self.module, self.seen = module, []

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "module" else getattr(super().__getattr__("module"), name)

    def forward(self, *args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            output = self.module(*args, **kwargs).to(torch.float32)
        output.register_hook(functools.partial(_backward_hook, self.seen))
        return output


def test_in_a_module_of_fabric(monkeypatch, never_built):
    fabric = SimpleNamespace(is_wrapped=lambda model: isinstance(model, FabricModule))
    monkeypatch.setitem(sys.modules, "lightning.fabric", fabric)
    wrapped, native = FabricModule(build(tiny_litgpt)), FabricModule(build(tiny_litgpt))
    report = apply_liger_kernel(wrapped)
    assert report.model == "GPT in FabricModule"
    assert not report.left_alone
    ours = loss_and_gradients(tiny_litgpt, wrapped, chunk_size=0)
    assert len(wrapped.seen) == 1
    monkeypatch.undo()  # the logits of the other are real
    assert_same(ours, loss_and_gradients(tiny_litgpt, native, chunk_size=0), 0.03)


def fabric_steps(library, precision, patched):
    """Losses and gradient norms of two steps of LitGPT's loop."""
    fabric = pytest.importorskip("lightning.fabric", reason="Lightning is not installed (`pip install lightning`)")
    runner = fabric.Fabric(accelerator="cpu", devices=1, precision=precision)
    with runner.init_module():
        model = library.GPT(library.Config(**SIZES))
    model = runner.setup(drawn(model))
    if patched:
        assert not apply_liger_kernel(model).left_alone
    optimizer = runner.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    seen = []
    for _ in range(2):
        logits = model(TOKENS[:, :-1])
        loss = library.chunked_cross_entropy(logits, TOKENS[:, 1:])
        runner.backward(loss)
        seen += [loss.item(), float(runner.clip_gradients(model, optimizer, max_norm=1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 5e-3), ("bf16-true", 1e-2)])
def test_steps_of_fabric(library, precision, tolerance, never_built):
    torch.manual_seed(0)
    ours = fabric_steps(library, precision, patched=True)
    torch.manual_seed(0)
    assert ours == pytest.approx(fabric_steps(library, precision, patched=False), rel=tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# Without transformers
# ---------------------------------------------------------------------------------------------------------------------

WITHOUT_TRANSFORMERS = """
import importlib.metadata, sys

class Absent:
    names = ("transformers", "trl", "peft", "accelerate", "datasets", "rich")
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def version(name, found=importlib.metadata.version):
    if name in Absent.names:
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)

sys.meta_path.insert(0, Absent())
importlib.metadata.version = version

import torch
from liger_trainer import apply_liger_kernel, revert_liger_kernel
from tests import tiny_litgpt

model = tiny_litgpt.GPT(tiny_litgpt.Config())
print(apply_liger_kernel(model))
print(type(model(torch.zeros(1, 4, dtype=torch.long))).__name__, revert_liger_kernel(model))
"""


def test_with_torch_alone():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRANSFORMERS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.pop(-2).startswith("Proved and patched in ")
    assert [re.sub(r"\d\.\de[+-]\d\d", "#", line) for line in lines] == [
        "liger_trainer kernels in GPT",
        "  rms_norm: 5 x RMSNorm: rms_norm (casting=olmo2), probe error #",
        "  rope: 2 x apply_rope_interleave in CausalSelfAttention: rope (neighbours to halves), probe error #",
        "  rope: 2 x apply_rope in CausalSelfAttention: rope, probe error #",
        "  swiglu: 2 x LLaMAMLP: swiglu, probe error #",
        "  linear_cross_entropy: 1 x GPT head: linear_cross_entropy (logits_memory=512 MiB), probe error #",
        "DeferredLogits 11",
    ]
    assert done.stderr == ""
