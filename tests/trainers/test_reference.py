"""The first step of a trainer with a reference: nothing where the reference is the policy, an error where it is not."""

import copy
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

import liger_trainer
from liger_trainer.trainers.reference import WrongReferenceError, _first_not_0
from tests.tiny_models import TINY_MODELS
from tests.trainers.tiny import COMMON, WORDS, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

ARGUMENTS = {**COMMON, "max_steps": 1, "bf16": False, "gradient_checkpointing": False, "kernel_report": False}
GENERATION = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1}
KINDS = ["DPO", "KTO", "GRPO", "RLOO"]
SMALL = 0.03  # of a change of the weights, by which a short training moves them


def rows(kind):
    if kind == "DPO":
        return [{"prompt": WORDS[i % 4], "chosen": WORDS[i % 3], "rejected": WORDS[(i + 1) % 3]} for i in range(8)]
    if kind == "KTO":
        return [{"prompt": WORDS[i % 4], "completion": WORDS[i % 3], "label": i % 2 == 0} for i in range(8)]
    return [{"prompt": words} for words in WORDS * 2]


def build(kind, model, tmp_path, more=None, data=None, **options):
    config = getattr(liger_trainer, f"Liger{kind}Config")
    generates = kind in ("GRPO", "RLOO")
    more = {**({"reward_funcs": lambda completions, **_: [float(len(c)) for c in completions]} if generates else {}),
            **(more or {})}  # fmt: skip
    args = config(str(tmp_path), **{**ARGUMENTS, **(GENERATION if generates else {}), **options})
    data = Dataset.from_list(rows(kind)) if data is None else data
    return getattr(liger_trainer, f"Liger{kind}Trainer")(
        model, args=args, train_dataset=data, processing_class=tokenizer(), **more
    )


def lora(**options):
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options)


def changed(folder, scale=0.3):
    """The model of `folder`, as if an adapter had been merged into it in memory."""
    model = TINY_MODELS["llama"]()
    model.config._name_or_path = folder
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        weight = model.model.layers[0].mlp.down_proj.weight
        weight += scale * torch.randn(weight.shape, generator=generator)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_was_changed_in_memory(kind, folder, tmp_path):
    trainer = build(kind, changed(folder), tmp_path)
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    metric = r"`rewards/(chosen|rejected)`" if kind in ("DPO", "KTO") else "`kl`"
    match = rf"{metric} must be 0, but the log-prob.* apart .*loaded from '{folder}'.*in memory has other weights"
    with pytest.raises(WrongReferenceError, match=match):
        trainer.train()
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.named_parameters())


@pytest.mark.parametrize("loss_type", ["ipo", "sppo_hard", "apo_zero"])
def test_every_loss_of_dpo(loss_type, folder, tmp_path):
    with pytest.raises(WrongReferenceError, match="must be 0"):
        build("DPO", changed(folder), tmp_path, loss_type=[loss_type]).train()


def divergence_from_start(trainer):
    """The KL divergence from the policy to the reference on a few tokens."""
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        policy, reference = (
            model(input_ids=ids).logits.float().log_softmax(-1) for model in (trainer.model.eval(), trainer.ref_model)
        )
    trainer.model.train()
    return (policy.exp() * (policy - reference)).sum(-1).mean().item()


