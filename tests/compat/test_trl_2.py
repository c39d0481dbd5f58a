"""TRL without what it says will be gone in 2.0: every trainer of ours trains, and TRL's own with our kernels.

It is not out, so what trains runs before a release.
"""

import json
import math
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from tests.compat import trl_2
from tests.once import shared_folder

ROOT = Path(__file__).parents[2]

REMOVED = {
    "chat_template_utils.py": {"argument tokenizer of get_training_chat_template", "if tokenizer is not None"},
    "experimental/distillation/__init__.py": {"class DistillationConfig", "class DistillationTrainer"},
    "experimental/kto/__init__.py": {"class KTOConfig", "class KTOTrainer"},
    "scripts/vllm_serve.py": {"function main"},
    "trainer/base_config.py": {"option use_liger_kernel"},
    "trainer/dpo_config.py": {
        "option pad_token", "if self.pad_token is not None", "if self.truncation_mode == 'keep_end'",
    },
    "trainer/dpo_trainer.py": {"if args.use_liger_kernel", "if return_outputs"},
    "trainer/grpo_config.py": {
        "option use_transformers_paged", "if self.use_transformers_paged",
        "option vllm_importance_sampling_cap", "if self.vllm_importance_sampling_cap is not None",
    },
    "trainer/grpo_trainer.py": {"if args.use_liger_kernel"},
    "trainer/kto_trainer.py": {"if args.use_liger_kernel", "if return_outputs"},
    "trainer/reward_config.py": {"option pad_token", "if self.pad_token is not None"},
    "trainer/rloo_config.py": {"option use_transformers_paged", "if self.use_transformers_paged"},
    "trainer/rloo_trainer.py": {"if args.use_liger_kernel"},
    "trainer/sft_config.py": {
        "option pad_token", "if self.pad_token is not None", "if self.truncation_mode == 'keep_end'",
        "if self.loss_type == 'chunked_nll'", "if self.packing_strategy == 'bfd-requeue'",
    },
    "trainer/sft_trainer.py": {
        "argument compute_loss_func of __init__", "if compute_loss_func is not None", "if args.use_liger_kernel",
        "if args.label_smoothing_factor > 0 and args.loss_type == 'nll'", "if return_outputs",
    },
}  # fmt: skip
"""What TRL 1.16 announces. Another version may announce more: see whether the trainers need something for it."""

OURS = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward", "ORPO", "CPO", "Distillation", "GKD")
EVALUATES = ("SFT", "DPO", "KTO")
DOOR = {"model_init_kwargs": {"use_kernels": True}}


def predicted(logits, labels):
    return logits.argmax(-1)


def largest(given):
    return {"largest": float(given.predictions.max())}


def mean(given):
    return {"mean": float(given.predictions.mean())}


def distilling(kind, folder, **options):
    import liger_trainer
    from tests.trainers.tiny import COMMON, chat_dataset, llama, tokenizer

    own = {"Distillation": {"max_completion_length": 6}, "GKD": {"max_new_tokens": 6, "max_length": 48, "lmbda": 0.0}}
    trainer_class, config_class = (getattr(liger_trainer, f"Liger{kind}{what}") for what in ("Trainer", "Config"))
    args = config_class(folder, **{**COMMON, "bf16": False, "max_steps": 1, **own[kind], **options})
    data = chat_dataset()
    if kind == "Distillation":
        data = data.map(lambda row: {"prompt": row["messages"][:1]}, remove_columns="messages")
    models = {"model": llama(), "teacher_model": llama()}
    return trainer_class(**models, args=args, train_dataset=data, processing_class=tokenizer())


