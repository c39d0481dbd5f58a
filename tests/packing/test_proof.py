"""Which models are proved to compute the same for packed rows, which are refused, and faults that the proof sees."""

from __future__ import annotations

import functools
import inspect
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaForCausalLM,
)
from transformers.models.lfm2 import modeling_lfm2

from liger_trainer.attention.interface import NAME
from liger_trainer.kernels.documents import documents_of
from liger_trainer.packing import packed_row, proof
from liger_trainer.packing.layout import Layout
from liger_trainer.packing.packed_row import PackedRow
from liger_trainer.packing.proof import TOLERANCE, prove_packing, small_config
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.patching.binding import unbind_forward
from liger_trainer.patching.probe import Probe
from liger_trainer.patching.recurrent import proof as proof_of_mixers
from liger_trainer.patching.trial import Agreement, Trial
from liger_trainer.recipe.model import published_config
from liger_trainer.trainers.choose_packing import choose_packing
from tests.attention.families import TAKEN, build
from tests.kernels.document_places import places
from tests.patching.comparisons import LAYERS
from tests.tiny_models import COMMON, TINY_MODELS

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_LAYERS = ["linear_attention"] * 5 + ["full_attention"]
MIXING = {  # layers that mix tokens by a recurrence or a convolution
    **{name: {} for name in ("qwen3_5_text", "qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "zamba2")},
    "lara_mini": {},
    "nemotron_h": {
        **{"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"] * 3, "mamba_num_heads": 64},
        "n_routed_experts": 128,
    },
    "granitemoehybrid": {"layer_types": _LAYERS, "num_hidden_layers": 6, "mamba_n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 4096, "mamba_n_heads": 64, "mamba_d_head": 64},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "lfm2": {"full_attn_idxs": [2, 5]},
    "lfm2_moe": {"layer_types": ["conv"] * 2 + ["full_attention"] + ["conv"] * 29},
    "lfm3": {},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 16},
}
REAL = {  # sizes that differ from the defaults of transformers
    "llama": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rope_parameters": LLAMA3_ROPE,
    },
    "qwen3_moe": {"num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128, "output_router_logits": True},
    "gemma3_text": {
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024,
    },
    "granite": {"hidden_size": 4096, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0},
    "llama4_text": {"attn_temperature_tuning": False},
    **{name: {} for name in ("mixtral", "gpt_oss", "cohere2", "olmo3", "phi3", "gemma2", "gpt2", "glm4_moe")},
}  # fmt: skip
ROW = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 128, "num_attention_heads": 4, "pad_token_id": 0}
REFUSED = {
    "jamba": "its JambaMambaMixer is not ours",
    "falcon_mamba": "its FalconMambaMixer is not ours",
    "recurrent_gemma": "its RecurrentGemmaRecurrentBlock is not ours",
    "bloom": "its attention is not ours",
    "t5": "its attention is not ours",
    "dynamic": "its rotary embedding depends on the length of the longest row",
    "longrope": "its rotary embedding depends on the length of the longest row",
    "eager": "its attention is not ours",
}
OF_LLAMA = {
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "factor": 2.0, "original_max_position_embeddings": 64,
        }
    },
    "eager": {"attn_implementation": "eager"},
}  # fmt: skip


