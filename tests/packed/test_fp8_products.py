"""`fp8_base` on a base that was published in fp8: products of its codes as they are, and what stays decoded."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from liger_trainer import apply_liger_kernel, load_packed
from liger_trainer.head import warn_once
from liger_trainer.kernels.fp8.blocks import cast_groups_reference
from liger_trainer.packed import modules
from liger_trainer.packed.modules import PackedLinear
from liger_trainer.patching.lora.fp8_base import store_base_in_fp8
from liger_trainer.trainers.checks import low_bit
from tests.accuracy import errors
from tests.calls import saved_tensors
from tests.packed.test_adapters import LINEARS, ON_EXPERTS, adapted, results
from tests.packed.test_loading import IDS, dequantised
from tests.packed.test_trainers import ADAPTERS, train
from tests.packed_checkpoints import FORMATS, write_dense, write_mixture
from tests.trainers.builders import causal, losses_and_norms
from tests.trainers.tiny import tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")
IN_BLOCKS = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}  # multiples of 128, keys and values too
IN_FP8 = "fp8 (e4m3), as it was published"


class OfRounded(torch.autograd.Function):
    """The product of an input and of a gradient that are rounded to e4m3 with a decoded weight, in bf16."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return (rounded(x) @ weight.T).bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return (rounded(dy) @ ctx.weight).bfloat16().to(dy.dtype), None


def rounded(x):
    """In groups of 128 columns; in float32."""
    rows = x.reshape(-1, x.shape[-1])
    codes, scales = cast_groups_reference(rows)
    return (codes.float() * scales.repeat_interleave(128, 1))[: len(rows)].view(x.shape)