@pytest.mark.parametrize("precision", ["weights", "mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_small_change_in_half_precision(kind, precision, folder, tmp_path):
    """One of the size of a short training: rounding to bf16 is smaller."""
    options = {"bf16": True} if precision == "mixed" else {}
    model = changed(folder, SMALL).to(torch.bfloat16 if precision == "weights" else torch.float32)
    trainer = build(kind, model, tmp_path, **options)
    assert divergence_from_start(trainer) < 0.02
    with pytest.raises(WrongReferenceError, match="in memory has other weights"):
        trainer.train()


def trained_adapter(folder):
    torch.manual_seed(2)
    return get_peft_model(TINY_MODELS["llama"](), lora(init_lora_weights=False))


FINE = {
    "by name": {},
    "unchanged": {"model": lambda folder: changed(folder, 0.0)},
    "given": {"model": changed, "reference": True},
    "adapters": {"peft_config": lora(lora_dropout=0.3)},
    "DoRA": {"peft_config": lora(use_dora=True)},
    "copied head": {"peft_config": lora(modules_to_save=["lm_head"])},
    "random adapters": {"peft_config": lora(init_lora_weights=False)},
    "trained adapters": {"model": trained_adapter},
    "bf16 weights": {"options": {"model_init_kwargs": {"dtype": "bfloat16"}}},
    "mixed precision": {"options": {"bf16": True}, "peft_config": lora()},
    "accumulated": {"options": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}},
    "DoRA in bf16": {
        "peft_config": lora(use_dora=True), "options": {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}},
    },
    "rank-stabilised": {"peft_config": lora(use_rslora=True), "options": {"bf16": True}},
    "orthogonal in bf16": {"peft_config": lora(init_lora_weights="orthogonal"), "options": {"bf16": True}},
    "dropout": {"model": lambda folder: dropping(folder), "options": {"disable_dropout": False}},
    "dropout in bf16": {
        "model": lambda folder: dropping(folder), "options": {"disable_dropout": False, "bf16": True},
    },
    "noise": {"model": lambda folder: noisy(folder)},
    "noise under adapters": {"model": lambda folder: noisy(folder), "peft_config": lora()},
    "noise in evaluations": {"model": lambda folder: noisy(folder, always=True)},
    "NEFTune": {"options": {"neftune_noise_alpha": 5}},
    "synced": {"options": {"sync_ref_model": True, "ref_model_sync_steps": 1}},
}  # fmt: skip


def dropping(folder, scale=0.0):
    model = changed(folder, scale)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return model


class Noise(torch.nn.Module):
    """A module of the user's own."""

    def __init__(self, inner, always):
        super().__init__()
        self.inner, self.always = inner, always

    def forward(self, *args, **kwargs):
        output = self.inner(*args, **kwargs)
        return output + 0.3 * output.std() * torch.randn_like(output) if self.training or self.always else output


def noisy(folder, always=False, scale=0.0):
    model = changed(folder, scale)
    model.model.layers[1].mlp = Noise(model.model.layers[1].mlp, always)
    return model


@pytest.mark.parametrize(
    ("kind", "case"),
    [*(("DPO", case) for case in FINE), ("KTO", "accumulated"), ("KTO", "trained adapters"), ("RLOO", "bf16 weights"),
     *(("GRPO", case) for case in ("by name", "adapters", "mixed precision", "dropout", "noise", "synced")),
     *((kind, case) for kind in ("KTO", "RLOO") for case in ("noise", "DoRA in bf16"))],
)  # fmt: skip
def test_no_error_without_a_reason(kind, case, folder, tmp_path):
    values = FINE[case]
    more = {"peft_config": values["peft_config"]} if "peft_config" in values else {}
    if "reference" in values:
        more["ref_model"] = TINY_MODELS["llama"]()
    model = values["model"](folder) if "model" in values else folder
    options = {"max_steps": 2, **values.get("options", {})}
    trainer = build(kind, model, tmp_path, more=more, **options)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert all(math.isfinite(log["loss"]) for log in logs)
    differs = any(word in case for word in ("given", "random", "dropout", "noise", "NEFTune"))
    assert len(logs) == 2
    if kind == "DPO" and not differs and "bf16" not in case and case != "mixed precision":
        assert logs[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)


@pytest.mark.parametrize(("kind", "model"), [("DPO", dropping), ("GRPO", dropping), ("DPO", noisy), ("KTO", noisy)])
def test_noise_hides_no_other_reference(kind, model, folder, tmp_path):
    options = {"disable_dropout": False}
    with pytest.raises(WrongReferenceError, match="in memory has other weights"):
        build(kind, model(folder, scale=0.1), tmp_path, **options).train()


