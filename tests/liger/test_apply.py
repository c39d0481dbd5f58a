"""`AutoLigerKernelForCausalLM` and the `apply_liger_kernel_to_*` functions."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import liger_trainer
from liger_trainer import AutoLigerKernelForCausalLM, apply_liger_kernel, undo_liger_kernel
from liger_trainer.liger import apply as liger_apply
from liger_trainer.patching.binding import bound_modules
from tests.liger.signatures import written
from tests.tiny_models import COMMON, TINY_MODELS, tiny_batch

FAMILIES = [family for family in TINY_MODELS if family in liger_apply.ROWS]
NO_HEAD = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def function(family):
    return getattr(liger_trainer, f"apply_liger_kernel_to_{family}")


def components(model) -> set[str]:
    return {type(module).__name__ for module in bound_modules(model)}


@pytest.fixture(autouse=True)
def undone():
    yield
    undo_liger_kernel()
    assert PreTrainedModel.post_init.__module__ == "transformers.modeling_utils"
    assert not hasattr(PreTrainedModel.post_init, "__wrapped__")


WITHOUT_EXPERTS = dict.fromkeys(("swiglu", "experts", "router", "load_balancing_loss"), False)
LIGER_LEAVES = {
    "glm4": {"rope": False},
    "gpt_oss": WITHOUT_EXPERTS,
    "qwen3_5_moe": dict.fromkeys(("rope", "recurrence", "layer_norm"), False),
}
"""What Liger's functions leave alone by default, beside attention, which Liger does not have."""


