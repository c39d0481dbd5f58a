"""`AutoLigerKernelForCausalLM` and the `apply_liger_kernel_to_*` functions."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import liger_trainer
from liger_trainer import AutoLigerKernelForCausalLM, apply_liger_kernel, liger_api, undo_liger_kernel
from liger_trainer.patching.binding import bound_modules
from tests.tiny_models import TINY_MODELS, tiny_batch

FAMILIES = [name.removeprefix("apply_liger_kernel_to_") for name in liger_api.FUNCTIONS]
NO_HEAD = {"fused_linear_cross_entropy": False}


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


AS_LIGER = {"linear_cross_entropy": False, "cross_entropy": False, "attention": False}
"""What these calls give: Liger has no attention."""


@pytest.mark.parametrize("family", FAMILIES)
def test_given_a_model(family):
    model = TINY_MODELS[family]()
    report = function(family)(model=model, **NO_HEAD)
    expected = apply_liger_kernel(TINY_MODELS[family](), AS_LIGER)
    assert report.applied == expected.applied
    assert not hasattr(PreTrainedModel.post_init, "__wrapped__")


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_model_those_built_later(family):
    assert function(family)(**NO_HEAD) is None
    model = TINY_MODELS[family]()
    with_model = TINY_MODELS["cohere"]()
    report = apply_liger_kernel(TINY_MODELS[family](), AS_LIGER)
    assert len(list(bound_modules(model))) == sum(row.count for row in report.applied)
    assert not list(bound_modules(with_model))
    undo_liger_kernel(family)
    assert not list(bound_modules(TINY_MODELS[family]()))


def test_signatures_are_ligers():
    assert list(inspect.signature(function("llama")).parameters) == [
        "rope",
        "cross_entropy",
        "fused_linear_cross_entropy",
        "rms_norm",
        "swiglu",
        "model",
    ]
    gemma3 = inspect.signature(function("gemma3")).parameters
    assert list(gemma3)[3:] == ["layer_norm", "rms_norm", "geglu", "model"]
    assert list(inspect.signature(function("qwen2_vl")).parameters)[3:6] == ["rms_norm", "layer_norm", "swiglu"]
    assert gemma3["cross_entropy"].default is False
    assert gemma3["rope"].default is True
    assert function("gemma3").__name__ == "apply_liger_kernel_to_gemma3"
    assert "geglu" in function("gemma3").__doc__
    for family in FAMILIES:
        assert function(family).__doc__.isprintable() or "\n" in function(family).__doc__


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
    assert not liger_api._registered


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
    model = AutoLigerKernelForCausalLM.from_pretrained(
        tmp_path, rope=False, dtype=torch.float32, cross_entropy=False, **NO_HEAD
    )
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
    TINY_MODELS["cohere"]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must be true or false"):
        AutoLigerKernelForCausalLM.from_pretrained("there/is-no-such-model", rope="yes")
    with pytest.raises(ValueError, match="CohereLayerNorm"):
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
