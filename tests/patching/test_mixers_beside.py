"""Hybrid models beside adapters, quantised bases, MLPs in tiles, fp8, and the compiler."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.utils import counters

from liger_trainer import apply_liger_kernel
from liger_trainer.patching import fp8, mlps
from liger_trainer.patching.recurrent.documents import carry_documents
from liger_trainer.tiling.tiled_mlp import tiled_mlp
from tests.patching import comparisons
from tests.patching.comparisons import LAYERS
from tests.patching.mixing_models import ROWS, built, mixers
from tests.patching.test_mixers import LENGTHS, batch_of, packed
from tests.quantised import library, quantise

NAMES = ("qwen3_5_text", "nemotron_h", "lfm2")
models = pytest.mark.parametrize("name", NAMES)
REFUSED_BY_PEFT = {"nemotron_h": ("out_proj",)}  # by the name of the model
# bitsandbytes' CPU code wants rows of whole blocks of 64.
WIDE = {
    "qwen3_5_text": {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16},
    "nemotron_h": {"head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16},
    "lfm2": {"block_ff_dim": 128, "block_auto_adjust_ff_dim": False},
}
SIZES = {"hidden_size": 64, "intermediate_size": 128}


def linears(model):
    """The names of the decoder's linear layers that PEFT adapts."""
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"}
    refused = REFUSED_BY_PEFT.get(model.config.model_type, ())
    return sorted(name for name in names if name.rpartition(".")[2] not in refused)


def adapted(model, **options):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=linears(model), init_lora_weights=False, **options)
    return get_peft_model(model, config).train()


def assert_unchanged(model, batch, config=None, **tolerances):
    """The report of kernels that change no loss and no gradient, with the layers that mix tokens among them."""
    report = comparisons.apply_unchanged(model, batch, config, **tolerances)
    target, *_ = ROWS[model.config.model_type]
    assert any(row.target == target for row in report.applied)
    return report


@models
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_adapters_on_every_layer(name, reentrant):
    model = adapted(built(name))
    if reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    trained = {path for path, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * len(linears(built(name)))
    report = assert_unchanged(model, batch_of("left"), floor=5e-8)
    assert sum(row.count for row in report.applied if row.target == "lora.Linear") == len(trained) // 2
    assert trained == comparisons.loss_and_gradients(model, batch_of("left")).keys() - {"loss"}


@models
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_bases_in_4_bits(name, reentrant):
    library()
    model = adapted(quantise(built(name, **SIZES, **WIDE[name]), "nf4"))
    if reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    report = assert_unchanged(model, batch_of("right"), floor=5e-8)
    (row,) = (row for row in report if row.target == "lora.Linear4bit")
    assert row.kernel == "lora_linear (4 bits)"


@models
@pytest.mark.parametrize("adapters", [False, True])
def test_mlps_in_tiles(name, adapters, monkeypatch):
    tiles = []

    def several(forward, module, x, _):
        tiles.append(3)
        return tiled_mlp(forward, module, x, 3)

    monkeypatch.setattr(mlps, "tiled_mlp", several)
    model = built(name)
    model = adapted(model) if adapters else model.train()
    assert_unchanged(model, batch_of("left"), {**LAYERS, "tiled_mlp": True}, floor=5e-8)
    assert bool(tiles) == (name != "nemotron_h")  # whose MLPs have no gate


@models
@pytest.mark.parametrize("mode", ["rowwise", "rowwise_gw_hp", "tensorwise"])
def test_projections_multiply_in_fp8(name, mode, monkeypatch):
    monkeypatch.setattr(fp8, "LEAST_ROWS", 32)
    monkeypatch.setattr(fp8, "LEAST_FEATURES", 32)
    exact, batch = built(name, **SIZES, **WIDE[name]).bfloat16().float(), batch_of()
    truth = comparisons.loss_and_gradients(exact, batch)
    errors = []
    for ours in (False, True):
        model = copy.deepcopy(exact).bfloat16().train()
        kernels = {"fp8": mode, "fp8_all_layers": True, "recurrence": ours, "short_conv": ours}
        report = apply_liger_kernel(model, kernels)
        assert any(row.target == ROWS[name][0] for row in report.applied) == ours
        places = {path for path, module in model.named_modules() if type(module).__name__ == ROWS[name][0]}
        in_fp8 = {path.rpartition(".")[0] for path, module in model.named_modules() if fp8.mode_of(module)}
        assert places & in_fp8
        got = comparisons.loss_and_gradients(model, batch)
        assert got.keys() == truth.keys()
        errors.append(comparisons.total_error(truth, got))
    assert 0.02 < errors[1] < 1.3 * errors[0]


# ---------------------------------------------------------------------------------------------------------------------
# The compiler
# ---------------------------------------------------------------------------------------------------------------------


def compiled_loss_and_gradients(model, batch, **options):
    torch.compiler.reset()
    counters.clear()
    model.zero_grad(set_to_none=True)
    loss = torch.compile(model, backend="aot_eager", **options)(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("name", "kind", "head"),
    [
        ("qwen3_5_text", "left", {}),
        ("qwen3_5_text", "numbers", LAYERS),
        ("nemotron_h", "offsets", {}),
        ("lfm2", "positions", {}),
        ("lfm2", "positions", LAYERS),
    ],
    ids=lambda value: value if isinstance(value, str) else "native head" if value else "",
)
def test_compiled(name, kind, head):
    """Documents of a packed row begin anew in compiled layers too."""
    model = built(name).train()
    batch = batch_of("left")
    if kind != "left":
        ids = torch.randint(3, 120, (1, sum(LENGTHS)))
        batch = {"input_ids": ids, "labels": ids, "use_cache": False, **packed(kind)}
    whole = model(**{key: batch[key] for key in ("input_ids", "labels", "use_cache")}).loss.detach()
    apply_liger_kernel(model, head)
    expected = comparisons.loss_and_gradients(model, batch)
    comparisons.assert_same(compiled_loss_and_gradients(model, batch), expected, floor=5e-8)
    assert counters["stats"]["calls_captured"] > 40
    if kind != "left":
        assert abs(whole - expected["loss"]) > 1e-4, "nothing would leak"


@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_takes_one_document_a_row():
    """It cannot read where documents begin, so several fail."""
    model = built("lfm2").eval()
    carry_documents(model, mixers(model))  # of the stock layers: in plain torch, ours are no single graph
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = torch.randint(3, 120, (1, sum(LENGTHS)))
    options = {"use_cache": False}
    with torch.no_grad():
        for more in ({}, {"position_ids": torch.arange(sum(LENGTHS))[None] + 3}):
            torch.testing.assert_close(compiled(ids, **more, **options).logits, model(ids, **more, **options).logits)
        with pytest.raises(RuntimeError, match="`position_ids` begin anew inside of a row"):
            compiled(ids, **packed("positions"), **options)
        with pytest.raises(Exception, match="`seq_idx` is given in a graph that may not break"):
            compiled(ids, seq_idx=packed("numbers")["seq_idx"], **options)
