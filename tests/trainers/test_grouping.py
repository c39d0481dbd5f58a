"""Completions of a prompt are put next to each other: the same draw, the same samples, the same update."""

import logging

import pytest
import torch
from trl import GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict

from liger_trainer import LigerGRPOTrainer
from liger_trainer.trainers.grouping import _grouping_shuffle, _normalised_by_micro_batch
from tests.trainers.parity import assert_close_logs, assert_close_weights, build, reward
from tests.trainers.tiny import logged

pytestmark = pytest.mark.filterwarnings("ignore")

# A micro-batch has room for the four completions of one prompt, which end after different numbers of tokens.
STEPS = {
    "gradient_accumulation_steps": 2, "max_steps": 3, "adam_epsilon": 1e-2, "learning_rate": 1e-2, "beta": 0.04,
    "num_generations": 4, "max_completion_length": 24,
}  # fmt: skip
OF_MICRO_BATCHES = ("entropy", "kl", *(f"clip_ratio/{name}" for name in ("low_min", "high_max")))
OF_MICRO_BATCHES += (*(f"clip_ratio/{name}_mean" for name in ("low", "high", "region")), "cispo_clip_ratio")
"""Means over the tokens of a micro-batch, and the extremes in it, which are averaged over the step."""

LOSSES = [
    *(("GRPO", loss_type) for loss_type in ("cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo")),
    ("RLOO", None),
]


def trained(kind, folder, model, share_prompt=None, **settings):
    """A trainer after its steps, the texts it scored, and the (prompt, completion) rows of each micro-batch."""
    scored, micro_batches = [], []

    def recorded(prompts, completions, **columns):
        scored.extend(zip(prompts, completions, strict=True))
        return reward(completions)

    trainer = build(kind, True, folder, model, **{**STEPS, **settings}, reward_funcs=recorded)
    trainer.args.share_prompt = share_prompt
    compute_loss = trainer.compute_loss

    def observed(model, inputs, *args, **kwargs):
        rows = zip(inputs["prompt_ids"].tolist(), inputs["completion_ids"].tolist(), strict=True)
        micro_batches.append([(tuple(prompt), tuple(completion)) for prompt, completion in rows])
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = observed
    trainer.train()
    return trainer, scored, micro_batches


def prompts_met(micro_batches):
    """How many different prompts the micro-batches have, each counted by itself."""
    return sum(len({prompt for prompt, _ in rows}) for rows in micro_batches)