def meta_model(name, **fields):
    config = AutoConfig.for_model(name, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM._model_mapping[type(config)](config)
    model.config._attn_implementation = NAME
    return model


@pytest.mark.parametrize("name", TAKEN)
def test_families_are_proved(name):
    model = build(name, 8 if TAKEN[name].window else None)
    model.config.get_text_config()._attn_implementation = NAME
    agreement = prove_packing(model)
    assert agreement.equal, agreement.reason


@pytest.mark.parametrize("name", REAL)
def test_models_of_real_sizes_are_proved_on_small_ones(name):
    model = meta_model(name, **REAL[name])
    began = time.process_time()
    agreement = prove_packing(model)
    assert agreement.equal, agreement.reason
    assert time.process_time() - began < 3.0
    with torch.device("meta"):
        small = type(model)(small_config(model.config))
    assert sum(each.numel() for each in small.parameters()) < 4e6  # four heads of 128 make it 512 wide
    kinds = set(getattr(model.config, "layer_types", None) or ())
    assert set(getattr(small.config, "layer_types", None) or ()) == kinds


def mixing_model(name):
    """With our layers, and the kinds of layers of the config, in small: a proof of the real sizes needs a GPU."""
    config = AutoConfig.for_model(name, **MIXING[name])
    small = small_config(config)
    assert set(getattr(small, "layer_types", None) or ()) == set(getattr(config, "layer_types", None) or ())
    model = AutoModelForCausalLM.from_config(small)
    apply_liger_kernel(model, LAYERS)
    return model


@pytest.mark.parametrize("name", MIXING)
def test_models_that_mix_tokens_by_layers_of_ours_are_proved(name):
    agreement = prove_packing(mixing_model(name))
    assert agreement.equal, agreement.reason


def test_a_layer_that_is_no_longer_ours_is_refused():
    model = mixing_model("lfm2")
    layer = next(module for module in model.modules() if type(module).__name__ == "Lfm2ShortConv")
    unbind_forward(layer)
    assert prove_packing(model).reason == "its Lfm2ShortConv is not ours"
    assert prove_packing(meta_model("lfm2", **MIXING["lfm2"])).reason == "its Lfm2ShortConv is not ours"


def test_a_package_that_runs_on_a_gpu_alone_is_not_called(monkeypatch):
    """The small copy is on the CPU; transformers calls a package in these layers wherever it is installed."""

    @functools.wraps(inspect.unwrap(modeling_lfm2.causal_conv1d_fn))
    def of_a_package(*args, **kwargs):
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", of_a_package)
    agreement = prove_packing(mixing_model("lfm2"))
    assert agreement.equal, agreement.reason


def test_a_layer_that_steps_aside_under_autocast_is_refused(monkeypatch):
    monkeypatch.setattr(Trial, "under_autocast", lambda *args: False)
    assert prove_packing(mixing_model("lfm2")).reason == "its Lfm2ShortConv was not proved under autocast"


def test_a_layer_that_steps_aside_in_float16_stays_padded():
    """Mamba 2 overflows elsewhere than ours does; in bfloat16 it is packed."""
    model = mixing_model("nemotron_h")
    for args, packed in (
        (SimpleNamespace(padding_free=True, fp16=True), False),
        (SimpleNamespace(padding_free=True), True),
    ):
        packing, (row, *_) = choose_packing(args, model, False)
        assert (packing is not None) == packed
        assert packed or row.reason == "batches stay padded: its NemotronHMamba2Mixer was not proved in float16"


def test_the_report_says_that_layers_with_a_state_share_one_level():
    attention = build("llama")
    attention.config._attn_implementation = NAME
    for model, levels in ((mixing_model("lfm2"), ", at one level: some layers have a state"), (attention, "")):
        _, (_, row) = choose_packing(SimpleNamespace(padding_free=True), model, True)
        assert (row.component, row.kernel) == ("share_prompt", f"common beginnings once{levels}")


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_with_the_reason(name):
    if name in OF_LLAMA:
        config = AutoConfig.for_model("llama", **COMMON, **OF_LLAMA[name])
        model = AutoModelForCausalLM.from_config(config)
    else:
        more = {"recurrent_gemma": {"num_hidden_layers": 3}}.get(name, {})
        config = AutoConfig.for_model(name, **{**({} if name == "t5" else ROW), **more})
        with torch.device("meta"):
            model = (AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM).from_config(config)
    apply_liger_kernel(model)
    assert prove_packing(model).reason == REFUSED[name]


@pytest.mark.parametrize("name", ["glm_ocr", "ernie4_5_vl_moe", "idefics2"])
def test_rotary_sections_fit(name):
    """Sections that are written in the model's code, of heads of the published size; and parts without layers."""
    config = AutoConfig.for_model(name)
    with torch.device("meta"):
        model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config)
    model.config.get_text_config()._attn_implementation = NAME
    agreement = prove_packing(model)
    assert agreement.equal, agreement.reason


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v3", "longcat_flash", "axk1", "gemma3n_text", "diffllama", "beam"),
        *("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text"),  # with an indexer
    ],
)
def test_latent_and_shared_keys_are_proved(name):
    agreement = prove_packing(meta_model(name))
    assert agreement.equal, agreement.reason


