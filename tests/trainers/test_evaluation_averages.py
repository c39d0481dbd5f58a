"""Over what an evaluation averages, with a last batch that is smaller: as the stock trainers do, for each data set.

The loss is a mean over rows: that of a batch counts as often as it has rows (pairs are one). TRL's metrics are means
over batches, whatever their size.
"""

import math

import pytest

from tests.trainers.builders import causal
from tests.trainers.parity import KINDS, OTHER_KINDS, build, save_models
from tests.trainers.tiny import llama, token_rows

pytestmark = pytest.mark.filterwarnings("ignore")

BATCH = 3
TIMES = ("runtime", "per_second", "_time")
OTHER_MEANS = ("eval_logits/chosen", "eval_logits/rejected")  # of ORPO and CPO: over tokens, not padding
ALL = {**KINDS, **OTHER_KINDS}
GENERATED = {"num_generations": 4, "per_device_eval_batch_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))["llama"]


def trainer_of(kind, ours, folder, tmp_path, sets=None):
    rows = ALL[kind][0]
    options = GENERATED if kind in ("GRPO", "RLOO") else {"per_device_eval_batch_size": BATCH}
    return build(kind, ours, tmp_path, folder, eval_dataset=rows(5) if sets is None else sets(rows), **options)


def compared(metrics, kind):
    """What both log: all but times, and the perplexity, which is ours."""
    left_out = OTHER_MEANS if kind in ("ORPO", "CPO") else ()
    return {
        key: value
        for key, value in metrics.items()
        if not key.endswith(TIMES) and not key.endswith("perplexity") and key not in left_out
    }


@pytest.mark.parametrize("kind", ALL)
def test_a_smaller_last_batch_is_weighted_as_by_the_stock_trainer(kind, folder, tmp_path):
    ours, stock = (compared(trainer_of(kind, own, folder, tmp_path).evaluate(), kind) for own in (True, False))
    assert len(stock) >= 5
    assert ours == pytest.approx(stock, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("kind", sorted(ALL.keys() - {"ORPO", "CPO"}))  # which fail on several data sets
def test_so_are_several_data_sets(kind, folder, tmp_path):
    def sets(rows):
        return {"four": rows(4), "seven": rows(7)}

    found = [compared(trainer_of(kind, ours, folder, tmp_path, sets).evaluate(), kind) for ours in (True, False)]
    assert {"eval_four_loss", "eval_seven_loss"} <= found[0].keys()
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-5)


def losses_by_batch(trainer, monkeypatch):
    """A list that evaluations of `trainer` fill: the loss of each batch."""
    losses, step = [], trainer.prediction_step

    def prediction_step(*args, **kwargs):
        result = step(*args, **kwargs)
        losses.append(result[0].mean().item())
        return result

    monkeypatch.setattr(trainer, "prediction_step", prediction_step)
    return losses


@pytest.mark.parametrize("kind", sorted(ALL.keys() - {"GRPO", "RLOO"}))
def test_the_loss_is_a_mean_over_rows(kind, folder, tmp_path, monkeypatch):
    trainer = trainer_of(kind, True, folder, tmp_path)
    losses = losses_by_batch(trainer, monkeypatch)
    found = trainer.evaluate()["eval_loss"]
    assert len(losses) == 2
    assert found == pytest.approx((3 * losses[0] + 2 * losses[1]) / 5, rel=1e-5)
    assert found != pytest.approx(sum(losses) / 2, rel=1e-5) or math.isclose(*losses, rel_tol=1e-4)


def test_the_loss_of_a_model_is_a_mean_over_rows_too(tmp_path, monkeypatch):
    trainer = causal(tmp_path, llama(), eval_dataset=token_rows(5), per_device_eval_batch_size=BATCH)
    losses = losses_by_batch(trainer, monkeypatch)
    found = trainer.evaluate()["eval_loss"]
    assert found == pytest.approx((3 * losses[0] + 2 * losses[1]) / 5, rel=1e-6)
    assert found != pytest.approx(sum(losses) / 2, rel=1e-5)


def test_metrics_are_means_over_batches(folder, tmp_path):
    trainer = trainer_of("DPO", True, folder, tmp_path)
    rows = trainer.eval_dataset
    whole = trainer.evaluate()
    first, last = (trainer.evaluate(rows.select(range(*part))) for part in ((0, 3), (3, 5)))
    for name in ("logps/chosen", "logps/rejected"):
        values = first[f"eval_{name}"], last[f"eval_{name}"]
        assert whole[f"eval_{name}"] == pytest.approx(sum(values) / 2, rel=1e-5)
        assert values[0] != pytest.approx(values[1], rel=1e-3)
