"""Adapters that mix tokens, keep statistics of them or draw noise: what is packed with them, and what is shared."""

import random

import numpy
import peft
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from liger_trainer.packing.packing import Packing, drops
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.trainers import tried_adapters
from liger_trainer.trainers.choose_packing import packing_of_reference
from liger_trainer.trainers.tried_adapters import TriedAdapters, try_adapters
from tests.packing.training import assert_close_gradients, trained
from tests.quantised import library, quantise
from tests.trainers.parity import assert_close_logs, build, lora
from tests.trainers.tiny import llama, logged

pytestmark = pytest.mark.filterwarnings("ignore")

TARGETS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
LILY, PVERA, LORA = (f"peft.tuners.{name}.layer.Linear" for name in ("lily", "pvera", "lora"))


def of_lora(**options):
    return peft.LoraConfig(r=4, **TARGETS, **options)


def velora(init):
    return of_lora(velora_config=peft.VeloraConfig(num_groups=4, init_type=init))


def lily():
    """LILY's adapters, which average the choice of their router over all tokens, begin as nothing: here they do not."""
    torch.manual_seed(0)
    model = llama()
    model.config._name_or_path = ""
    model = peft.get_peft_model(model, peft.LilyConfig(r=4, **TARGETS))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.3)
    return model


def row_of(trainer, name):
    return next(row.reason for row in trainer._packing_rows if row.component == name)


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_adapters_that_mix_tokens_train_as_with_trl(kind, tmp_path):
    case = {"ref_model": llama()}
    stock, expected = trained(kind, False, tmp_path / "stock", lily(), **case)
    ours, found = trained(kind, True, tmp_path / "ours", lily(), **case)
    assert ours._packing is None
    assert f"batches stay padded: {LILY}, a layer of its adapters, gives a token other" in row_of(ours, "padding_free")
    assert_close_logs(logged(ours), logged(stock))
    assert_close_gradients(found, expected)


def test_asked_for_it_is_an_error(tmp_path):
    with pytest.raises(
        ValueError, match=f"`padding_free` is true and `strict_kernels` is set, but batches stay padded: {LILY}"
    ):
        build("DPO", True, tmp_path, lily(), ref_model=llama(), own={"padding_free": True, "strict_kernels": True})


def test_a_reference_that_mixes_tokens_stays_padded():
    reference = lily().get_base_model()
    apply_liger_kernel(reference)
    packing, rows = packing_of_reference(reference, Packing(True), [])
    assert packing is None
    assert f"its batches stay padded: {LILY}" in rows[0].reason


@pytest.mark.parametrize(
    ("config", "share"),
    [
        (peft.PveraConfig(r=4, **TARGETS), f"not in training: {PVERA}, a layer of its adapters, draws random numbers"),
        (peft.PveraConfig(r=4, sample_at_inference=True, **TARGETS), f"{PVERA}, a layer of its adapters, draws"),
        (of_lora(), ""),
    ],
)
def test_noise_of_an_adapter_is_not_shared(config, share, tmp_path):
    trainer, _ = trained("GRPO", True, tmp_path, llama(), peft_config=config)
    assert row_of(trainer, "padding_free") == ""
    assert row_of(trainer, "share_prompt").startswith(share)
    assert trainer._packing.share is not getattr(config, "sample_at_inference", False)
    assert trainer._shares_prompt is (share == "")
    assert trainer._packing.trained > 0
    assert (trainer._packing.executed == trainer._packing.trained) is (share != "")


METHODS = {
    "lora": (of_lora(), "", ""),
    "dora": (of_lora(use_dora=True), "", ""),
    "of an embedding": (peft.LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"]), "", ""),
    "of rows": (of_lora(trainable_token_indices=[5, 6]), "", ""),
    "oft": (peft.OFTConfig(oft_block_size=8, **TARGETS), "", ""),
    "lokr": (peft.LoKrConfig(r=4, **TARGETS), "", ""),
    "hra": (peft.HRAConfig(r=4, **TARGETS), "", ""),
    "lily": (peft.LilyConfig(r=4, **TARGETS), LILY, ""),
    "lily of the head": (peft.LilyConfig(r=4, target_modules=["lm_head"]), LILY, ""),
    "pvera": (peft.PveraConfig(r=4, **TARGETS), "", PVERA),
    "monteclora": (of_lora(monteclora_config=peft.MontecloraConfig()), "", LORA),
    "velora": (velora("batch_average_once"), LORA, ""),
    "velora of random vectors": (velora("random"), "", ""),
    "poly, whose layers are given tasks": (peft.PolyConfig(r=4, n_tasks=1, **TARGETS), "", ""),
    "experts": (peft.LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"]), "", ""),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_methods(name, dtype):
    config, mixing, drawing = METHODS[name]
    found = try_adapters(peft.get_peft_model(llama(), config).to(dtype))
    assert found.mixing.partition(",")[0] == mixing
    assert (found.drawing, found.always) == (drawing, False)


def test_gpt2_has_linear_layers_of_its_own():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], lora_dropout=0.5))
    assert try_adapters(model).drawing == LORA


