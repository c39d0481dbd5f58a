"""`torch.compile`: native loss and gradients, no logits, and a backbone that is still compiled."""

from __future__ import annotations

import shutil
import types

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from liger_trainer.head import DeferredLogits
from liger_trainer.patching.head import patch_head
from tests.tiny_models import TINY_MODELS, tiny_batch

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Counting:
    """A backend that records its graphs."""

    def __init__(self, backend: str) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.inner = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, example: list[torch.Tensor]):
        self.graphs.append(graph)
        return self.inner(graph, example)

    def calls(self, name: str) -> int:
        return sum(name in str(node.target) for graph in self.graphs for node in graph.graph.nodes)

    @property
    def largest(self) -> int:
        return max(sum(node.op == "call_function" for node in graph.graph.nodes) for graph in self.graphs)


def patched(name: str, **overrides) -> nn.Module:
    model = TINY_MODELS[name](**overrides).train()
    assert patch_head(model, fused=True, logits_memory=2**20).applied
    return model


def native_step(name: str, **overrides):
    model = TINY_MODELS[name](**overrides).train()
    loss = model(**tiny_batch(name, model)).loss
    loss.backward()
    return model, loss.detach()


def assert_same_gradients(ours: nn.Module, native: nn.Module) -> None:
    for (name, mine), theirs in zip(ours.named_parameters(), native.parameters()):
        if theirs.grad is not None:
            torch.testing.assert_close(
                mine.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_compiled_model(name, never_built):
    native, expected = native_step(name)
    model, counting = patched(name), Counting("aot_eager")
    compiled = torch.compile(model, backend=counting)
    inputs = tiny_batch(name, model)
    for _ in range(2):
        model.zero_grad()
        outputs = compiled(**inputs)
        outputs.loss.backward()
    assert type(outputs.logits) is DeferredLogits
    torch.testing.assert_close(outputs.loss.detach(), expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(model, native)
    assert counting.calls("scaled_dot_product") == 2 or counting.largest > 100, "both layers are in one graph"
    assert counting.calls("cross_entropy") == 0, "the loss runs outside the graph"
    assert sum(counters["graph_break"].values()) == 1, "one break, where the causal LM's own forward begins"
    compiled_before = len(counting.graphs)
    compiled(**inputs).loss.backward()
    assert len(counting.graphs) == compiled_before, "nothing is compiled again"


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(never_built):
    small = {"num_hidden_layers": 1}  # compiling C++ is what takes the time
    native, expected = native_step("llama", **small)
    model = patched("llama", **small)
    loss = torch.compile(model)(**tiny_batch("llama", model)).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(model, native)


def test_compiled_with_mixed_precision_as_accelerate_prepares_it(never_built):
    from accelerate.utils.operations import convert_outputs_to_fp32

    native, expected = native_step("llama")
    model, counting = patched("llama"), Counting("aot_eager")
    model.forward = types.MethodType(torch.autocast("cpu", torch.bfloat16)(model.forward.__func__), model)
    model.forward = types.MethodType(convert_outputs_to_fp32(model.forward.__func__), model)
    outputs = torch.compile(model, backend=counting)(**tiny_batch("llama", model))
    outputs.loss.backward()
    assert type(outputs.logits) is DeferredLogits
    assert counting.calls("scaled_dot_product") == 2
    torch.testing.assert_close(outputs.loss.detach(), expected, rtol=2**-8, atol=0)
    mine, theirs = model.lm_head.weight.grad, native.lm_head.weight.grad
    assert (mine - theirs).norm() <= 2**-5 * theirs.norm()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_training_step(fullgraph, monkeypatch):
    """Where the graph may not break, the head traces as the plain linear it is."""
    if not fullgraph:
        monkeypatch.setattr(DeferredLogits, "_compute", lambda self: pytest.fail("the logits were built"))
    native, expected = native_step("llama")
    model, counting = patched("llama"), Counting("aot_eager")

    @torch.compile(backend=counting, fullgraph=fullgraph)
    def step(inputs):
        loss = model(**inputs).loss
        return loss, torch.digamma(loss.detach())

    loss, _ = step(tiny_batch("llama", model))
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(model, native)
    assert counting.calls("cross_entropy") == int(fullgraph)
    assert counting.calls("digamma") == 1, "what follows the forward is compiled"


def test_evaluation_and_inference_stay_one_graph():
    native, model = TINY_MODELS["llama"]().eval(), patched("llama").eval()
    counting = Counting("eager")
    compiled = torch.compile(model, backend=counting)
    inputs = tiny_batch("llama", model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).logits, native(**inputs).logits)
    assert len(counting.graphs) == 1
    assert counting.calls("cross_entropy") == 1


def test_other_models_are_compiled_as_before(never_built):
    """Running a patched model's own forward eagerly leaves its class alone."""
    model = patched("llama")
    torch.compile(model, backend="eager")(**tiny_batch("llama", model)).loss.backward()
    other, counting = TINY_MODELS["llama"]().train(), Counting("eager")
    torch.compile(other, backend=counting)(**tiny_batch("llama", other)).loss.backward()
    assert len(counting.graphs) == 1
    assert counting.calls("cross_entropy") == 1
