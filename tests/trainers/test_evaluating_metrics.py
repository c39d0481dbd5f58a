"""Metrics of an evaluation: those of the stock Trainer, without its logits, and those of all tokens."""

from __future__ import annotations

import logging
import math

import peft
import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer

from liger_trainer.head import DeferredLogits, warn_once
from liger_trainer.trainers.trainer import LigerTrainer
from tests.calls import created_sizes
from tests.tiny_models import TINY_MODELS
from tests.trainers.builders import causal, sft
from tests.trainers.tiny import llama, mixtral, text_dataset, token_rows, tokenizer

VOCAB, ROWS, LENGTH, BATCH = 128, 5, 10, 4
MEMORY = ROWS * VOCAB * 4
ONLY_THE_HEAD = {
    **dict.fromkeys(("attention", "rope", "rms_norm", "swiglu", "geglu", "lora", "experts", "router"), False),
    "logits_memory": MEMORY,
}  # the other kernels round differently
OWN = ("eval_perplexity", "eval_mean_token_accuracy")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _nothing_announced():
    warn_once._said.clear()


def log_probs(logits, labels):
    logits = logits[0] if isinstance(logits, tuple) else logits
    chosen = logits[:, :-1].float().log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0)).squeeze(-1)
    return chosen.masked_fill(labels[:, 1:] == -100, 0.0)


PREPROCESS = {
    "argmax": lambda logits, labels: logits.argmax(dim=-1),
    "of a tuple": lambda logits, labels: (logits[0] if isinstance(logits, tuple) else logits).argmax(-1),
    "top-k": lambda logits, labels: torch.topk(logits, 5, dim=-1).indices,
    "log-probabilities": log_probs,
    "both": lambda logits, labels: (logits[:, :-1].argmax(-1), log_probs(logits, labels)),
    "last token": lambda logits, labels: logits[:, -1],
    "slice of the vocabulary": lambda logits, labels: logits[..., :10],
    "anything else": lambda logits, labels: logits.sort(-1).indices[..., -3:] + logits.std(-1, keepdim=True) * 0,
    "the logits": lambda logits, labels: logits,
}


def compute_metrics(prediction):
    """A number of each position's kind of prediction, labels and all."""
    predictions = prediction.predictions
    arrays = predictions if isinstance(predictions, tuple) else (predictions,)
    metrics = {"labels": float((prediction.label_ids != -100).mean())}
    for place, array in enumerate(arrays):
        weights = torch.linspace(-1, 1, array.size, dtype=torch.float64).view(array.shape).numpy()
        metrics |= {f"sum{place}": float((array * weights).sum()), f"size{place}": array.size}
    return metrics


def build(folder, model, ours=True, rows=None, **options):
    options = {"eval_dataset": token_rows(10) if rows is None else rows, "per_device_eval_batch_size": BATCH, **options}
    if not ours:
        return causal(folder, model, Trainer, **options)
    return causal(folder, model, liger_kernel_config=ONLY_THE_HEAD, **options)


def evaluated(folder, make_model, name, **options):
    """Our metrics and the stock trainer's, after the preprocessing of that name."""
    options |= {"compute_metrics": compute_metrics, "preprocess_logits_for_metrics": PREPROCESS[name]}
    return [build(folder, make_model(), ours, **options).evaluate() for ours in (True, False)]


def numbers(metrics):
    return {
        key: value
        for key, value in metrics.items()
        if not key.endswith(("per_second", "runtime", "preparation_time", *OWN))
    }


def assert_equal_metrics(ours, stock, relative=1e-6):
    assert numbers(ours) == pytest.approx(numbers(stock), rel=relative, abs=relative)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("name", PREPROCESS)
def test_metrics_of_the_stock_trainer(name, family, tmp_path):
    assert_equal_metrics(*evaluated(tmp_path, TINY_MODELS[family], name))


@pytest.mark.parametrize("name", ["argmax", "top-k", "log-probabilities"])
def test_in_bf16(name, tmp_path):
    results = evaluated(tmp_path, lambda: TINY_MODELS["llama"]().bfloat16(), name)
    loss = results[0].pop("eval_loss"), results[1].pop("eval_loss")
    assert loss[0] == pytest.approx(loss[1], rel=1e-3)
    assert_equal_metrics(*results)


@pytest.mark.parametrize("settings", [{"bf16": True}, {"eval_accumulation_steps": 1}, {"label_smoothing_factor": 0.1}])
def test_settings_of_the_trainer(settings, tmp_path):
    results = evaluated(tmp_path, TINY_MODELS["llama"], "both", **settings)
    assert_equal_metrics(*results, relative=1e-2 if "bf16" in settings else 1e-6)