def test_each_distinct_layer_is_tried_once(monkeypatch):
    seen, tried = [], tried_adapters._tried
    monkeypatch.setattr(tried_adapters, "_tried", lambda layer, model: seen.append(layer) or tried(layer, model))
    model = peft.get_peft_model(
        llama(), peft.LoraConfig(target_modules="all-linear", rank_pattern={"0.self_attn.q_proj": 2})
    )
    assert not try_adapters(model).mixing
    # q and o, q of another rank, k and v, gate and up, down
    assert len(seen) == 5
    assert not try_adapters(llama()).mixing
    assert len(seen) == 5


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_bases_in_4_bits(dropout):
    library()
    model = quantise(llama(hidden_size=64, intermediate_size=128))
    found = try_adapters(peft.get_peft_model(model, of_lora(lora_dropout=dropout)))
    assert found == TriedAdapters(drawing="peft.tuners.lora.bnb.Linear4bit" if dropout else "")


@pytest.mark.parametrize(
    "config",
    [
        peft.PveraConfig(r=4, generator_seed=1, **TARGETS),
        of_lora(monteclora_config=peft.MontecloraConfig(), lora_dropout=0.1),
        velora("batch_average"),
        peft.LilyConfig(r=4, **TARGETS),
    ],
    ids=lambda config: type(config).__name__,
)
def test_trying_leaves_no_trace(config):
    model = peft.get_peft_model(llama(), config).train()
    layers = [module for module in model.modules() if hasattr(module, "base_layer")]
    for layer in layers:
        layer.register_forward_hook(lambda *args: pytest.fail("a hook was called"))
        layer.get_base_layer().register_forward_hook(lambda *args: pytest.fail("a hook was called"))
    layers[0].eval()

    def state():
        samplers = [each.sampler.index for each in model.modules() if type(each).__name__ == "MontecloraSampler"]
        generators = [
            each.get_state()
            for layer in layers
            for each in getattr(layer, "pvera_generator", {}).values()
            if each is not None
        ]
        tensors = [each.clone() for each in model.state_dict().values()]
        numbers = [torch.get_rng_state(), *generators, torch.from_numpy(numpy.random.get_state()[1].copy())]
        modes = [each.training for each in model.modules()]
        attributes = [{name: id(value) for name, value in vars(each).items()} for each in model.modules()]
        gradients = [each.grad for each in model.parameters()]
        return tensors + numbers, (modes, attributes, gradients, samplers, random.getstate())

    (tensors, others), _, (later, rest) = state(), try_adapters(model), state()
    assert others == rest
    for one, other in zip(tensors, later, strict=True):
        assert torch.equal(one, other)


def test_layers_without_weights_count_as_before():
    with torch.device("meta"):
        model = peft.get_peft_model(llama(), peft.LilyConfig(r=4, **TARGETS))
    assert try_adapters(model.to("meta")) == TriedAdapters()


def test_what_one_process_finds_all_know(monkeypatch):
    """The weights of the others may be elsewhere."""
    found = TriedAdapters("mixes", "draws", True)
    monkeypatch.setattr(tried_adapters, "is_distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda of_all, own: of_all.__setitem__(slice(2), [own, found])
    )
    assert try_adapters(peft.get_peft_model(llama(), of_lora())) == found


@pytest.mark.parametrize(
    "config",
    [
        peft.LoHaConfig(r=4, rank_dropout=0.1, **TARGETS),
        peft.LoKrConfig(r=4, module_dropout=0.1, **TARGETS),
        peft.OFTConfig(oft_block_size=8, module_dropout=0.1, **TARGETS),
        peft.BOFTConfig(boft_block_size=4, boft_dropout=0.1, **TARGETS),
        lora(lora_dropout=0.1),
    ],
    ids=lambda config: type(config).__name__,
)
def test_dropout_of_every_method_is_known(config):
    assert drops(peft.get_peft_model(llama(), config))
    for name in ("rank_dropout", "module_dropout", "boft_dropout", "lora_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    assert not drops(peft.get_peft_model(llama(), config))