def test_looking_leaves_no_trace(folder, tmp_path, monkeypatch):
    """Modes and random numbers are what they were, for a backward that computes the layers again and the next step."""
    logs = []
    for looks in (True, False):
        options = {"disable_dropout": False, "gradient_checkpointing": True, "max_steps": 2}
        trainer = build("DPO", dropping(folder), tmp_path, **options)
        if not looks:
            monkeypatch.setattr(trainer, "_must_be_policy", False)
        trainer.train()
        logs.append([(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log])
    assert logs[0] == logs[1]


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_a_second_training_and_a_resumed_one(kind, folder, tmp_path):
    trainer = build(kind, folder, tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.train()  # begins with what the first has trained
    build(kind, folder, tmp_path, max_steps=2, save_strategy="steps").train(resume_from_checkpoint=True)


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_adapters_that_change_the_base(kind, folder, tmp_path):
    """With a PiSSA adapter switched off, what is left is not the model that training starts from."""
    with pytest.raises(WrongReferenceError, match="`init_lora_weights='pissa'` changes the base weights"):
        build(kind, folder, tmp_path, more={"peft_config": lora(init_lora_weights="pissa")}).train()


def test_another_adapter_is_trained_than_the_one_that_was_copied(folder, tmp_path):
    model = trained_adapter(folder)
    model.add_adapter("mine", lora(init_lora_weights=False))
    model.set_adapter("mine")
    with pytest.raises(WrongReferenceError, match=r"copy of the adapter 'default'.*active adapter \(mine\)"):
        build("DPO", model, tmp_path).train()


# Reference log-probabilities that are computed before training


@pytest.fixture
def file_of_pairs(tmp_path):
    Dataset.from_list(rows("DPO")).to_json(tmp_path / "pairs.jsonl")
    return str(tmp_path / "pairs.jsonl")


def precomputing(file, model, tmp_path, **options):
    data = load_dataset("json", data_files=file, split="train", cache_dir=str(tmp_path / "cache"))
    return build("DPO", model, tmp_path, data=data, precompute_ref_log_probs=True, **options)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"truncation_mode": "keep_end", "max_length": 8}, {"truncation_mode": "keep_end", "max_length": 24}),
        ({}, {"ld_alpha": 0.3}),
    ],
)
def test_the_cache_is_of_rows_that_are_cut_alike(first, second, folder, file_of_pairs, tmp_path):
    for options in (first, second):
        trainer = precomputing(file_of_pairs, folder, tmp_path, **options)
        trainer.train()
        assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_the_cache_is_read_again(folder, file_of_pairs, tmp_path, monkeypatch):
    precomputing(file_of_pairs, folder, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(liger_trainer.LigerDPOTrainer, "compute_ref_log_probs", None)  # would be called
        trainer = precomputing(file_of_pairs, folder, tmp_path)
    trainer.train()  # where the first step may compute them again, on a CPU that rounds otherwise in other batches


def test_a_stale_cache(folder, file_of_pairs, tmp_path, monkeypatch):
    def of_other_rows(self, model, inputs):
        count = len(inputs["input_ids"]) // 2
        return torch.full((count,), -20.0), torch.full((count,), -30.0)

    with monkeypatch.context() as patched:
        patched.setattr(liger_trainer.LigerDPOTrainer, "compute_ref_log_probs", of_other_rows)
        trainer = precomputing(file_of_pairs, folder, tmp_path)
    with pytest.raises(WrongReferenceError, match=r"`precompute_ref_log_probs` are of other rows.*cleanup_cache_files"):
        trainer.train()


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
@pytest.mark.parametrize("off", [0.0, 0.3])
def test_a_cache_in_half_precision(kind, off, folder, tmp_path, monkeypatch):
    """Computed for one row at a time, it is the policy's up to rounding; 0.3 a row is more than that."""
    trainer_class = getattr(liger_trainer, f"Liger{kind}Trainer")
    compute = trainer_class.compute_ref_log_probs
    options = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 1 + (kind == "KTO"), "bf16": True}
    with monkeypatch.context() as patched:
        patched.setattr(
            trainer_class, "compute_ref_log_probs", lambda *args: tuple(each + off for each in compute(*args))
        )
        trainer = build(kind, folder, tmp_path, **options)
    if not off:
        trainer.train()
        return
    with pytest.raises(WrongReferenceError, match="`precompute_ref_log_probs` are of other rows"):
        trainer.train()


# Where TRL could make no reference