def test_a_tuple_of_outputs(tmp_path):
    seen = []

    def preprocess(outputs, labels):
        seen.append(type(outputs[0]))
        return PREPROCESS["of a tuple"](outputs, labels)

    results = []
    for ours in (True, False):
        model = llama(output_hidden_states=True)
        functions = {"compute_metrics": compute_metrics, "preprocess_logits_for_metrics": preprocess}
        results.append(build(tmp_path, model, ours, **functions).evaluate())
    assert_equal_metrics(*results)
    assert seen == [DeferredLogits] * 3 + [torch.Tensor] * 3


def adapted(name="lm_head"):
    torch.manual_seed(1)
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj", name], task_type="CAUSAL_LM"))
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("target", ["lm_head", "v_proj"])
def test_adapters(target, tmp_path):
    results = evaluated(tmp_path, lambda: adapted(target), "both")
    assert_equal_metrics(*results)
    assert results[0]["eval_perplexity"] > 1


@pytest.mark.parametrize("name", ["argmax", "top-k", "log-probabilities", "last token", "slice of the vocabulary"])
def test_nothing_of_the_size_of_the_logits(name, tmp_path):
    trainers = [
        build(
            tmp_path,
            llama(),
            ours,
            rows=token_rows(2 * BATCH),
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=PREPROCESS[name],
        )
        for ours in (True, False)
    ]
    ours, stock = (created_sizes(trainer.evaluate) for trainer in trainers)
    whole = BATCH * LENGTH * VOCAB
    assert max(ours) == BATCH * LENGTH * llama().config.intermediate_size < whole, "the MLP's, and chunks of logits"
    assert whole in stock, "what this can see"


@pytest.mark.parametrize("name", ["argmax", "log-probabilities", "last token"])
def test_predict(name, tmp_path):
    found = []
    for ours in (True, False):
        trainer = build(
            tmp_path, llama(), ours, compute_metrics=compute_metrics, preprocess_logits_for_metrics=PREPROCESS[name]
        )
        found.append(trainer.predict(token_rows(10, seed=2)))
    ours, stock = found
    torch.testing.assert_close(torch.tensor(ours.predictions), torch.tensor(stock.predictions))
    assert ours.metrics["test_sum0"] == pytest.approx(stock.metrics["test_sum0"], rel=1e-5)
    assert ours.metrics["test_perplexity"] > 1


def test_predictions_without_labels(tmp_path):
    rows = [{key: row[key] for key in ("input_ids", "attention_mask")} for row in token_rows(6)]
    ours, stock = (
        build(tmp_path, llama(), ours, preprocess_logits_for_metrics=PREPROCESS["argmax"]).predict(rows)
        for ours in (True, False)
    )
    assert (ours.predictions == stock.predictions).all()
    assert "test_perplexity" not in ours.metrics


def test_all_logits_are_collected_with_a_warning(tmp_path, caplog):
    results = [build(tmp_path, llama(), ours, compute_metrics=compute_metrics).evaluate() for ours in (True, False)]
    assert_equal_metrics(*results)
    assert caplog.text.count("preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)") == 1
    assert set(OWN) <= results[0].keys()


def test_no_warning_where_nothing_is_collected(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        build(tmp_path, llama(), preprocess_logits_for_metrics=PREPROCESS["argmax"]).evaluate()
        build(tmp_path, llama()).predict(token_rows(3))
    assert "collects" not in caplog.text


def test_what_a_function_returns_is_built_in_its_step(tmp_path):
    trainer = build(tmp_path, llama(), preprocess_logits_for_metrics=PREPROCESS["last token"])
    kept, gather = [], trainer.gather_function
    trainer.gather_function = lambda value: (kept.append(type(value)), gather(value))[1]
    trainer.predict(token_rows(10))
    assert set(kept) == {torch.Tensor}
    assert len(kept) == 3 * 3, "losses, predictions and labels of three batches"


class Accuracy:
    """Metrics of one batch after the other."""

    def __init__(self):
        self.right = self.total = 0
        self.seen = []

    def __call__(self, prediction, compute_result):
        logits, labels = prediction.predictions, prediction.label_ids
        self.seen.append(logits)
        self.right += int((logits[:, :-1].argmax(-1) == labels[:, 1:]).sum())
        self.total += int((labels[:, 1:] != -100).sum())
        return {"right": self.right, "total": self.total} if compute_result else {}


def test_metrics_batch_by_batch(tmp_path):
    ours, stock = Accuracy(), Accuracy()
    results = [
        build(tmp_path, llama(), ours, compute_metrics=function, batch_eval_metrics=True).evaluate()
        for ours, function in ((True, ours), (False, stock))
    ]
    assert_equal_metrics(*results)
    assert [type(logits) for logits in ours.seen] == [DeferredLogits] * 3
    assert all(logits.value is None and logits.value_no_grad is None for logits in ours.seen[:-1])
    assert [tuple(logits.shape) for logits in ours.seen] == [tuple(logits.shape) for logits in stock.seen]
    for mine, theirs in zip(ours.seen, stock.seen):  # kept by the user, and right
        torch.testing.assert_close(mine + 0, theirs)


def test_predictions_batch_by_batch_are_built(tmp_path):
    trainer = build(tmp_path, llama(), compute_metrics=Accuracy(), batch_eval_metrics=True)
    seen = trainer.predict(token_rows(5)).predictions
    assert seen.shape == (5, LENGTH, VOCAB)
    assert trainer.compute_metrics.seen
    assert all(type(logits) is torch.Tensor for logits in trainer.compute_metrics.seen)


def test_a_step_of_the_users_own_has_built_logits(tmp_path):
    ours, stock = (
        build(tmp_path, llama(), ours, preprocess_logits_for_metrics=PREPROCESS["argmax"]) for ours in (True, False)
    )
    batch = next(iter(ours.get_eval_dataloader()))
    found = [trainer.prediction_step(trainer.model.eval(), batch, False) for trainer in (ours, stock)]
    assert type(found[0][1]) is torch.Tensor
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs)


