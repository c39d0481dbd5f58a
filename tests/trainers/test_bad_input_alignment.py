"""Bad input to the preference and policy trainers: an error that says what to do, or finite results."""

import math

import pytest
import torch
import trl
from datasets import Dataset
from trl.experimental.cpo import CPOConfig

import liger_trainer
from liger_trainer.configs.loss_types import known_loss_types
from tests.tiny_models import TINY_MODELS
from tests.trainers.fake_vllm import VLLMServer, satisfy_import_gates
from tests.trainers.tiny import COMMON, WORDS, logged, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

ARGUMENTS = {**COMMON, "max_steps": 2, "bf16": False, "gradient_checkpointing": False, "kernel_report": False}
GENERATION = {"num_generations": 4, "max_completion_length": 6}
LONG = " ".join(WORDS)


def pairs(chosen="the cat", rejected="a dog ran", prompt=None):
    rows = ({"prompt": prompt or WORDS[i % 4] + " ", "chosen": chosen, "rejected": rejected} for i in range(8))
    return Dataset.from_list(list(rows))


def unpaired(labels, completion="the cat"):
    rows = ({"prompt": WORDS[i % 4] + " ", "completion": completion, "label": bool(x)} for i, x in enumerate(labels))
    return Dataset.from_list(list(rows))


def prompts():
    return Dataset.from_list([{"prompt": words} for words in WORDS * 2])


def lengths(completions, **kwargs):
    return [float(len(text)) for text in completions]


def build(kind, model, data, tmp_path, config=None, more=None, **options):
    own = config is None
    config = config or getattr(liger_trainer, f"Liger{kind}Config")
    settings = {key: value for key, value in ARGUMENTS.items() if own or key != "kernel_report"}
    args = config(output_dir=str(tmp_path), **{**settings, **options})
    return getattr(liger_trainer, f"Liger{kind}Trainer")(
        model, args=args, train_dataset=data, processing_class=tokenizer(), **(more or {})
    )


def policy(kind, model, tmp_path, reward=lengths, more=None, **options):
    more = {"reward_funcs": reward, **(more or {})}
    return build(kind, model, prompts(), tmp_path, more=more, **{**GENERATION, **options})


def assert_trains_to_finite_numbers(trainer, steps=2):
    trainer.train()
    logs = logged(trainer)
    assert sum("loss" in log for log in logs) == steps
    for log in logs:
        for key, value in log.items():
            assert value is None or math.isfinite(value), key
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


# Pairs


@pytest.mark.parametrize("kind", ["DPO", "ORPO", "CPO"])
@pytest.mark.parametrize(("chosen", "rejected"), [("", "a dog"), ("", ""), ("a " * 20, "b"), ("b", "a " * 20)])
def test_empty_and_unequal_completions(kind, chosen, rejected, folder, tmp_path):
    model = folder if kind == "DPO" else TINY_MODELS["llama"]()
    assert_trains_to_finite_numbers(build(kind, model, pairs(chosen, rejected), tmp_path))


@pytest.mark.parametrize(("kind", "options"), [("ORPO", {}), ("CPO", {"loss_type": "simpo"})])
def test_completion_cut_away_where_the_loss_averages(kind, options, tmp_path):
    with pytest.raises(ValueError, match=r"`chosen` has no token left.*'the cat sat.*`max_length=8`.*Increase"):
        build(kind, TINY_MODELS["llama"](), pairs(prompt=LONG), tmp_path, max_length=8, **options)


def test_completion_cut_away_where_the_loss_sums(tmp_path):
    """The pair says nothing: in TRL the likelihood of no token is NaN, and the model with it."""
    trainer = build("CPO", TINY_MODELS["llama"](), pairs(prompt=LONG), tmp_path, max_length=8)
    assert_trains_to_finite_numbers(trainer)
    assert [log["nll_loss"] for log in logged(trainer)[:2]] == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_every_completion_cut_away(kind, folder, tmp_path):
    data = pairs(prompt=LONG) if kind == "DPO" else unpaired([1, 0] * 4).map(lambda row: {"prompt": LONG})
    with pytest.raises(ValueError, match=r"`train_dataset` has no rows.*Increase `max_length`"):
        build(kind, folder, data, tmp_path, max_length=8)


def test_token_beyond_the_vocabulary(tmp_path):
    with pytest.raises(ValueError, match=r"`chosen_labels` holds \d+.*vocabulary has 16 entries"):
        build("ORPO", TINY_MODELS["llama"](vocab_size=16), pairs(), tmp_path).train()


# KTO's two classes


@pytest.mark.parametrize("labels", [[1] * 8, [0] * 8, [1] * 4 + [0] * 4])
def test_class_missing_in_a_batch(labels, folder, tmp_path):
    trainer = build("KTO", folder, unpaired(labels), tmp_path)
    assert_trains_to_finite_numbers(trainer)


def test_empty_unpaired_completion(folder, tmp_path):
    assert_trains_to_finite_numbers(build("KTO", folder, unpaired([1, 0] * 4, completion=""), tmp_path))