@pytest.mark.parametrize(("kind", "advice"), [("DPO", "give `ref_model`"), ("KTO", "give"), ("GRPO", "`beta=0.0`")])
def test_a_model_without_a_path(kind, advice, tmp_path):
    with pytest.raises(ValueError, match=rf"`model` has no path .*{advice}.*save it with"):
        build(kind, TINY_MODELS["llama"](), tmp_path)


def test_a_model_without_a_path_needs_none(tmp_path):
    model = TINY_MODELS["llama"]()
    build("DPO", model, tmp_path, more={"ref_model": copy.deepcopy(model)})
    build("GRPO", TINY_MODELS["llama"](), tmp_path, beta=0.0)
    build("GRPO", TINY_MODELS["llama"](), tmp_path, more={"peft_config": lora()})
    build("DPO", TINY_MODELS["llama"](), tmp_path, precompute_ref_log_probs=True)


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_a_reference_that_is_a_name(kind, folder, tmp_path):
    with pytest.raises(ValueError, match=r"`ref_model` is '.*', and must be a model: load it with `from_pretrained`"):
        build(kind, folder, tmp_path, more={"ref_model": str(folder)})


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_an_adapter_of_another_name(kind, tmp_path):
    model = get_peft_model(TINY_MODELS["llama"](), lora(), adapter_name="mine")
    with pytest.raises(
        ValueError, match="has the adapters 'mine', and TRL's reference is a copy of the one that is called"
    ):
        build(kind, model, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_several_active_adapters(kind, folder, tmp_path):
    """TRL leaves one of them active, so that the policy would be another one from the first step on."""
    model = get_peft_model(changed(folder, 0.0), lora(task_type="CAUSAL_LM", init_lora_weights=False))
    model.add_adapter("b", lora(task_type="CAUSAL_LM", init_lora_weights=False))
    model.base_model.set_adapter(["default", "b"])
    with pytest.raises(ValueError, match=r"2 active adapters \('default', 'b'\).*add_weighted_adapter"):
        build(kind, model, tmp_path)


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_an_adapter_of_the_name_of_trls_copy(kind, folder, tmp_path):
    model = get_peft_model(changed(folder, 0.0), lora(task_type="CAUSAL_LM"))
    model.add_adapter("ref", lora(task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"an adapter 'ref'.*delete_adapter\('ref'\)"):
        build(kind, model, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_that_was_resized_in_memory(kind, folder, tmp_path):
    model = changed(folder, 0.0)
    model.resize_token_embeddings(model.config.vocab_size + 12)
    with pytest.raises(WrongReferenceError, match=r"embeddings, and the policy \d+: the reference was loaded from"):
        build(kind, model, tmp_path)


def loss_and_order(trainer):
    """The loss of one batch, gradients by name, and of each forward, whether it has gradients, a cache and autocast."""
    model, order = trainer.model.train(), []

    def note(module, args, given):
        order.append((torch.is_grad_enabled(), given.get("use_cache", True), torch.is_autocast_enabled("cpu")))

    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    models = {model, trainer.ref_model or model}
    handles = [each.register_forward_pre_hook(note, with_kwargs=True) for each in models]
    loss = trainer.compute_loss(model, batch)
    for handle in handles:
        handle.remove()
    loss.backward()
    return loss, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}, order


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("DPO", {}), ("KTO", {}), ("DPO", {"bf16": True}), ("DPO", {"ld_alpha": 0.5}),
     ("DPO", {"gradient_checkpointing": True}), ("KTO", {"loss_type": "apo_zero_unpaired"})],
)  # fmt: skip
def test_the_reference_answers_before_the_policy(kind, options, adapted, folder, tmp_path):
    """In the order of TRL's loss the reference would run beside what the policy keeps; no bit depends on that."""
    found = []
    for is_first in (True, False):
        trainer = build(kind, folder, tmp_path, more={"peft_config": lora()} if adapted else {}, **options)
        assert trainer._may_be_first
        trainer._may_be_first, trainer._must_be_policy = is_first, False
        with torch.no_grad():  # so that the two differ
            for parameter in trainer.model.parameters():
                parameter += 1e-3 * parameter.requires_grad
        found.append(loss_and_order(trainer))
        assert not trainer.precompute_ref_logps
    (loss, gradients, order), (trls, gradients_of_trl, order_of_trl) = found
    assert [differentiated for differentiated, *_ in order].index(True) == len(order) - 1
    assert not order_of_trl[-1][0]
    assert sorted(order) == sorted(order_of_trl)
    assert torch.equal(loss, trls)
    assert len(gradients) > 2
    assert gradients.keys() == gradients_of_trl.keys()
    assert all(torch.equal(gradient, gradients_of_trl[name]) for name, gradient in gradients.items())