@pytest.mark.parametrize("fields", [{"num_kv_shared_layers": 10}, {"attention_k_eq_v": True}], ids=str)
@pytest.mark.parametrize("name", ["gemma4_text", "gemma4_unified_text"])
def test_keys_that_are_shared_or_are_the_values_are_proved(name, fields):
    agreement = prove_packing(meta_model(name, **fields))
    assert agreement.equal, agreement.reason


def test_layers_that_run_many_times_do_not_magnify_rounding():
    """Of 16 layers that run eight times each, rounding would be what a leak between documents is."""
    agreement = prove_packing(meta_model("hrm_text"))
    assert agreement.equal, agreement.reason
    assert agreement.error < TOLERANCE  # without the limit for models that magnify rounding


def test_parts_that_a_config_may_lack():
    assert small_config(AutoConfig.for_model("gemma4", audio_config=None)).audio_config is None


@pytest.mark.parametrize("name", ["google/gemma-4-E2B-it", "google/gemma-4-E4B-it"])
def test_layers_whose_heads_differ_keep_their_sizes(name):
    """Full attention has wider heads; by their old indices, layers of one kind would get the sizes of another."""
    small = small_config(published_config(name)).get_text_config()
    heads = {kind: own.head_dim for kind, own in zip(small.layer_types, small.per_layer_config, strict=True)}
    assert heads == {"sliding_attention": 256, "full_attention": 512}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    widths = {layer.self_attn.q_proj.out_features for layer in model.model.layers}
    assert widths == {256 * small.num_attention_heads, 512 * small.num_attention_heads}


