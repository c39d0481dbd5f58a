"""LoRA on quantised bases: in 4 bits ours is PEFT's own in values and gradients; on others PEFT's forward runs."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.kernels.lowbit import buffers
from tests.patching.comparisons import loss_and_gradients
from tests.patching.test_lora import LORA, apply_unchanged, assert_same
from tests.quantised import library, quantise
from tests.tiny_models import TINY_MODELS, tiny_batch

# bitsandbytes' CPU code wants rows of whole blocks of 64.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "phi3")


@pytest.fixture(autouse=True)
def installed():
    library()
    buffers.free_buffers()


def adapted(family="llama", kind="nf4", dtype=torch.float32, lora=None, **options):
    model = quantise(TINY_MODELS[family](**SIZES).to(dtype), kind, **options)
    torch.manual_seed(0)
    config = LoraConfig(**{"target_modules": "all-linear", "init_lora_weights": False, **(lora or {})})
    return get_peft_model(model, config).train(), tiny_batch(family, model)


def lora_row(report):
    """The one of the layers; attentions have their own."""
    (row,) = (row for row in report if row.target.startswith("lora."))
    return row


@pytest.mark.parametrize("config", [LORA, {}], ids=["layers", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_in_4_bits(fused, family, config):
    model, batch = adapted(family, lora={"lora_dropout": 0.1})
    expected = loss_and_gradients(model, batch)
    report = apply_liger_kernel(model, config)
    row = lora_row(report)
    assert (row.target, row.kernel) == ("lora.Linear4bit", "lora_linear (4 bits)")
    assert all(row.applied or row.reason.startswith("switched off") for row in report)
    assert_same(loss_and_gradients(model, batch), expected)
    assert (2 in fused) == (config != LORA and family != "phi3")  # gate and up
    assert (3 in fused) == (family != "phi3")  # queries, keys and values
    revert_liger_kernel(model)
    fused.clear()
    assert_same(loss_and_gradients(model, batch), expected)
    assert fused == []


@pytest.mark.parametrize(
    "options",
    [{"compress_statistics": False}, {"blocksize": 128}, {"quant_storage": torch.bfloat16}, {"kind": "fp4"}],
    ids=str,
)
def test_other_layouts(fused, options):
    sizes = {"target_modules": ["down_proj"]} if "blocksize" in options else {}  # of 128 columns
    model, batch = adapted(**options, lora=sizes)
    if "blocksize" in options:
        assert model.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight.quant_state.blocksize == 128
    expected = loss_and_gradients(model, batch)
    assert lora_row(apply_liger_kernel(model, LORA)).applied
    assert_same(loss_and_gradients(model, batch), expected)
    assert fused


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["up_proj"], ["down_proj"], ["gate_proj", "down_proj"]])
def test_adapters_on_some_layers_beside_others_in_4_bits(targets):
    model, batch = adapted(lora={"target_modules": targets})
    apply_unchanged(model, batch)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_as_exact(fused, autocast):
    """Under autocast as PEFT; without, PEFT multiplies its fp32 adapters with an fp32 copy, and ours does not."""
    model, batch = adapted(dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.05)
    exact = copy.deepcopy(model).float()
    for module in exact.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.float32
    truth = loss_and_gradients(exact, batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss_and_gradients(model, batch)
    apply_liger_kernel(model, LORA)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = loss_and_gradients(model, batch)
    assert fused

    def error(results):
        names = [name for name in truth if name != "loss"]
        return sum(float((results[name] - truth[name]).norm() / truth[name].norm()) for name in names) / len(names)

    assert got.keys() == expected.keys()
    assert error(got) <= 1.5 * error(expected)


def test_another_compute_dtype_is_the_layer_s_business(fused):
    """Products in fp32 of activations in bf16, which is bitsandbytes' default."""
    model, batch = adapted(dtype=torch.bfloat16, compute_dtype=torch.float32)
    apply_unchanged(model, batch, LORA)
    assert fused == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    model, batch = adapted(lora={"lora_dropout": 0.1})
    model.enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    apply_unchanged(model, batch)


def test_compiled_in_one_graph(fused):
    """`__torch_function__` of bitsandbytes' weights sends torch.compile into a recursion without an end."""
    model, batch = adapted(quant_storage=torch.bfloat16)
    expected = loss_and_gradients(model, batch)
    apply_liger_kernel(model, LORA)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = compiled(**batch).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same({"loss": loss.detach(), **gradients}, expected)
    assert fused


def test_no_dequantised_base_is_saved_and_the_buffer_goes_with_the_model():
    model, batch = adapted()
    apply_liger_kernel(model)
    largest, saved = SIZES["hidden_size"] * SIZES["intermediate_size"], []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor):
        loss = model(**batch).loss
    loss.backward()
    (buffer,) = buffers._buffers.values()
    assert buffer.memory.numel() == largest
    assert largest not in saved  # which activations and adapters do not have either
    del model, loss, buffer
    gc.collect()
    assert not buffers._buffers


def test_a_generation_s_steps_run_bitsandbytes_own_products(fused):
    model, _ = adapted()
    apply_liger_kernel(model, LORA)
    few, many = (torch.randint(3, 100, (1, length)) for length in (4, 100))
    with torch.no_grad():
        model(few)
        assert fused == []
        model(many)
    assert fused
    fused.clear()
    model(few)
    assert fused


