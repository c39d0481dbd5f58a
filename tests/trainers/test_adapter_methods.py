"""Methods of PEFT that need more than gradients: AdaLoRA's term of the loss, and its budget of ranks."""

import copy
import logging

import pytest
import torch
from datasets import Dataset
from peft import (
    AdaLoraConfig,
    AdaLoraModel,
    CartridgeConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    ShadowConfig,
    get_peft_model,
)
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback

from liger_trainer.compat.peft import adds_to_loss
from liger_trainer.trainers.adapter_methods import TRAINED_FILE, added_terms, tuner_of
from tests.trainers import parity
from tests.trainers.builders import causal, dpo, sft
from tests.trainers.parity import assert_close_weights
from tests.trainers.tiny import llama, logged, token_rows

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 8


def adalora(**options):
    torch.manual_seed(7)
    config = {
        "task_type": "CAUSAL_LM",
        "init_r": 6,
        "target_r": 2,
        "tinit": 1,
        "tfinal": 2,
        "deltaT": 1,
        "total_step": STEPS,
        **options,
    }
    return get_peft_model(llama(), AdaLoraConfig(target_modules=["q_proj", "v_proj"], orth_reg_weight=0.5, **config))


def of_ids(folder, model, **options):
    data = Dataset.from_list(
        [{key: row[key].tolist() for key in ("input_ids", "labels")} for row in token_rows(length=12)]
    )
    return sft(folder, model, data=data, dataset_kwargs={"skip_prepare_dataset": True}, **options)


def orthogonality(model):
    """The term, from the formula of the paper."""
    norms = []
    for name, weight in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            product = weight @ weight.T if "lora_A" in name else weight.T @ weight
            norms.append(torch.linalg.matrix_norm(product - torch.eye(len(product))))
    return 0.5 * torch.stack(norms).mean()


def pruned(model):
    ranks = torch.cat([weight.flatten() for name, weight in model.named_parameters() if "lora_E" in name])
    return int((ranks == 0).sum()), len(ranks)


def step_of(trainer):
    """The loss of one micro-batch, and the gradients of all that is trained."""
    trainer.model.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    return loss.detach(), {
        name: weight.grad for name, weight in trainer.model.named_parameters() if weight.requires_grad
    }


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (of_ids, {}),
        (of_ids, {"loss_type": "dft"}),
        (of_ids, {"label_smoothing_factor": 0.1}),
        (of_ids, {"use_liger_kernel": False}),
        (causal, {"label_smoothing_factor": 0.1}),
        (causal, {}),
        (dpo, {}),
    ],
)
def test_the_term_of_adalora_is_trained(build, options, tmp_path):
    """The loss is the one without the term, plus the term; so are its gradients."""
    results = []
    for weight in (0.5, 0.0):
        model = adalora()
        model.peft_config["default"].orth_reg_weight = weight
        results.append(step_of(build(tmp_path, model, **options, **({"reference": llama()} if build is dpo else {}))))
    model = adalora()
    term = orthogonality(model)
    (loss, gradients), (without, others) = results
    torch.testing.assert_close(loss, without + term.detach(), rtol=1e-5, atol=1e-6)
    term.backward()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            expected = others[name] + (0 if weight.grad is None else weight.grad)
            torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-6)


def test_under_accumulation_it_is_trained_once(tmp_path):
    """As the loss of a step, to which every micro-batch adds its part."""
    norms = []
    for steps in (1, 2):
        options = {"gradient_accumulation_steps": steps, "per_device_train_batch_size": 8 // steps, "max_steps": 1}
        trainer = of_ids(tmp_path, adalora(total_step=20), **options)
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_the_outputs_keep_their_loss():
    model = adalora().train()
    batch = {name: torch.stack([row[name] for row in token_rows(2)]) for name in token_rows(1)[0]}
    expected = model(**batch).loss
    with added_terms(model.base_model, without_labels=False) as terms:
        found = model(**batch).loss
        with torch.no_grad():
            model(**batch)
    assert len(terms) == 1
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(terms[0], orthogonality(model))
    assert "forward" not in vars(model.get_base_model())


def test_which_methods_add_to_the_loss():
    plain = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    assert not adds_to_loss(plain.base_model)
    assert adds_to_loss(adalora().base_model)
    assert adds_to_loss(get_peft_model(llama(), ShadowConfig(target_modules=["q_proj"])).base_model)


@pytest.mark.parametrize(("kind", "trained"), [("SFT", True), ("DPO", False)])
def test_shadow_s_loss_of_labels_is_trained_with_theirs_alone(kind, trained, tmp_path, caplog):
    """A rejected answer is no label. The batches stay padded: Shadow's network sees them before ours packs them."""
    losses = []
    for weight in (0.5, 0.0):
        torch.manual_seed(0)
        config = ShadowConfig(task_type="CAUSAL_LM", shadow_dropout=0.0, auxiliary_loss_weight=weight)
        trainer = parity.build(kind, True, tmp_path, llama(), peft_config=config)
        assert trainer._packing is None
        losses.append(step_of(trainer)[0])
    term = 0.5 * trainer.model.base_model.last_shadow_loss if trained else 0.0
    torch.testing.assert_close(losses[0], losses[1] + term)
    assert ("its term is left out" in caplog.text) is not trained


PROMPTS = {
    "prompt": PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "prefix": PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "encoder": PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, task_type="CAUSAL_LM"),
    "cartridge": CartridgeConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "GRPO"])