class _Summed(LlamaForCausalLM):
    """Adds to each token's logits those of the tokens before it in its row: a mixture outside attention."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.cumsum(1)
        return outputs


class _Long(LlamaForCausalLM):
    """Divides the logits by the number of columns."""

    def forward(self, input_ids, **kwargs):
        outputs = super().forward(input_ids, **kwargs)
        outputs.logits = outputs.logits / input_ids.shape[1]
        return outputs


MIXED = {
    "a sum": lambda: _Summed(AutoConfig.for_model("llama", **COMMON)),
    "a length": lambda: _Long(AutoConfig.for_model("llama", **COMMON)),
    # Its layers without positions scale queries by the logarithm of their place, from the 8192nd on.
    "Llama 4": lambda: meta_model("llama4_text"),
}


@pytest.mark.parametrize("name", MIXED)
def test_models_that_mix_tokens_outside_attention_are_refused(name):
    model = MIXED[name]()
    model.config._attn_implementation = NAME
    assert prove_packing(model).reason.startswith("packed rows give other values (")


def test_a_module_of_ones_own_is_refused():
    assert prove_packing(nn.Linear(2, 2)).reason == "it is not a transformers model"


def wider(self, window, chunk, plan=PackedRow.plan):
    return plan(self, window and window + 1, chunk and chunk + 1)


def without_first_key(self, paths=Layout.paths):
    for begin, end, above in paths(self):
        yield begin, end, above[1:]


def without_second_level(self, paths=Layout.paths):
    for begin, end, above in paths(self):
        yield begin, end, above[: len(above) if len(above) < 11 else 7]


def later(batch, layout, labels, made=packed_row._packed_row):
    row = made(batch, layout, labels)
    for each in layout.segments:
        if each.parent >= 0:
            row.inputs["position_ids"][:, each.begin : each.end] += 1
    return row


def counted_once(batch, layout, labels, made=packed_row._packed_row):
    row = made(batch, layout, labels)
    row.inputs["attention_mask"].fill_(1)
    return row


def without_parents(self, documents=PackedRow.documents):
    found = documents(self)
    return documents_of([behind - first for first, behind, _ in places(found)], [first for first, *_ in places(found)])


def masked_by_counts(original, compute, conv, precisions, made=proof_of_mixers.mixer_forward):
    def counting(self, x, mask, documents):
        shared = x.new_ones(x.shape[:2])
        if documents.spans is not None and documents.roots < len(documents.spans):
            for first, behind, parent in places(documents):
                shared[0, first:behind] = 1 if parent >= 0 else 2
        return compute(self, x * shared[..., None], mask, documents)

    return made(original, counting, conv, precisions)


FAULTS = {
    "parents": (PackedRow, "documents", without_parents, ("lfm3", "qwen3_5_text", "falcon_h1", "minimax")),
    "counts": (proof_of_mixers, "mixer_forward", masked_by_counts, ("lfm2", "qwen3_next")),
    "windows and chunks": (PackedRow, "plan", wider, ("gemma3_text", "llama4_text")),
    "keys": (Layout, "paths", without_first_key, ("hrm_text", "llama", "gemma3_text", "granite")),
    "keys of a second level": (Layout, "paths", without_second_level, ("llama", "granite")),
    "positions": (packed_row, "_packed_row", later, ("hrm_text", "llama", "gemma3_text", "phi3", "granite")),
    "weights of the router's loss": (packed_row, "_packed_row", counted_once, ("qwen3_moe", "mixtral")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault, monkeypatch):
    """With the small weights with which transformers begins."""
    where, name, faulty, families = FAULTS[fault]
    for family in families:
        model = mixing_model(family) if family in MIXING else meta_model(family, **REAL.get(family, {}))
        assert prove_packing(model).equal
        with monkeypatch.context() as patch:
            patch.setattr(where, name, faulty)
            assert prove_packing(model).error > 1e-3


def test_the_random_numbers_of_a_run_and_its_model_stay():
    model = build("llama")
    apply_liger_kernel(model)
    before = model.config.to_dict(), model.config._attn_implementation
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    assert prove_packing(model).equal
    assert torch.equal(torch.rand(2), expected)
    assert (model.config.to_dict(), model.config._attn_implementation) == before


@pytest.mark.parametrize(("errors", "calls"), [([5e-4, 1e-6], 2), ([5e-4] * 3, 3), ([1e-2], 1), ([1e-6], 1)])
def test_a_gradient_that_cancels_is_drawn_again(errors, calls):
    left, model = iter(errors), build("llama")
    model.config._attn_implementation = NAME

    def compared(model):
        error = next(left)
        return Agreement(error, reason="other values" if error > TOLERANCE else "")

    assert proof._proved(model, compared).equal == (errors[-1] <= TOLERANCE)
    assert len(errors) - len([*left]) == calls


def test_a_proof_runs_in_few_threads(monkeypatch):
    """Many threads of a large machine wait for each other, where tensors are small."""
    seen, before = [], torch.get_num_threads()
    compared = proof._compared_tokens
    monkeypatch.setattr(
        proof, "_compared_tokens", lambda model: seen.append(torch.get_num_threads()) or compared(model)
    )
    torch.set_num_threads(6)
    try:
        model = TINY_MODELS["llama"]()
        apply_liger_kernel(model)
        assert proof.prove_packing(model).equal
        with Probe(torch.device("cpu")).isolated():
            seen.append(torch.get_num_threads())
        assert seen == [4, 4]
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