@pytest.mark.parametrize("together", [1, 2, 4])
def test_order_is_the_draw_of_trl_and_then_by_prompt(together):
    steps, rows, group = 4, 24, 6
    labels = torch.arange(rows)
    prompts = (labels // group).clamp(max=2)[:, None] * torch.tensor([0, 1, 1])
    batch = {
        "num_images": None, "prompt_ids": prompts, "prompt_mask": (labels // group < 3)[:, None].long().expand(-1, 3),
        "advantages": labels.float(), "num_items_in_batch": torch.tensor(7), "texts": [str(row) for row in range(rows)],
    }  # fmt: skip
    torch.manual_seed(5)
    drawn = shuffle_sequence_dict(batch)["advantages"].long().tolist()
    state = torch.get_rng_state()
    expected = []
    window = rows // steps * together
    for start in range(0, rows, window):
        of_step = drawn[start : start + window]
        for label in of_step:
            expected += [other for other in of_step if other // group == label // group and other not in expected]

    torch.manual_seed(5)
    found = _grouping_shuffle(shuffle_sequence_dict, steps, together)(batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert found["advantages"].tolist() == expected
    assert found["texts"] == [str(label) for label in expected]
    assert torch.equal(found["prompt_ids"], batch["prompt_ids"][expected])
    assert torch.equal(found["prompt_mask"], batch["prompt_mask"][expected])
    assert found["num_items_in_batch"] == 7
    assert found["num_images"] is None
    assert found.keys() == batch.keys()

    torch.manual_seed(5)
    pictured = _grouping_shuffle(shuffle_sequence_dict, steps, together)({**batch, "pixel_values": list(labels)})
    assert pictured["advantages"].tolist() == drawn


@pytest.mark.parametrize(("kind", "loss_type"), LOSSES, ids=[loss_type or kind for kind, loss_type in LOSSES])
@pytest.mark.parametrize("steps_per_generation", [2, 4])
def test_update_is_the_same_sum(kind, loss_type, steps_per_generation, tmp_path, folders):
    settings = {"steps_per_generation": steps_per_generation, **({"loss_type": loss_type} if loss_type else {})}
    apart, sampled, micro_batches = trained(kind, tmp_path / "apart", folders["llama"], padding_free=False, **settings)
    grouped, sampled_again, by_prompt = trained(kind, tmp_path / "grouped", folders["llama"], **settings)
    assert sampled_again == sampled
    assert prompts_met(by_prompt) < prompts_met(micro_batches)
    if steps_per_generation == 2:  # whole groups meet in one step
        assert prompts_met(by_prompt) == len(by_prompt) == 6
    for step in range(0, 6, 2):  # no completion is moved to another optimizer step
        pairs = zip(by_prompt[step] + by_prompt[step + 1], micro_batches[step] + micro_batches[step + 1], strict=True)
        found, expected = zip(*pairs, strict=True)
        assert sorted(found) == sorted(expected)
    assert_close_logs(logged(grouped), logged(apart), but=OF_MICRO_BATCHES)
    assert_close_weights(grouped, apart, 1e-6)


AVERAGED = {
    "bnpo": {"loss_type": "bnpo"},
    "entropy_bonus": {"entropy_coef": 1e3},
    "entropy_quantile": {"top_entropy_quantile": 0.3},
    "router_aux_loss": {"model": "mixtral", "router_aux_loss_coef": 10.0},
}


@pytest.mark.parametrize("name", AVERAGED)
def test_what_a_micro_batch_normalises_is_grouped_on_request(name, tmp_path, folders, caplog):
    settings = dict(AVERAGED[name])
    model = folders[settings.pop("model", "llama")]
    with caplog.at_level(logging.INFO, "liger_trainer"):
        apart, _, micro_batches = trained("GRPO", tmp_path / "default", model, **settings)
    assert caplog.text.count("`share_prompt=True` puts them together") == 1
    grouped, _, by_prompt = trained("GRPO", tmp_path / "asked", model, share_prompt=True, **settings)
    assert prompts_met(by_prompt) < prompts_met(micro_batches)
    norms = [[log["grad_norm"] for log in logged(trainer) if "grad_norm" in log] for trainer in (apart, grouped)]
    assert norms[0][0] != pytest.approx(norms[1][0], rel=1e-4)  # so TRL's numbers are those without grouping


def test_other_terms_that_keep_completions_where_they_are(tmp_path, folders, monkeypatch):
    def own_loss(self, model, inputs):
        return GRPOTrainer._compute_loss(self, model, inputs)

    trainer = build("GRPO", True, tmp_path, folders["llama"])
    assert _normalised_by_micro_batch(trainer) is None
    with monkeypatch.context() as patch:
        patch.setattr(LigerGRPOTrainer, "_compute_loss", own_loss, raising=False)
        assert _normalised_by_micro_batch(trainer) == "a loss of your own"
    trainer._z_loss = object()
    assert _normalised_by_micro_batch(trainer) == "the z-loss of the routers"
    assert not trainer._groups_completions


def test_switched_off(tmp_path, folders):
    _, _, by_prompt = trained("GRPO", tmp_path / "grouped", folders["llama"])
    _, _, micro_batches = trained("GRPO", tmp_path / "off", folders["llama"], share_prompt=False)
    assert prompts_met(by_prompt) < prompts_met(micro_batches)