class RoundedLinear(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weight = nn.Parameter(layer.decoded(torch.float32), requires_grad=False)  # PEFT looks at a `weight`

    def forward(self, x):
        return OfRounded.apply(x, self.weight)


def emulated(model):
    """A copy of an unpatched `model` whose layers in fp8 are computed in plain torch."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, PackedLinear) and child.in_fp8:
                setattr(module, name, RoundedLinear(child))
    return model


def counts(rows):
    return {row.kernel or row.reason: row.count for row in rows}


def flat(found):
    """Logits, and all gradients as one."""
    _, logits, gradients = found
    return [logits, torch.cat([each.flatten() for _, each in sorted(gradients.items())])]


def loaded(folder, name, **sizes):
    """A packed model with adapters, and the dequantised one, neither patched, in float32."""
    meant = write_dense(folder, name, **sizes)
    packed = load_packed(str(folder), dtype=torch.float32)
    return [adapted(each, False, **LINEARS)[0] for each in (packed, dequantised(packed, meant))]


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 ue8m0"])
def test_blocks_multiply_as_they_are(name, tmp_path):
    packed, plain = loaded(tmp_path, name, **IN_BLOCKS)
    assert counts(store_base_in_fp8(packed, CPU)) == {IN_FP8: 14}
    expected, exact = flat(results(emulated(packed))), flat(results(plain.double()))
    of_products = errors(expected, exact)  # what rounding inputs and gradients to e4m3 explains
    assert all(error > 0.005 for error in of_products)
    assert all(
        error < 0.05 * explained for error, explained in zip(errors(flat(results(packed)), expected), of_products)
    )
    packed.zero_grad()
    report = apply_liger_kernel(packed)
    assert [row.kernel for row in report if row.target == "lora.Linear"] == [
        "lora_linear (packed FP8, products in fp8)"
    ]
    ours = flat(results(packed))
    for error, explained in zip(errors(ours, exact), of_products):
        assert error < 2 * explained


def test_as_many_bytes_are_saved_as_by_a_decoded_base(tmp_path):
    packed, _ = loaded(tmp_path, "fp8 blocks", **IN_BLOCKS)
    apply_liger_kernel(packed)
    kept = []
    for in_fp8 in (False, True):
        if in_fp8:
            store_base_in_fp8(packed, CPU)
        with saved_tensors() as saved:
            packed(input_ids=IDS, labels=IDS)
        kept.append(
            sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in saved}.values())
        )
    assert kept[0] == kept[1]


IN_BLOCKS_OF, OF_ROWS = ["fp8 blocks", "fp8 ue8m0"], ["fp8 rows", "fp8 tensor", "modelopt fp8"]


@pytest.mark.parametrize("name", [*IN_BLOCKS_OF, *OF_ROWS])
def test_a_layer_is_as_near_as_its_rounded_input(name, tmp_path):
    """A product and its gradient, against float64 on the decoded weight: what e4m3 with three bits explains."""
    packed, _ = loaded(tmp_path, name, **IN_BLOCKS)
    assert counts(store_base_in_fp8(packed, CPU)) == {IN_FP8: 14}
    apply_liger_kernel(packed)
    for layer in (module for module in packed.modules() if isinstance(module, PackedLinear)):
        x, dy = torch.randn(64, layer.in_features, requires_grad=True), torch.randn(64, layer.out_features)
        y, weight = layer(x), layer.decoded(torch.float32).double()
        y.backward(dy)
        for error in errors([y, x.grad], [x.double() @ weight.T, dy.double() @ weight]):
            assert 0.008 < error < 0.1
    results(packed)


def test_what_blocks_do_not_divide_stays_decoded(tmp_path):
    packed, plain = loaded(tmp_path, "fp8 blocks")  # those of attention have one block, and so one scale
    decoded = "decoded for its products; the sizes must be multiples of 128"
    rows = counts(store_base_in_fp8(packed, CPU))
    assert rows == {
        IN_FP8: 8,
        f"its weight is (192, 128), {decoded}": 4,
        f"its weight is (128, 192), {decoded}": 2,
    }
    assert all(error < 0.5 for error in errors(flat(results(packed)), flat(results(plain))))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "int4", "gptq"])
def test_other_formats_stay_decoded(name, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(warn_once, "_said", set())
    packed, plain = loaded(tmp_path, name)
    with caplog.at_level(logging.WARNING):
        (row,) = store_base_in_fp8(packed, CPU)
    assert (row.kernel, row.count) == (None, 14)
    assert row.reason.endswith("is decoded for its products")
    assert "no linear layer of LlamaForCausalLM can multiply in fp8: packed" in caplog.text
    assert max(errors(flat(results(packed)), flat(results(plain)))) < 1e-5


def test_other_devices_decode(tmp_path, monkeypatch):
    packed, _ = loaded(tmp_path, "fp8 blocks", **IN_BLOCKS)
    monkeypatch.setattr(modules, "obstacle_to_blocks", lambda device: "torch refuses them")
    assert counts(store_base_in_fp8(packed, CPU)) == {"torch refuses them; it is decoded for its products": 14}
    monkeypatch.setattr(modules, "has_fp8", lambda device: False)
    reason = "cpu has no products in fp8, which NVIDIA's Hopper and newer have; it is decoded"
    assert counts(store_base_in_fp8(packed, CPU)) == {reason: 14}


def test_experts_and_what_was_published_in_16_bits_stay(tmp_path):
    write_mixture(tmp_path)
    model, _ = adapted(load_packed(str(tmp_path), dtype=torch.float32), False, **ON_EXPERTS)
    layers = model.get_base_model().model.layers
    layers[0].self_attn.q_proj.base_layer = nn.Linear(128, 128, bias=False).requires_grad_(False)
    rows = counts(store_base_in_fp8(model, CPU))
    assert rows["stacked weights of experts are decoded for their products"] == 4
    assert rows["it was published in 16 bits"] == 1
    assert rows[IN_FP8] == 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("blocks")
    write_dense(path, "fp8 blocks", **IN_BLOCKS)
    tokenizer().save_pretrained(path)
    return path


def test_a_trainer_trains_on_it(folder, tmp_path):
    options = {"dtype": "bfloat16", "bf16": True, "gradient_checkpointing": True, "packed_base": True, "steps": 3}
    ours, decoded = (train("SFT", folder, tmp_path / str(fp8), fp8_base=fp8, **options) for fp8 in (True, False))
    (row,) = (row for row in ours.kernel_report if row.component == "fp8_base")
    assert (row.kernel, row.count) == (IN_FP8, 14)
    assert losses_and_norms(ours) != losses_and_norms(decoded)
    assert losses_and_norms(ours)[::2] == pytest.approx(losses_and_norms(decoded)[::2], rel=2e-2)
    with pytest.raises(RuntimeError, match="cannot be merged into a packed base"):
        ours.model.merge_adapter()
    ours.model.get_base_model().save_pretrained(tmp_path / "base")  # what was published


def test_a_model_of_one_s_own_in_a_trainer(folder, tmp_path):
    model = get_peft_model(load_packed(str(folder), dtype="auto"), LoraConfig(target_modules="all-linear", **ADAPTERS))
    trainer = causal(tmp_path, model, bf16=True, fp8_base=True, max_steps=1)
    trainer.train()
    assert all(module.in_fp8 for module in model.modules() if isinstance(module, PackedLinear))


def test_a_device_without_fp8_is_no_error(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(low_bit, "has_fp8", lambda device: False)
    monkeypatch.setattr(modules, "has_fp8", lambda device: False)
    trainer = train("SFT", folder, tmp_path, "bfloat16", 1, fp8_base=True, packed_base=True)
    (row,) = (row for row in trainer.kernel_report if row.component == "fp8_base")
    assert (row.kernel, row.count) == (None, 14)


def test_every_format_is_known_here():
    in_fp8 = {*IN_BLOCKS_OF, *OF_ROWS}
    assert {name for name in FORMATS if "fp8" in name} - {"mxfp8"} == in_fp8