def test_errors_of_the_users_functions_come_through(tmp_path):
    class Wrong(Exception):
        pass

    def wrong(logits, labels):
        logits.argmax(-1)
        raise Wrong

    trainer = build(tmp_path, llama(), preprocess_logits_for_metrics=wrong, compute_metrics=compute_metrics)
    with pytest.raises(Wrong):
        trainer.evaluate()
    assert trainer.preprocess_logits_for_metrics is wrong
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.topk(VOCAB + 1)
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        trainer.evaluate()


def test_a_generation_inside_a_step_has_its_logits(tmp_path):
    kinds = []

    class Generating(LigerTrainer):
        def compute_loss(self, model, *args, **kwargs):
            hook = model.register_forward_hook(lambda module, inputs, outputs: kinds.append(type(outputs.logits)))
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
            hook.remove()
            return super().compute_loss(model, *args, **kwargs)

    functions = {"compute_metrics": compute_metrics, "preprocess_logits_for_metrics": PREPROCESS["argmax"]}
    metrics = causal(tmp_path, llama(), Generating, eval_dataset=token_rows(4), **functions).evaluate()
    assert kinds == [torch.Tensor] * 4
    assert metrics["eval_size0"] == 4 * LENGTH


# The metrics of all tokens.


@torch.no_grad()
def of_all_tokens(model, rows):
    """Perplexity and accuracy, from the logits of one row at a time."""
    total, right, count = 0.0, 0, 0
    for row in rows:
        batch = {key: value.unsqueeze(0) for key, value in row.items() if key != "labels"}
        logits, labels = model.eval()(**batch).logits[0, :-1].double(), row["labels"][1:]
        total += float(F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100))
        right += int((logits.argmax(-1) == labels).sum())
        count += int((labels != -100).sum())
    return [math.exp(total / count), right / count]


def easy(rows):
    """Rows whose labels a random model sometimes predicts, in batches of different numbers of labels."""
    guesses = [llama()(row["input_ids"].unsqueeze(0)).logits[0].argmax(-1) for row in rows]
    for place, (row, guess) in enumerate(zip(rows, guesses)):
        row["labels"][1:][::2] = guess[:-1][::2]
        row["labels"][2 + place % 7 :] = -100
    return rows


@pytest.mark.parametrize("memory", [MEMORY, "512MiB"])
def test_perplexity_and_accuracy_are_those_of_all_tokens(memory, tmp_path):
    rows = easy(token_rows(10))
    metrics = causal(
        tmp_path,
        llama(),
        eval_dataset=rows,
        per_device_eval_batch_size=BATCH,
        liger_kernel_config={"logits_memory": memory},
    ).evaluate()
    expected = of_all_tokens(llama(), rows)
    assert [metrics[key] for key in OWN] == pytest.approx(expected, rel=1e-5)
    assert 0.2 < expected[1] < 1.0
    assert metrics["eval_perplexity"] != pytest.approx(math.exp(metrics["eval_loss"]), rel=1e-4)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (llama, {"label_smoothing_factor": 0.2}),
        (mixtral, {}),
        (adapted, {}),
        (llama, {"compute_metrics": compute_metrics}),
    ],
)
def test_it_is_the_cross_entropy_whatever_is_added_to_the_loss(model, settings, tmp_path):
    rows = token_rows(10)
    made = model()
    if model is mixtral:
        made.config.output_router_logits = True
    metrics = build(tmp_path, made, rows=rows, **settings).evaluate()
    assert [metrics[key] for key in OWN] == pytest.approx(of_all_tokens(model(), rows), rel=1e-4)