# Rewards and completions


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("every", [1, 2])
def test_reward_of_none_moves_nothing(kind, every, folder, tmp_path):
    """TRL leaves such completions out of the group; a group of them alone has no advantage."""

    def reward(completions, **kwargs):
        return [None if i % every == 0 else float(len(text)) for i, text in enumerate(completions)]

    trainer = policy(kind, folder, tmp_path, reward)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    assert_trains_to_finite_numbers(trainer)
    if every == 1 and kind == "GRPO":  # RLOO's reward has a KL term besides
        assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_wrong_number_of_rewards(kind, folder, tmp_path):
    with pytest.raises(ValueError, match=r"`?'?one_reward'?`?.*returned 1 rewards"):
        policy(kind, folder, tmp_path, one_reward).train()


def one_reward(completions, **kwargs):
    return [1.0]


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_every_row_masked(kind, folder, tmp_path):
    """All completions end at the limit, and are left out of the loss."""
    trainer = policy(kind, folder, tmp_path, mask_truncated_completions=True, max_completion_length=1)
    assert_trains_to_finite_numbers(trainer)


def test_rollout_without_tokens(folder, tmp_path):
    def rollout(prompts, trainer):
        completions = [[7, 2] if i else [] for i in range(len(prompts))]
        logprobs = [[-1.0] * len(ids) for ids in completions]
        return {"prompt_ids": [[5, 6]] * len(prompts), "completion_ids": completions, "logprobs": logprobs}

    with pytest.raises(ValueError, match=r"`rollout_func` returned no token for sample 0 of 4"):
        policy("GRPO", folder, tmp_path, more={"rollout_func": rollout}).train()


class SilentServer(VLLMServer):
    """Ends every completion before its first token, as a stop string can."""

    def _choice(self, prompt, body):
        logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        return {"prompt_token_ids": prompt, "token_ids": [], "logprobs": logprobs}


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_generation_without_tokens(kind, folder, tmp_path, monkeypatch):
    with SilentServer(TINY_MODELS["llama"]()).running() as server:
        satisfy_import_gates(monkeypatch, server)
        vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        trainer = policy(kind, folder, tmp_path, **vllm)
        with pytest.raises(ValueError, match=r"vLLM returned no token for sample 0 of 4"):
            trainer.train()
        trainer.vllm_generation.vllm_client.close_communicator()


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_prompt_beyond_the_embedding(kind, tmp_path):
    with pytest.raises(ValueError, match=r"`input_ids` holds \d+.*embedding has 16 entries"):
        policy(kind, TINY_MODELS["llama"](vocab_size=16), tmp_path, beta=0.0).train()


# Reference models


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_reference_with_another_vocabulary(kind, folder, tmp_path):
    data = pairs() if kind == "DPO" else unpaired([1, 0] * 4)
    small, padded = TINY_MODELS["llama"](vocab_size=64), TINY_MODELS["llama"](vocab_size=192)
    match = r"reference model has a vocabulary of 64, the model one of 128 and the tokenizer \d+ tokens"
    with pytest.raises(ValueError, match=match):
        build(kind, folder, data, tmp_path, more={"ref_model": small})
    assert_trains_to_finite_numbers(build(kind, folder, data, tmp_path, more={"ref_model": padded}))


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_reference_loaded_from_before_the_embeddings_were_resized(kind, tmp_path):
    TINY_MODELS["llama"](vocab_size=64).save_pretrained(tmp_path / "model")
    model = TINY_MODELS["llama"]()
    model.config._name_or_path = str(tmp_path / "model")
    with pytest.raises(ValueError, match=r"vocabulary of 64.*save a model with resized embeddings first"):
        policy(kind, model, tmp_path, beta=0.1)


# Loss types


def test_known_loss_types_are_those_of_trl():
    assert known_loss_types(trl.GRPOConfig) == ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
    assert known_loss_types(CPOConfig) == ["sigmoid", "hinge", "ipo", "simpo", "alphapo"]
    assert known_loss_types(trl.KTOConfig) == ["kto", "apo_zero_unpaired"]
    assert known_loss_types(trl.RLOOConfig) == []
    dpo = known_loss_types(trl.DPOConfig)
    assert len(dpo) == 15
    assert {"sigmoid", "sigmoid_norm", "sft"} <= set(dpo)


@pytest.mark.parametrize(
    ("kind", "given", "known"),
    [
        ("DPO", "sigmoidal", "sigmoid_norm"),
        ("DPO", ["sigmoid", "stf"], "sft"),
        ("KTO", "ktoo", "kto"),
        ("GRPO", "grpoo", "dr_grpo"),
        ("CPO", "simpoo", "simpo"),
        ("SFT", "dtf", "dft"),
    ],
)
def test_unknown_loss_type(kind, given, known, tmp_path):
    wrong = given if isinstance(given, str) else given[1]
    with pytest.raises(ValueError, match=rf"`loss_type` is '{wrong}'; it must be one of .*'{known}'"):
        getattr(liger_trainer, f"Liger{kind}Config")(output_dir=str(tmp_path), **ARGUMENTS, loss_type=given)


def test_unknown_loss_type_in_a_configuration_of_trl(folder, tmp_path):
    with pytest.raises(ValueError, match=r"`loss_type` is 'ktoo'; it must be one of 'kto'"):
        build("KTO", folder, unpaired([1, 0] * 4), tmp_path, config=trl.KTOConfig, loss_type="ktoo")