class Shifted:
    """A collator that adds a column of the user's own."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, rows):
        batch = self.inner(rows)
        positions = torch.arange(batch["input_ids"].shape[1]) + 1
        return {**batch, "position_ids": positions.expand_as(batch["input_ids"])}


def test_kto_leaves_columns_of_the_user_to_trl(folder, tmp_path):
    """TRL's `compute_ref_log_probs` of KTO gives a model the ids and the mask alone."""
    trainer = build("KTO", folder, tmp_path, loss_type="apo_zero_unpaired", remove_unused_columns=False)
    trainer.data_collator = Shifted(trainer.data_collator)
    loss, _, order = loss_and_order(trainer)
    assert [differentiated for differentiated, *_ in order] == [True, False]
    assert float(loss) == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_every_second_layer_is_checkpointed(kind, folder, tmp_path):
    """TRL has all layers checkpointed again behind the reference, those too that were not."""
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}
    trainer = build(kind, folder, tmp_path, **options)
    trainer.train()
    layers = trainer.model.get_decoder().layers
    assert len({layer.gradient_checkpointing for layer in layers}) == 2


@pytest.mark.parametrize(("kind", "name"), [("KTO", "_compute_kl_logps"), ("DPO", "compute_ref_log_probs")])
def test_methods_of_the_user_run_in_the_order_of_trl(kind, name, folder, tmp_path, monkeypatch):
    base = getattr(liger_trainer, f"Liger{kind}Trainer")
    monkeypatch.setattr(liger_trainer, base.__name__, type("Mine", (base,), {name: getattr(base, name)}))
    assert not build(kind, folder, tmp_path)._may_be_first


@pytest.mark.parametrize(
    ("version", "policy", "expected"),
    [(2, MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16), None),
     (2, MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.float32), torch.float32), (2, None, None),
     (1, MixedPrecision(torch.bfloat16), None)],
)  # fmt: skip
def test_results_of_a_model_keep_their_dtype_under_fsdp2(version, policy, expected, folder, tmp_path):
    trainer = build("DPO", folder, tmp_path)
    plugin = SimpleNamespace(fsdp_version=version, mixed_precision_policy=policy)
    compiles = trainer.accelerator.state.dynamo_plugin
    trainer.accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin, dynamo_plugin=compiles))
    with mock.patch("transformers.Trainer.create_accelerator_and_postprocess"):
        trainer.create_accelerator_and_postprocess()
    changed = plugin.mixed_precision_policy
    assert getattr(changed, "output_dtype", None) == expected
    assert getattr(changed, "param_dtype", None) == getattr(policy, "param_dtype", None)
    assert version == 2 or changed is policy


def test_a_reference_that_meets_cut_images_first_says_what_trl_says(folder, tmp_path, monkeypatch):
    def fails(*args):
        raise ValueError("Image features and image tokens do not match, tokens: 1, features: 2")

    trainer = build("DPO", folder, tmp_path, max_length=8)
    monkeypatch.setattr(trainer, "compute_ref_log_probs", fails)
    with pytest.raises(ValueError, match=r"The current `max_length` \(8\) is too short"):
        loss_and_order(trainer)


def test_which_metric_is_not_0():
    assert (
        _first_not_0({"rewards/chosen": [1.0, 0.0], "rewards/rejected": [-1e-9], "kl": [5.0]}) == "`rewards/rejected`"
    )
    assert _first_not_0({"rewards/chosen": [0.0], "kl": [5.0]}) is None
    assert _first_not_0({"kl": [0.0, 1e-9]}) == "`kl`"
    assert _first_not_0({}) is None