@pytest.mark.parametrize("name", PROMPTS)
def test_a_model_with_prompts_is_no_tuner(name, kind, tmp_path, caplog):
    """PEFT calls the model itself its `base_model`; GPT-2 has no `model` inside."""
    logs = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=4, pad_token_id=0))
        model.generation_config.eos_token_id = 2
        trainer = parity.build(kind, ours, tmp_path / str(ours), model, peft_config=PROMPTS[name])
        assert not ours or (tuner_of(trainer.model), trainer._tuner_of_terms) == (None, None)
        trainer.train()
        logs.append(logged(trainer))
    parity.assert_close_logs(logs[1], logs[0], but=["rewards/accuracies"], absolute=parity.OF_DIFFERENCES)
    assert "its term is left out" not in caplog.text


def test_which_modules_are_tuners():
    model = adalora()
    assert tuner_of(model) is model.base_model
    assert tuner_of(model.get_base_model()) is None
    assert tuner_of(get_peft_model(llama(), PROMPTS["prompt"])) is None


def test_a_term_that_peft_adds_in_another_way_is_not_lost_without_a_word(tmp_path, monkeypatch):
    elsewhere = [AdaLoraModel.forward]
    model = adalora()
    monkeypatch.setattr(AdaLoraModel, "forward", lambda self, *args, **kwargs: elsewhere[0](self, *args, **kwargs))
    assert not adds_to_loss(model.base_model)
    with pytest.raises(ImportError, match=r"AdaLoraModel.forward` no longer uses `loss`, .*the term that AdaLoRA"):
        of_ids(tmp_path, model)


@pytest.mark.parametrize("build", [causal, of_ids])
def test_ranks_are_pruned_down_to_the_target(build, tmp_path):
    trainer = build(tmp_path, adalora(), max_steps=STEPS)
    trainer.train()
    zero, ranks = pruned(trainer.model)
    assert ranks == 24
    assert zero == 16  # 2 of 6 ranks stay, on average over 4 layers
    assert "update_and_allocate" not in vars(trainer.model.base_model)


class Own(TrainerCallback):
    """What users had to write."""

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        model.base_model.update_and_allocate(state.global_step)


@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_called_twice(late, tmp_path):
    stock = causal(tmp_path, adalora(), trainer_class=Trainer, callbacks=[Own()], max_steps=STEPS)
    ours = causal(tmp_path, adalora(), max_steps=STEPS, **({} if late else {"callbacks": [Own()]}))
    if late:
        ours.add_callback(Own())
    stock.train()
    ours.train()
    assert_close_weights(ours, stock, tolerance=1e-5)


def test_a_schedule_that_is_longer_than_the_training(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        causal(tmp_path, adalora(total_step=20), max_steps=2).train()
    assert "`total_step` of the adapters is 20, and the training has 2 steps" in caplog.text


@pytest.mark.parametrize("at", [3, 7])  # before the last pruning, and after it
def test_a_resumed_run_has_the_same_ranks(at, tmp_path):
    options = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1}
    whole = causal(tmp_path / "whole", adalora(), **options)
    whole.train()
    resumed = causal(tmp_path / "resumed", adalora(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{at}"))
    assert_close_weights(resumed, whole, tolerance=0)


@pytest.mark.parametrize(
    "config",
    [
        PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16, prefix_projection=True),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    ],
    ids=["p-tuning", "projected prefix", "prefix", "prompt"],
)
def test_a_resumed_run_has_the_same_prompt(config, tmp_path):
    """PEFT's file has what the encoder of a prompt computes, and not the encoder."""

    def adapted():
        torch.manual_seed(3)
        return get_peft_model(llama(), copy.deepcopy(config))

    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1}
    whole = causal(tmp_path / "whole", adapted(), **options)
    whole.train()
    resumed = causal(tmp_path / "resumed", adapted(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_close_weights(resumed, whole, tolerance=0)


def test_a_checkpoint_without_the_ranks_says_so(tmp_path, caplog):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    causal(tmp_path, adalora(), **options).train()
    checkpoint = tmp_path / "checkpoint-1"
    (checkpoint / TRAINED_FILE).unlink()
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        causal(tmp_path, adalora(), **options)._load_trained(str(checkpoint))
    assert f"has no {TRAINED_FILE}" in caplog.text


def test_the_best_model_has_its_own_ranks(tmp_path):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    options = {**best, "save_steps": 1, "max_steps": STEPS, "learning_rate": 1.0}
    trainer = causal(tmp_path, adalora(), eval_dataset=token_rows(n=4), **options)
    trainer.train()
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert losses[-1] > min(losses)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-5)


def test_a_term_that_peft_itself_leaves_out(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        causal(tmp_path, adalora(task_type=None))
    assert "`task_type` of the adapters is None" in caplog.text