def cases(folder):
    """Name -> a function that builds a trainer."""
    from tests.trainers.parity import KINDS, OTHER_KINDS, build

    def of(kind, ours, **options):
        if kind not in {**KINDS, **OTHER_KINDS}:
            return lambda: distilling(kind, folder, **options)
        return lambda: build(kind, ours, folder, folder, max_steps=1, **options)

    found = {kind: of(kind, True) for kind in OURS}
    found |= {f"{kind} with kernels off": of(kind, True, use_liger_kernel=False) for kind in OURS}
    found |= {f"TRL's {kind}": of(kind, False, **DOOR) for kind in ("SFT", "DPO", "GRPO")}
    evaluation = {"eval_strategy": "steps", "eval_steps": 1}
    found |= {f"{kind} evaluates": of(kind, True, **evaluation) for kind in EVALUATES}
    found["metrics"] = of("SFT", True, **evaluation, compute_metrics=largest, preprocess_logits_for_metrics=predicted)
    found |= {f"metrics of {kind}": of(kind, True, **evaluation, compute_metrics=mean) for kind in ("DPO", "KTO")}
    found["label smoothing"] = of("SFT", True, label_smoothing_factor=0.1)
    return found


def train_all(folder):
    """Trains every case with TRL 2.0, for [`results`]."""
    trl_2.install()
    from liger_trainer.patching.binding import bound_modules
    from tests.trainers.tiny import llama, tokenizer

    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    found = {}
    for name, make in cases(folder).items():
        try:
            trainer = make()
            trainer.train()
            logs = {key: value for log in trainer.state.log_history for key, value in log.items()}
            found[name] = {"logs": logs, "kernels": any(bound_modules(trainer.model))}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    Path(folder, "results.json").write_text(json.dumps(found, default=str))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with shared_folder(tmp_path_factory, "trl_2") as folder:
        if not (folder / "results.json").exists():
            code = f"from tests.compat.test_trl_2 import train_all; train_all({str(folder)!r})"
            done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr[-4000:]
        return json.loads((folder / "results.json").read_text())


def test_what_is_removed():
    fields = trl_2.options()
    found = {path: trl_2.removed(tree, fields)[1] for path, tree in trl_2.sources()}
    assert {path: taken for path, taken in found.items() if taken} == REMOVED


@pytest.mark.long
@pytest.mark.parametrize("kind", OURS)
def test_our_trainers_train(kind, results):
    ours, plain = results[kind], results[f"{kind} with kernels off"]
    assert "error" not in ours, ours["trace"]
    assert "error" not in plain, plain["trace"]
    assert ours["kernels"]
    assert not plain["kernels"]  # the option is ours
    assert math.isfinite(ours["logs"]["loss"])
    for key in ("loss", "grad_norm"):  # GRPO's loss is 0 where the ratios are 1
        assert ours["logs"][key] == pytest.approx(plain["logs"][key], abs=4e-5, rel=1e-4), key


@pytest.mark.long
@pytest.mark.parametrize("kind", EVALUATES)
def test_our_trainers_evaluate(kind, results):
    found = results[f"{kind} evaluates"]
    assert "error" not in found, found["trace"]
    assert math.isfinite(found["logs"]["eval_loss"])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_trls_trainers_run_our_kernels(kind, results):
    found = results[f"TRL's {kind}"]
    assert "error" not in found, found["trace"]
    assert found["kernels"]
    assert found["logs"]["loss"] == pytest.approx(results[kind]["logs"]["loss"], abs=4e-5, rel=1e-5)


@pytest.mark.long
def test_metrics_are_computed(results):
    assert "error" not in results["metrics"], results["metrics"]["trace"]
    assert 0 < results["metrics"]["logs"]["eval_largest"] < 128  # ids, not logits


@pytest.mark.long
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_metrics_get_the_logits_that_trl_had_given(kind, results, tmp_path):
    from tests.trainers.parity import build
    from tests.trainers.tiny import llama, tokenizer

    llama().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "compute_metrics": mean}
    stock = build(kind, False, tmp_path / "out", str(tmp_path), **evaluation)
    stock.train()
    found = results[f"metrics of {kind}"]
    assert "error" not in found, found["trace"]
    (expected,) = (log["eval_mean"] for log in stock.state.log_history if "eval_mean" in log)
    assert found["logs"]["eval_mean"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.long
def test_what_trl_no_longer_does_is_refused(results):
    assert "no longer uses `label_smoother`" in results["label smoothing"]["error"]