def test_merged_disabled_and_hooked(fused):
    model, batch = adapted()
    apply_liger_kernel(model, LORA)
    proj, seen = model.base_model.model.model.layers[0].self_attn.o_proj, []
    with model.disable_adapter():
        model(**batch)
    assert fused == []
    handle = proj.base_layer.register_forward_hook(lambda *_: seen.append(1))
    model(**batch)
    assert (seen, len(fused)) == ([1], 2 * 5 - 1)  # in two layers q with k and v, o, gate, up and down; but for one o
    handle.remove()
    with pytest.warns(UserWarning, match="4-bit"):
        model.merge_adapter()
    fused.clear()
    model(**batch)
    assert fused == []


def test_a_state_that_a_copy_of_the_weight_lost(fused):
    """FSDP puts plain tensors in the place of the parameters; the layer knows the state."""
    model, batch = adapted()
    expected = loss_and_gradients(model, batch)
    apply_liger_kernel(model, LORA)
    for module in model.modules():
        if type(module).__name__ == "Linear4bit" and type(module).__module__.startswith("bitsandbytes"):
            module._parameters["weight"] = nn.Parameter(module.weight.data.as_subclass(torch.Tensor), False)
    assert_same(loss_and_gradients(model, batch), expected)
    assert fused


def test_a_layout_that_is_not_the_one_we_know(monkeypatch):
    model, _ = adapted(lora={"target_modules": ["q_proj"]})
    functions = library().functional
    native = functions.dequantize_4bit
    monkeypatch.setattr(functions, "dequantize_4bit", lambda *args, **kwargs: native(*args, **kwargs) * 2)
    row = lora_row(apply_liger_kernel(model, LORA))
    assert not row.applied
    assert "stores its 4 bits in another way" in row.reason


# ---------------------------------------------------------------------------------------------------------------------
# Other bases, and none
# ---------------------------------------------------------------------------------------------------------------------


def rest_is_applied(report):
    return {row.component for row in report.applied} >= {"rms_norm", "rope", "swiglu", "linear_cross_entropy"}


def test_int8_trains_with_peft_s_forward(fused):
    model, batch = adapted(kind="int8")
    expected = loss_and_gradients(model, batch)
    report = apply_liger_kernel(model)
    row = lora_row(report)
    assert (row.applied, row.target) == (False, "lora.Linear8bitLt")
    assert "PEFT's own forward runs" in row.reason
    assert rest_is_applied(report)
    assert_same(loss_and_gradients(model, batch), expected)
    assert fused == []


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_torchao_trains_with_peft_s_forward(fused, config):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = TINY_MODELS["llama"](**SIZES)
    only = {"filter_fn": lambda module, name: isinstance(module, nn.Linear) and name != "lm_head"}
    options = {"weight_dtype": torch.int4} if config.startswith("Intx") else {}
    quantization.quantize_(model, getattr(quantization, config)(**options), **only)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False)).train()
    batch = tiny_batch("llama", model)
    expected = loss_and_gradients(model, batch)
    report = apply_liger_kernel(model)
    row = lora_row(report)
    assert (row.applied, row.target) == (False, "lora.TorchaoLoraLinear")
    assert rest_is_applied(report)
    assert_same(loss_and_gradients(model, batch), expected)
    assert fused == []


@pytest.mark.parametrize("config", [{}, {"recompute_mlp": False}, {"tiled_mlp": True}], ids=str)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_a_quantised_model_without_adapters(family, kind, config):
    """Layers' kernels read no weight but through its module; here the embedding and the norms are trained."""
    model = quantise(TINY_MODELS[family](**SIZES), kind)
    batch = tiny_batch(family, model)
    model.get_input_embeddings().weight.requires_grad_(True)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(True)
    expected = loss_and_gradients(model.train(), batch)
    report = apply_liger_kernel(model, config)
    assert {row.component for row in report.applied} >= {"rms_norm", "rope", "linear_cross_entropy"}
    assert {"swiglu", "geglu"} & {row.component for row in report.applied}
    assert_same(loss_and_gradients(model, batch), expected)


def test_what_drops_runs_alike_with_and_without_a_gradient(fused, monkeypatch):
    """A reentrant checkpoint and tiles run their forward without one, and draw the masks again in the backward."""
    drawn, native = [], torch.native_dropout
    monkeypatch.setattr(torch, "native_dropout", lambda x, *rest: drawn.append(x.dtype) or native(x, *rest))
    model, batch = adapted(dtype=torch.bfloat16, lora={"lora_dropout": 0.3})
    apply_liger_kernel(model)
    assert batch["input_ids"].numel() <= 64
    with torch.no_grad():
        model(**batch)
    forward, calls = drawn.copy(), fused.copy()
    drawn.clear(), fused.clear()
    model(**batch)
    assert drawn == forward == [torch.bfloat16] * 14
    assert fused == calls
    fused.clear()
    with torch.no_grad():
        model.eval()(**batch)
    assert not fused, "a generation reads the 4 bits directly"