def as_liger(family):
    return dict.fromkeys(("linear_cross_entropy", "cross_entropy", "attention"), False) | LIGER_LEAVES.get(family, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_given_a_model(family):
    model = TINY_MODELS[family]()
    report = function(family)(model=model, **NO_HEAD)
    expected = apply_liger_kernel(TINY_MODELS[family](), as_liger(family))
    assert report.applied == expected.applied
    assert not hasattr(PreTrainedModel.post_init, "__wrapped__")


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_model_those_built_later(family):
    assert function(family)(**NO_HEAD) is None
    model = TINY_MODELS[family]()
    with_model = TINY_MODELS["cohere"]()
    report = apply_liger_kernel(TINY_MODELS[family](), as_liger(family))
    assert len(list(bound_modules(model))) == sum(row.count for row in report.applied)
    assert not list(bound_modules(with_model))
    undo_liger_kernel(family)
    assert not list(bound_modules(TINY_MODELS[family]()))


RECORDED = json.loads((pathlib.Path(__file__).parents[1] / "peers" / "liger_signatures.json").read_text())
FUNCTIONS = RECORDED["signatures"]["liger_kernel.transformers.monkey_patch"]


def test_every_function_of_ligers_and_no_other():
    assert {*liger_apply.FUNCTIONS, "_apply_liger_kernel", "_apply_liger_kernel_to_instance"} == FUNCTIONS.keys()
    names = {key: value.__name__ for key, value in liger_apply.MODEL_TYPE_TO_APPLY_LIGER_FN.items()}
    assert names == RECORDED["model_types"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_ligers(name):
    assert written(getattr(liger_apply, name)) == FUNCTIONS[name]
    assert getattr(liger_apply, name).__name__ == name
    assert getattr(liger_apply, name).__doc__


def test_documented_defaults():
    assert "all are on but `fused_linear_cross_entropy`, as" in function("granite").__doc__
    assert "all are on but `rope` and `cross_entropy`, as" in function("glm4").__doc__
    assert "Further keywords: rope, rms_norm, swiglu, geglu;" in function("llava").__doc__


@pytest.mark.parametrize("flags", [{}, dict.fromkeys(("rope", "rms_norm", "swiglu"))], ids=["left out", "None"])
def test_none_is_the_default(flags):
    model = TINY_MODELS["glm4"]()
    function("glm4")(model=model, **flags, **NO_HEAD)
    assert components(model) == {"Glm4RMSNorm", "Glm4MLP"}  # and no rotation, which is off by default
    with pytest.raises(ValueError, match="'rope'"):
        function("glm4")(rope="no")


def test_granite_gets_cross_entropy_on_its_logits():
    fused = {row.component for row in function("llama")(model=TINY_MODELS["llama"]()).applied}
    granite = {row.component for row in function("granite")(model=TINY_MODELS["granite"]()).applied}
    assert "linear_cross_entropy" in fused
    assert "cross_entropy" in granite
    assert "linear_cross_entropy" not in granite


TINY_TEXT = {**COMMON, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8}
TINY_VISION = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
TINY_VISION |= {"num_attention_heads": 2, "head_dim": 8, "image_size": 16, "patch_size": 8}
DEEPSEEK = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
DEEPSEEK |= {"topk_group": 1, "first_k_dense_replace": 1}
NEW = {  # the sizes of a model, and which of its modules change with the flags of Liger's defaults
    "smollm3": (TINY_TEXT, {"SmolLM3RMSNorm", "SmolLM3MLP", "SmolLM3Attention"}),
    "olmo3": (TINY_TEXT, {"Olmo3RMSNorm", "Olmo3MLP", "Olmo3Attention"}),
    "exaone4": (TINY_TEXT, {"Exaone4RMSNorm", "Exaone4MLP", "Exaone4Attention"}),
    "nemotron": (TINY_TEXT, {"NemotronMLP"}),
    "deepseek_v3": (
        {**TINY_TEXT, **DEEPSEEK, "num_key_value_heads": 4, "head_dim": 4},
        {"DeepseekV3RMSNorm", "DeepseekV3MLP", "DeepseekV3Experts", "DeepseekV3TopkRouter"},
    ),
    "llava": (
        {"text_config": {"model_type": "llama", **TINY_TEXT}, "vision_config": TINY_VISION, "image_token_index": 120},
        {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "PixtralRMSNorm", "PixtralMLP", "PixtralAttention"},
    ),
}


def new_model(model_type):
    config = AutoConfig.for_model(model_type, **NEW[model_type][0])
    return (AutoModelForImageTextToText if model_type == "llava" else AutoModelForCausalLM).from_config(config)


@pytest.mark.parametrize("model_type", NEW)
def test_models_of_new_functions(model_type):
    model = new_model(model_type)
    ids = torch.arange(8).reshape(1, 8) + 3
    expected = model(input_ids=ids, labels=ids).loss
    liger_apply._apply_liger_kernel_to_instance(model=model, **NO_HEAD)
    assert components(model) == NEW[model_type][1]
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)


def test_keywords_of_functions_that_take_any(caplog):
    model = new_model("llava")
    function("llava")(model=model, rope=False, swiglu=None, layer_norms=True, **NO_HEAD)
    assert components(model) == {"LlamaRMSNorm", "LlamaMLP", "PixtralRMSNorm", "PixtralMLP"}
    assert "apply_liger_kernel_to_llava has no use for layer_norms" in caplog.text


def test_by_model_type(caplog):
    caplog.set_level("INFO", logger="liger_trainer")
    liger_apply._apply_liger_kernel("llama", rms_norm=False, geglu=True, **NO_HEAD)
    assert components(TINY_MODELS["llama"]()) == {"LlamaMLP", "LlamaAttention"}
    undo_liger_kernel()
    for unknown in ("cohere", "", None):
        liger_apply._apply_liger_kernel(unknown, rope=True)
        assert repr(unknown) in caplog.text
    assert not liger_apply._registered


def test_one_model_by_its_type(caplog):
    caplog.set_level("INFO", logger="liger_trainer")
    model = TINY_MODELS["gemma"]()
    liger_apply._apply_liger_kernel_to_instance(model=model, rope=False, swiglu=True, **NO_HEAD)
    assert components(model) == {"GemmaRMSNorm", "GemmaMLP"}
    other = TINY_MODELS["cohere"]()
    liger_apply._apply_liger_kernel_to_instance(other, rope=True)
    liger_apply._apply_liger_kernel_to_instance(torch.nn.Linear(2, 2))
    assert not components(other)
    assert "'cohere'" in caplog.text
    assert "None" in caplog.text


def test_flags_are_obeyed():
    model = TINY_MODELS["llama"]()
    function("llama")(False, False, False, True, False, model)
    assert components(model) == {"LlamaRMSNorm"}
    with pytest.raises(TypeError, match="geglu"):
        function("llama")(geglu=True)


def test_wrong_model():
    with pytest.raises(ValueError, match="apply_liger_kernel_to_qwen2, or apply_liger_kernel"):
        function("llama")(model=TINY_MODELS["qwen2"]())
    with pytest.raises(ValueError, match="Use apply_liger_kernel, which takes any model"):
        function("llama")(model=torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module"):
        function("llama")(model="meta-llama/Llama-3.1-8B")
    assert not liger_apply._registered


def test_peft_model():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(TINY_MODELS["llama"](), LoraConfig(target_modules=["q_proj"]))
    assert function("llama")(model=model, **NO_HEAD).applied


def test_undo_one_of_two():
    function("llama")(**NO_HEAD)
    function("qwen3")(**NO_HEAD)
    undo_liger_kernel("llama")
    assert not list(bound_modules(TINY_MODELS["llama"]()))
    assert list(bound_modules(TINY_MODELS["qwen3"]()))
    with pytest.raises(ValueError, match="'lama'"):
        undo_liger_kernel("lama")


def test_a_hook_wrapped_by_somebody_else_stays_and_does_nothing():
    original = PreTrainedModel.post_init
    function("llama")(**NO_HEAD)
    ours = PreTrainedModel.post_init

    def theirs(self):
        ours(self)

    PreTrainedModel.post_init = theirs
    try:
        undo_liger_kernel()
        assert PreTrainedModel.post_init is theirs
        assert not list(bound_modules(TINY_MODELS["llama"]()))
        function("llama")(**NO_HEAD)
        assert list(bound_modules(TINY_MODELS["llama"]()))
    finally:
        PreTrainedModel.post_init = ours
        undo_liger_kernel()
    assert PreTrainedModel.post_init is original


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_from_pretrained_while_registered(family, tmp_path):
    plain = TINY_MODELS[family]().eval()
    batch = tiny_batch(family, plain)
    expected = plain(**batch).loss
    plain.save_pretrained(tmp_path)
    function(family)(**NO_HEAD)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert list(bound_modules(model))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (family == "gemma2")
    torch.testing.assert_close(model(**batch).loss, expected)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert components(half) == components(model)
    undo_liger_kernel()
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert not list(bound_modules(again))
    torch.testing.assert_close(again(**batch).loss, expected)


def test_auto_model(tmp_path):
    plain = TINY_MODELS["llama"]().eval()
    plain.save_pretrained(tmp_path)
    model = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, rope=False, dtype=torch.float32, **NO_HEAD)
    assert components(model) == {"LlamaRMSNorm", "LlamaMLP"}
    batch = tiny_batch("llama", plain)
    torch.testing.assert_close(model(**batch).loss, plain(**batch).loss)
    model, info = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert "LlamaAttention" in components(model)
    built = AutoLigerKernelForCausalLM.from_config(plain.config, swiglu=False, **NO_HEAD)
    assert "LlamaMLP" not in components(built)
    assert "LlamaRMSNorm" in components(built)


def test_auto_model_refuses_before_loading(tmp_path):
    config = AutoConfig.for_model("nemotron", **TINY_TEXT)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must be true or false"):
        AutoLigerKernelForCausalLM.from_pretrained("there/is-no-such-model", rope="yes")
    with pytest.raises(ValueError, match="NemotronLayerNorm1P"):
        AutoLigerKernelForCausalLM.from_pretrained(tmp_path, strict=True)


def test_auto_model_does_not_trust_remote_code(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        classmethod(lambda cls, *args, **kw: seen.update(kw) or TINY_MODELS["llama"]()),
    )
    AutoLigerKernelForCausalLM.from_pretrained("somebody/model", rms_norm=False, revision="main")
    assert seen == {"revision": "main"}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"use_token_scaling": True},
        {"label_smoothing": 0.1},
        {"lse_square_scale": 1e-4},
        {"ce_weight": torch.ones(8)},
        {"return_predicted_tokens": True, "return_token_accuracy": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_ligers_loss_are_refused_by_name(options, training):
    """Hugging Face's loss takes any keyword and drops it, so the loss would be another than the caller asked for."""
    model = TINY_MODELS["llama"]().train(training)
    function("llama")(model=model)
    inputs = tiny_batch("llama", model)
    with pytest.raises(ValueError, match=", ".join(f"`{name}`" for name in options)):
        model(**inputs, **options)
    off = {name: None if isinstance(value, torch.Tensor) else type(value)() for name, value in options.items()}
    assert torch.equal(model(**inputs, **off).loss, model(**inputs).loss)


@pytest.mark.parametrize("by_name", [True, False])
def test_an_option_of_the_users_own_loss_is_not_refused(by_name):
    model = TINY_MODELS["llama"]()
    function("llama")(model=model)
    if by_name:
        loss = lambda logits, labels, vocab_size, label_smoothing, **kwargs: torch.tensor(label_smoothing)  # noqa: E731
    else:
        loss = lambda logits, labels, vocab_size, **kwargs: torch.tensor(kwargs["label_smoothing"])  # noqa: E731
    model.loss_function = loss
    assert model(**tiny_batch("llama", model), label_smoothing=0.5).loss == 0.5
