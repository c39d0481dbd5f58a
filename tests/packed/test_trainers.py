"""Trainers that are given the name of a packed checkpoint: they keep it packed, and train as on the dequantised one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import FineGrainedFP8Config

from liger_trainer import (
    LigerDPOConfig,
    LigerDPOTrainer,
    LigerGRPOConfig,
    LigerGRPOTrainer,
    LigerSFTConfig,
    LigerSFTTrainer,
    LigerTrainingArguments,
    load_packed,
)
from liger_trainer.packed.loading import is_packed
from liger_trainer.trainers.checks import packed_base
from liger_trainer.trainers.checks.low_bit import check_low_bit_weights
from tests.packed.test_loading import dequantised
from tests.packed_checkpoints import write_dense, write_mixture
from tests.trainers.builders import causal, losses_and_norms
from tests.trainers.parity import BASE, KINDS
from tests.trainers.tiny import tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")
CLASSES = {
    "SFT": (LigerSFTTrainer, LigerSFTConfig),
    "DPO": (LigerDPOTrainer, LigerDPOConfig),
    "GRPO": (LigerGRPOTrainer, LigerGRPOConfig),
}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
ADAPTERS = {"r": 4, "init_lora_weights": False, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Packed checkpoints, and beside each the dequantised model."""
    found = {}
    for name, make in (("dense", lambda path: write_dense(path, "fp8 blocks")), ("mixture", write_mixture)):
        found[name] = tmp_path_factory.mktemp(name)
        meant = make(found[name])
        dequantised(load_packed(str(found[name]), dtype=torch.float32), meant).save_pretrained(found[name] / "plain")
        for folder in (found[name], found[name] / "plain"):
            tokenizer().save_pretrained(folder)
    return found


def both(kind, folder, output, *args, **options):
    """Trained on the packed checkpoint, and on the dequantised model."""
    packed = train(kind, folder, output / "packed", *args, packed_base=True, **options)
    return packed, train(kind, folder / "plain", output / "plain", *args, **options)


def train(kind, folder, output, dtype="float32", steps=2, **options):
    """A trained trainer of `kind` that was given the name of the model."""
    trainer_class, config_class = CLASSES[kind]
    data, further, settings = KINDS[kind]
    adapters = EXPERTS if "mixture" in str(folder.relative_to(folder.parents[1])) else {"target_modules": "all-linear"}
    args = config_class(
        str(output), **{**BASE, **settings, "max_steps": steps, "model_init_kwargs": {"dtype": dtype}, **options}
    )
    torch.manual_seed(7)
    trainer = trainer_class(
        str(folder), args=args, train_dataset=data(), peft_config=LoraConfig(**ADAPTERS, **adapters), **further
    )
    trainer.train()
    return trainer


def adapters_of(trainer):
    return {name: each.detach().float() for name, each in trainer.model.named_parameters() if each.requires_grad}


def assert_alike(one, other, tolerance):
    assert losses_and_norms(one) == pytest.approx(losses_and_norms(other), rel=tolerance, abs=tolerance * 1e-2)
    expected = adapters_of(other)
    assert adapters_of(one).keys() == expected.keys()
    for name, each in adapters_of(one).items():
        assert (each - expected[name]).norm() <= tolerance * expected[name].norm(), name


OPTIONS = {
    "as it is": {},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "activation memory": {"gradient_checkpointing": True, "activation_memory": "1MiB", "max_steps": 5},
    "bf16": {"bf16": True, "max_steps": 1},  # by a rounding, a later step sends a token to another expert
}


@pytest.mark.parametrize("model", ["dense", "mixture"])
@pytest.mark.parametrize("kind", CLASSES)
def test_trains_as_on_the_dequantised_base(kind, model, folders, tmp_path):
    packed, plain = both(kind, folders[model], tmp_path)
    assert is_packed(packed.model)
    assert not is_packed(plain.model)
    assert {each.dtype for each in packed.model.parameters() if each.requires_grad} == {torch.float32}
    assert_alike(packed, plain, 1e-4)
    moved = {name: each for name, each in adapters_of(packed).items() if each.any()}
    assert moved.keys() == adapters_of(packed).keys()