def test_no_matmul_of_the_head_but_that_of_the_loss(tmp_path, monkeypatch):
    trainer = build(tmp_path, llama())
    tokens = []
    multiply = torch.mm

    def counted(left, right, **kwargs):
        if right.shape == (32, VOCAB):
            tokens.append(len(left))
        return multiply(left, right, **kwargs)

    monkeypatch.setattr(torch, "mm", counted)
    assert set(OWN) <= trainer.evaluate().keys()
    assert sum(tokens) == 10 * LENGTH
    assert max(tokens) <= ROWS


def test_several_datasets_and_prefixes(tmp_path):
    sets = {"one": token_rows(6, seed=5), "two": token_rows(4, seed=6)}
    trainer = build(tmp_path, llama(), rows=sets)
    metrics = trainer.evaluate()
    logs = {key: value for log in trainer.state.log_history for key, value in log.items()}
    for name, rows in sets.items():
        expected = of_all_tokens(llama(), rows)
        keys = [f"eval_{name}_perplexity", f"eval_{name}_mean_token_accuracy"]
        assert [metrics[key] for key in keys] == pytest.approx(expected, rel=1e-5)
        assert [logs[key] for key in keys] == [metrics[key] for key in keys]
    assert "valid_perplexity" in trainer.evaluate(sets["one"], metric_key_prefix="valid")


def test_the_users_own_metric_has_the_name(tmp_path):
    metrics = build(tmp_path, llama(), compute_metrics=lambda prediction: {"perplexity": 7.0}).evaluate()
    assert metrics["eval_perplexity"] == 7.0
    assert "eval_mean_token_accuracy" in metrics


def without_labels(rows):
    return [{**row, "labels": torch.full_like(row["labels"], -100)} for row in rows]


@pytest.mark.parametrize(
    "options",
    [
        {"compute_loss_func": lambda outputs, labels, num_items_in_batch: F.cross_entropy(
            outputs.logits.flatten(0, 1), labels.flatten())},
        {"use_liger_kernel": False},
        {"rows": without_labels(token_rows(4))},
    ],
    ids=["loss of the user", "no kernels", "no labels"],
)  # fmt: skip
def test_not_logged(options, tmp_path):
    assert not set(OWN) & build(tmp_path, llama(), **options).evaluate().keys()


def test_a_batch_with_two_losses_leaves_them_out(tmp_path):
    class SometimesTwo(LigerTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if (inputs["labels"] != -100).sum() > 12:
                super().compute_loss(model, inputs, True, num_items_in_batch)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    trainer = causal(tmp_path, llama(), SometimesTwo, eval_dataset=token_rows(4), per_device_eval_batch_size=2)
    counts = [int((batch["labels"] != -100).sum()) for batch in trainer.get_eval_dataloader()]
    assert min(counts) <= 12 < max(counts)
    assert not set(OWN) & trainer.evaluate().keys()


def test_batches_that_overflow_are_left_out(tmp_path):
    rows = token_rows(8)
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[3].fill_(math.inf)
    for row in rows:
        row["input_ids"].masked_fill_(row["input_ids"] == 3, 4)
    rows[5]["input_ids"][0] = 3
    metrics = build(tmp_path, model, rows=rows).evaluate()
    assert metrics["eval_perplexity"] == pytest.approx(of_all_tokens(llama(), rows[:4])[0], rel=1e-5)


# TRL's trainer for SFT.


def of_trl(folder, **options):
    data = text_dataset(6)
    return sft(
        folder,
        eval_dataset=data,
        per_device_eval_batch_size=2,
        liger_kernel_config={"logits_memory": MEMORY},
        **options,
    )


def test_sft_has_its_perplexity_and_trl_its_accuracy(tmp_path):
    metrics = of_trl(tmp_path).evaluate()
    rows = [{"input_ids": torch.tensor(tokenizer()(row["text"] + "</s>").input_ids)} for row in text_dataset(6)]
    expected = of_all_tokens(llama(), [{**row, "labels": row["input_ids"].clone()} for row in rows])
    assert metrics["eval_perplexity"] == pytest.approx(expected[0], rel=1e-4)


def test_sft_runs_the_users_functions_on_deferred_logits(tmp_path):
    seen, sizes = [], []

    def preprocess(logits, labels):
        seen.append(type(logits))
        sizes.append(logits.numel())
        return logits.argmax(-1)

    trainer = of_trl(tmp_path, compute_metrics=compute_metrics, preprocess_logits_for_metrics=preprocess)
    created = created_sizes(trainer.evaluate)
    assert set(seen) == {DeferredLogits}
    assert not created & set(sizes)
