"""Layers that run from CUDA graphs on an accelerator: the losses and weights of those that do not."""

import contextlib
import copy
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model

from liger_trainer.graphs.capture import CudaCaptures
from liger_trainer.graphs.captured import CapturedLayers
from liger_trainer.patching import fp8
from liger_trainer.patching.apply import apply_liger_kernel
from tests.patching.mixing_models import built
from tests.tiny_models import TINY_MODELS

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
MODELS = ["llama", "qwen3", "gemma2", "qwen3_moe"]


def build(name, lora, checkpointed):
    torch.manual_seed(0)
    # The routers' loss has transformers hook the layers, which then run without graphs.
    options = {"output_router_logits": False} if name == "qwen3_moe" else {}
    model = TINY_MODELS[name](**SIZES, max_position_embeddings=512, **options).bfloat16().cuda().train()
    if lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_liger_kernel(model)
    return model


def batches():
    """Whole rows, padded ones and packed ones, each several times."""
    for number in range(15):
        random = torch.Generator().manual_seed(number)
        ids = torch.randint(3, 90, (2, 256), generator=random).cuda()
        if number % 3 == 0:
            yield {"input_ids": ids, "labels": ids}
        elif number % 3 == 1:
            mask = torch.ones_like(ids)
            mask[0, 200 + number :] = 0
            yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        else:
            ids = ids.view(1, -1)
            lengths = [100 + number, 300 - number, 112]
            positions = torch.cat([torch.arange(length) for length in lengths])[None].cuda()
            yield {"input_ids": ids, "position_ids": positions, "labels": ids}


@pytest.fixture
def deterministic():
    """torch's flash attention adds in any order otherwise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


ROUNDING = 2e-2
"""How far bf16 gradients of four layers may be apart, relative to their norm, where a sum is split in another way."""


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_without_graphs(name, lora, checkpointed):
    assert_same(build(name, lora, checkpointed), 4)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "nemotron_h", "granitemoehybrid", "lfm2"])
def test_hybrids(name, checkpointed):
    model = built(name, torch.bfloat16).cuda().train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_liger_kernel(model)
    assert_same(model, model.config.num_hidden_layers)


@pytest.mark.parametrize("mode", ["rowwise", "rowwise_gw_hp", "tensorwise"])
def test_products_in_fp8_are_of_the_weights_as_they_are(mode, monkeypatch):
    monkeypatch.setattr(fp8, "LEAST_ROWS", 64)
    monkeypatch.setattr(fp8, "LEAST_FEATURES", 64)
    torch.manual_seed(0)
    model = TINY_MODELS["llama"](**SIZES, max_position_embeddings=512).bfloat16().cuda().train()
    report = apply_liger_kernel(model, {"fp8": mode, "fp8_all_layers": True})
    assert sum(row.count for row in report.applied if row.component == "fp8") == 28, str(report)
    captured = CapturedLayers(CudaCaptures(torch.device("cuda", torch.cuda.current_device())))
    losses, ids = [], torch.randint(3, 90, (2, 256), device="cuda")
    weights = [weight.detach().clone() for weight in model.parameters()]
    for graphs in (captured, None):
        with torch.no_grad():
            for weight, first in zip(model.parameters(), weights):
                weight.copy_(first)
        losses.append([])
        for _ in range(8):
            model.zero_grad()
            with contextlib.nullcontext() if graphs is None else graphs.attached(model):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            losses[-1].append(loss.item())
            with torch.no_grad():
                for weight in model.parameters():
                    weight.sub_(weight.grad, alpha=0.1)
    assert captured.captured == 4, captured.reasons
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[1][-1] < 0.95 * losses[1][0]


def assert_same(model, layers):
    """Bit for bit of whole rows; with documents, attention splits sums by how many there are, and a graph has more."""
    other = copy.deepcopy(model)
    captured = CapturedLayers(CudaCaptures(torch.device("cuda", torch.cuda.current_device())))
    for batch in batches():
        model.zero_grad()
        other.zero_grad()
        with captured.attached(model):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        expected = other(**batch, use_cache=False).loss
        expected.backward()
        assert torch.equal(loss, expected)
        for (place, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None), place
            if one.grad is not None and not torch.equal(one.grad, two.grad):
                assert len(batch) > 2, place
                assert (one.grad - two.grad).norm() <= ROUNDING * two.grad.norm(), place
    assert captured.captured == layers, captured.reasons


def test_after_a_capture_that_fails():
    """Random numbers, allocations and other captures are as if there had been none."""
    captures = CudaCaptures(torch.device("cuda", torch.cuda.current_device()))
    x = torch.ones(3, device="cuda")
    earlier = captures(lambda: x.add_(torch.rand(3, device="cuda").ceil()))
    with pytest.raises(RuntimeError):
        captures(lambda: x.mul_(x.sum().item()))
    with pytest.raises(ValueError, match="of its own"):
        captures(lambda: x.mul_(_raised()))
    torch.manual_seed(1)
    drawn = torch.rand(1000, device="cuda")
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1000, device="cuda"), drawn)
    later = captures(lambda: x.mul_(2))
    earlier()
    later()
    earlier()
    assert x.tolist() == [5, 5, 5]
    with pytest.raises(RuntimeError), captures.tried():
        x.tolist()
    x.tolist()


def _raised():
    raise ValueError("of its own")


def test_a_layer_that_draws_numbers_on_the_host_runs_without():
    """As adapters do that leave a whole module out by chance, which no operator of the device shows."""
    model = build("llama", False, False)
    mlp = model.model.layers[1].mlp
    native = type(mlp).forward
    mlp.forward = types.MethodType(lambda self, x: x if torch.rand(1) > 0.5 else native(self, x), mlp)
    other, captured = copy.deepcopy(model), CapturedLayers(CudaCaptures(torch.device("cuda", 0)))
    ids = torch.randint(3, 90, (2, 64)).cuda()
    for number in range(8):
        torch.manual_seed(number)
        with captured.attached(model):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.manual_seed(number)
        plain = other(input_ids=ids, labels=ids, use_cache=False).loss
        assert loss.item() == pytest.approx(plain.item(), rel=1e-3)
    assert captured.captured == 3
    assert [*captured.reasons] == ["it draws random numbers on the host"]