@pytest.mark.parametrize("model", ["dense", "mixture"])
@pytest.mark.parametrize("name", list(OPTIONS)[1:])
def test_other_ways_to_train(name, model, folders, tmp_path):
    options = dict(OPTIONS[name])
    steps = options.pop("max_steps", 2)
    dtype = "bfloat16" if name == "bf16" else "float32"
    packed, plain = both("SFT", folders[model], tmp_path, dtype, steps, **options)
    assert_alike(packed, plain, 2**-6 if name == "bf16" else 1e-4)


def test_padding_free_batches(folders, tmp_path):
    padded, packed = (train("DPO", folders["dense"], tmp_path / str(free), padding_free=free) for free in (False, True))
    assert packed._packing is not None
    assert padded._packing is None
    assert_alike(packed, padded, 1e-3)


def test_what_is_saved_are_the_adapters_alone(folders, tmp_path):
    from safetensors.torch import load_file

    trainer = train("SFT", folders["mixture"], tmp_path, save_strategy="steps", save_steps=2)
    saved = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    assert all(".lora_" in name for name in saved)
    assert len(saved) == len(adapters_of(trainer))


def test_an_untrained_adapter_leaves_policy_and_reference_alike(folders, tmp_path):
    trainer_class, config_class = CLASSES["DPO"]
    args = config_class(str(tmp_path), **{**BASE, "max_steps": 1, "model_init_kwargs": {"dtype": "bfloat16"}})
    trainer = trainer_class(
        str(folders["dense"]), args=args, train_dataset=KINDS["DPO"][0](),
        peft_config=LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    assert losses_and_norms(trainer)[0] == pytest.approx(torch.tensor(2.0).log().item(), abs=1e-3)
    assert is_packed(trainer.model)  # `packed_base` is "auto"


def test_refusals_before_loading(folders, tmp_path):
    options = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    data = KINDS["SFT"][0]()

    def build(peft_config=None, **settings):
        args = LigerSFTConfig(**options, **settings)
        return LigerSFTTrainer(str(folders["dense"]), args=args, train_dataset=data, peft_config=peft_config)

    with pytest.raises(ValueError, match="`packed_base` is true, but there are no adapters, and a packed base is froz"):
        build(packed_base=True)
    assert not is_packed(build().model)
    with pytest.raises(ValueError, match=r"DoRA .`use_dora`. needs the floating weights of .* which stay packed"):
        build(LoraConfig(target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ValueError, match="init_lora_weights='pissa'` needs the floating weights"):
        build(LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"))
    config = FineGrainedFP8Config(dequantize=True)
    with pytest.raises(ValueError, match="`packed_base` is true, but `quantization_config` is given"):
        build(LoraConfig(), packed_base=True, model_init_kwargs={"quantization_config": config})
    with pytest.raises(ValueError, match="`packed_base` is 'yes'; it must be true, false or 'auto'"):
        LigerTrainingArguments(**options, packed_base="yes")
    with pytest.raises(ValueError, match="`packed_base` is true, but LlamaForCausalLM holds no packed weights"):
        causal(tmp_path, packed_base=True)
    with pytest.raises(ValueError, match="purely quantized"):  # the Trainer's own
        causal(tmp_path, load_packed(str(folders["dense"])))


def given(model, peft_config, output):
    """A trainer for SFT that is to add these adapters to `model`, a name or a packed model."""
    args = LigerSFTConfig(str(output), use_cpu=True, bf16=False, report_to="none", max_length=32)
    return LigerSFTTrainer(model, args=args, train_dataset=KINDS["SFT"][0](), peft_config=peft_config)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    ("model", "named", "packed"),
    [
        ("dense", "o_proj", "model.layers.0.self_attn.o_proj"),
        ("dense", "1.mlp", "model.layers.1.mlp.\\w+_proj"),
        ("mixture", "layers.1.mlp.experts", "model.layers.1.mlp.experts"),
        ("mixture", "layers.0.mlp", "model.layers.0.mlp.experts"),
    ],
)
def test_packed_modules_are_not_trained_beside_adapters(model, named, packed, loaded, folders, tmp_path):
    source = load_packed(str(folders[model]), dtype="auto") if loaded else str(folders[model])
    config = LoraConfig(**ADAPTERS, target_modules=["q_proj"], modules_to_save=["lm_head", named])
    with pytest.raises(
        ValueError,
        match=f"^`modules_to_save` names {named!r}, but '{packed}' stays packed, .* such as 'lm_head'; or set",
    ):
        given(source, config, tmp_path)


@pytest.mark.parametrize("loaded", [False, True])
def test_modules_in_16_bits_are_trained_beside_adapters(loaded, folders, tmp_path):
    source = load_packed(str(folders["mixture"]), dtype="auto") if loaded else str(folders["mixture"])
    config = LoraConfig(**ADAPTERS, target_modules=["q_proj"], modules_to_save=["lm_head", "mlp.gate"])
    trained = {name for name, each in given(source, config, tmp_path).model.named_parameters() if each.requires_grad}
    for module in ("lm_head", "layers.0.mlp.gate", "layers.1.mlp.gate"):
        assert any(f"{module}.modules_to_save.default.weight" in name for name in trained)


def test_adapters_that_read_weights_are_refused_for_a_packed_model(folders, tmp_path):
    model = load_packed(str(folders["dense"]), dtype="auto")
    for options in ({"use_dora": True}, {"init_lora_weights": "olora"}, {"init_lora_weights": "mica"}):
        with pytest.raises(
            ValueError, match=r"needs the floating weights of `model`, which stay packed. Use plain LoRA"
        ):
            given(model, LoraConfig(target_modules=["q_proj"], **options), tmp_path)


@pytest.mark.parametrize("target", ["q_proj.weight", "0.self_attn.q_proj.weight", "k_proj.weight"])
@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_packed_weights_named_as_parameters_are_refused(name, target, folders, tmp_path):
    """PEFT adapts what it finds, and skips the others."""
    layer = target.removesuffix(".weight").rpartition(".")[2]
    others = [] if name == "dense" else ["experts.gate_up_proj", "mlp.gate.weight"]
    config = LoraConfig(r=4, lora_dropout=0.0, target_modules=["v_proj"], target_parameters=others)
    given(str(folders[name]), config, tmp_path)
    config.target_parameters = [*others, target]
    with pytest.raises(
        ValueError,
        match=rf"names '{target}' in `target_parameters`, but '.*layers\.0\..*{layer}' keeps it packed: PEFT has "
        rf"made no adapter for it. Name the layer in `target_modules` \(`lora_target_modules`\): '{layer}'\.$",
    ):
        given(str(folders[name]), config, tmp_path)


def test_layers_that_are_packed_beside_others_that_are_not(folders):
    """An adapter on the weight in 16 bits does not stand for those that PEFT skips."""
    model = load_packed(str(folders["dense"]), dtype="auto")
    model.model.layers[0].self_attn.q_proj = torch.nn.Linear(128, 128, bias=False)
    model = get_peft_model(model, LoraConfig(target_modules=["v_proj"], target_parameters=["q_proj.weight"]))
    with pytest.raises(ValueError, match=r"but '.*layers\.1\.self_attn\.q_proj' keeps it packed"):
        check_low_bit_weights(model)


WAYS = {
    "is_deepspeed_enabled": "DeepSpeed",
    "is_distributed_loading_by_transformers": "`distributed_config`",
    "get_tp_size": "tensor parallelism",
}


def split_by(folders, tmp_path, monkeypatch, name, fsdp_version=None):
    """A trainer of a packed model whose launch splits it in the way `name`."""
    model = get_peft_model(load_packed(str(folders["dense"]), dtype="auto"), LoraConfig(target_modules=["q_proj"]))
    trainer = causal(tmp_path, model, bf16=False)
    monkeypatch.setattr(trainer, name, (lambda: 2) if name == "get_tp_size" else True, raising=False)
    plugin = SimpleNamespace(fsdp_version=fsdp_version)
    monkeypatch.setattr(trainer, "accelerator", SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))
    return trainer


@pytest.mark.parametrize("name", WAYS)
def test_launches_that_split_the_model_are_refused(name, folders, tmp_path, monkeypatch):
    trainer = split_by(folders, tmp_path, monkeypatch, name)
    with pytest.raises(
        ValueError, match=f"`model` has packed weights, and {WAYS[name]} splits it, which takes no code"
    ):
        packed_base.check_packed_base(trainer)


def test_of_fsdp_the_second_version_alone_takes_codes(folders, tmp_path, monkeypatch):
    packed_base.check_packed_base(split_by(folders, tmp_path, monkeypatch, "is_fsdp_enabled", 2))
    with pytest.raises(ValueError, match=r"FSDP1 .`fsdp_version: 1`. splits it, which takes no codes.*`fsdp2`"):
        packed_base.check_packed_base(split_by(folders, tmp_path, monkeypatch, "is_fsdp_enabled", 1))


def test_the_fsdp2_of_old_versions_of_torch_takes_no_codes(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_base, "is_at_least", lambda library, version: (library, version) != ("torch", "2.12"))
    with pytest.raises(ValueError, match=r"the FSDP2 of a torch older than 2.12 splits it, .*from torch 2.12 on"):
        packed_base.check_packed_base(split_by(folders, tmp_path, monkeypatch, "is_fsdp_enabled", 2))
    assert not packed_base.keeps_packed(SimpleNamespace(fsdp_plugin_args={"fsdp_version": 2}), adapted=True)
    assert packed_base.keeps_packed(SimpleNamespace(), adapted=True)


def test_a_base_stays_packed_where_it_can_be_trained_so(monkeypatch):
    def stays(**args):
        return packed_base.keeps_packed(SimpleNamespace(**args), adapted=True)

    assert stays()
    assert stays(fsdp_plugin_args={"fsdp_version": 2})
    assert not stays(fsdp_plugin_args={"fsdp_version": 1})
    assert not stays(deepspeed="zero2.json")
    assert not stays(use_vllm=True)
    assert stays(use_vllm=True, packed_base=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert not stays()
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert stays()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert not stays()


def test_older_versions_of_transformers_load_a_base_as_they_do(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", {"transformers": "5.20.0"}.__getitem__)
    assert not packed_base.keeps_packed(SimpleNamespace(), adapted=True)
    assert packed_base.keeps_packed(SimpleNamespace(packed_base=True), adapted=True)  # which says what is lacking


def test_vllm_is_refused(folders, tmp_path):
    model = get_peft_model(load_packed(str(folders["dense"]), dtype="auto"), LoraConfig(target_modules=["q_proj"]))
    trainer = causal(tmp_path, model, bf16=False)
    trainer.args.use_vllm = True
    with pytest.raises(ValueError, match="vLLM gets the adapters merged into their base, and `model` has packed"):
        packed_base.check_packed_base(trainer)


def test_experts_whose_adapters_would_not_run_in_ours_are_refused(folders, tmp_path):
    for settings in ({"use_liger_kernel": False}, {"liger_kernel_config": {"experts": False}}):
        model = get_peft_model(
            load_packed(str(folders["mixture"]), dtype="auto"), LoraConfig(lora_dropout=0.0, **EXPERTS)
        )
        with pytest.raises(ValueError, match="the adapters on Qwen3MoeExperts in few bits run only in our operator"):
            causal(tmp_path, model, bf16=False, **settings)
