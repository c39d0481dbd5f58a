"""The auxiliary loss of a mixture of experts in `LigerTrainer`: the mean over micro-batches and processes, by hand."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from liger_trainer.trainers.moe import averaged_aux_loss
from tests.forked import torchrun
from tests.trainers.builders import causal
from tests.trainers.tiny import COMMON, SIZES, mixtral, token_rows

pytestmark = pytest.mark.filterwarnings("ignore")

RATE, COEFFICIENT, ROWS = 0.1, 0.5, 8
ONE_STEP = {
    **COMMON, "max_steps": 1, "learning_rate": RATE, "optim": "sgd", "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant", "seed": 0, "train_sampling_strategy": "sequential",
}  # fmt: skip


def qwen3_vl_moe():
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if not name.endswith("token_id")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3VLMoeConfig(
        text_config={**sizes, **experts, "rope_parameters": rope},
        vision_config={**vision, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        image_token_id=120, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123,
    )  # fmt: skip
    return Qwen3VLMoeForConditionalGeneration(config)


def build(tmp_path, coefficient, model=mixtral, **options):
    model = model()
    model.config.get_text_config().output_router_logits = True
    for module in model.modules():
        if hasattr(module, "router_aux_loss_coef"):
            module.router_aux_loss_coef = coefficient
    model.config.get_text_config().router_aux_loss_coef = coefficient
    return causal(tmp_path, model, rows=token_rows(ROWS), **{**ONE_STEP, **options})


def micro_batches(size):
    rows = token_rows(ROWS)
    return [
        {key: torch.stack([row[key] for row in rows[i : i + size]]) for key in rows[0]} for i in range(0, ROWS, size)
    ]


def by_hand(model, batches, coefficient):
    """Sum of the cross entropies over all labels, and the mean of the auxiliary losses; never `model.loss`."""
    nll, count, aux = 0.0, 0, []
    for batch in batches:
        outputs = model(batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True)
        labels = batch["labels"][:, 1:].reshape(-1)
        nll = nll + F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels, reduction="sum")
        count += int(labels.ne(-100).sum())
        aux.append(outputs.aux_loss)
    return nll / count + coefficient * torch.stack(aux).mean()


def gradients(loss, model):
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters.items(), found)}


def moved(trainer, before):
    return {name: (before[name] - p.detach()) / RATE for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("kernels", [True, False])
def test_gradients_and_loss_are_those_of_the_mean(steps, kernels, tmp_path):
    options = {"per_device_train_batch_size": ROWS // steps, "gradient_accumulation_steps": steps}
    trainer = build(tmp_path, COEFFICIENT, use_liger_kernel=kernels, **options)
    reference = mixtral().train()
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    trainer.train()

    loss = by_hand(reference, micro_batches(ROWS // steps), COEFFICIENT)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    expected = gradients(loss, reference)
    without = gradients(by_hand(reference, micro_batches(ROWS // steps), 0.0), reference)
    for name, gradient in moved(trainer, before).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=2e-5, msg=name)
    assert any("gate" in name and (expected[name] - without[name]).abs().max() > 1e-3 for name in expected)
    assert trainer.model.router_aux_loss_coef == COEFFICIENT


def test_a_multimodal_model_reads_the_coefficient_from_its_configuration(tmp_path):
    """Three losses: with 8 micro-batches of one row, what the coefficient adds is the mean over them."""
    losses = []
    for coefficient in (0.0, COEFFICIENT):
        options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": ROWS}
        trainer = build(tmp_path, coefficient, qwen3_vl_moe, **options)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    model = qwen3_vl_moe().train()
    aux = [
        model(batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True).aux_loss
        for batch in micro_batches(1)
    ]
    assert losses[1] - losses[0] == pytest.approx(COEFFICIENT * torch.stack(aux).mean().item(), rel=1e-3)


@pytest.mark.parametrize("steps", [1, 4])
def test_evaluation_adds_it_once(steps, tmp_path):
    trainer = build(tmp_path, COEFFICIENT, gradient_accumulation_steps=steps, per_device_eval_batch_size=ROWS)
    loss = by_hand(mixtral().eval(), micro_batches(ROWS), COEFFICIENT)
    assert trainer.evaluate(token_rows(ROWS))["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_a_loss_of_the_users_finds_coefficient_and_loss_as_they_are(tmp_path):
    seen = []

    def loss_func(outputs, labels, num_items_in_batch=None):
        seen.append((trainer.model.router_aux_loss_coef, outputs.aux_loss.detach()))
        return outputs.aux_loss * 0.0

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    trainer = build(tmp_path, COEFFICIENT, compute_loss_func=loss_func, **options)
    trainer.train()
    model = mixtral().train()
    for (coefficient, aux), batch in zip(seen, micro_batches(2), strict=True):
        expected = model(batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True).aux_loss
        assert coefficient == COEFFICIENT
        torch.testing.assert_close(aux, expected.detach(), rtol=1e-5, atol=1e-6)


def test_a_coefficient_nobody_finds_is_one_warning(tmp_path, caplog, monkeypatch):
    from liger_trainer.head import warn_once
    from liger_trainer.trainers.moe import aux_loss_coefficients

    monkeypatch.setattr(warn_once, "_said", set())
    model = mixtral()
    model.config.output_router_logits = True
    del model.router_aux_loss_coef, model.config.router_aux_loss_coef
    for _ in range(2):
        assert aux_loss_coefficients(model) == []
    assert caplog.text.count("has no `router_aux_loss_coef`") == 1


def two_processes(output_dir):
    results = {}
    for average in (True, False):
        options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        trainer = build(f"{output_dir}/{average}", COEFFICIENT, average_tokens_across_devices=average, **options)
        trainer.train()
        results[f"loss_{average}"] = trainer.state.log_history[0]["loss"]
        if average:
            results["eval"] = trainer.evaluate(token_rows(ROWS))["eval_loss"]
        torch.save(trainer.model.state_dict(), f"{output_dir}/{average}.pt")
    if trainer.args.process_index == 0:
        Path(output_dir, "results.json").write_text(json.dumps(results))


def test_two_processes(tmp_path):
    done = torchrun(two_processes, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    reference = mixtral().train()
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    batches = micro_batches(2)
    # Batches go to the processes in turns.
    each = [by_hand(reference, batches[rank::2], COEFFICIENT) for rank in range(2)]
    expected = {True: by_hand(reference, batches, COEFFICIENT), False: torch.stack(each).mean()}
    for average, loss in expected.items():
        assert results[f"loss_{average}"] == pytest.approx(loss.item(), rel=1e-5)
        states = torch.load(tmp_path / f"{average}.pt")
        wanted = gradients(loss, reference)
        for name, parameter in before.items():
            torch.testing.assert_close(
                (parameter - states[name]) / RATE, wanted[name], rtol=1e-3, atol=2e-5, msg=f"{name} {average}"
            )
        model = mixtral().eval()
        model.load_state_dict(states)
        if average:
            whole = [by_hand(model, batches[2 * i : 2 * i + 2], 0.0) for i in range(2)]
            aux = [by_hand(model, [batch], 1.0) - by_hand(model, [batch], 0.0) for batch in batches]
            eval_loss = torch.stack(whole).mean() + COEFFICIENT * torch.stack(aux).mean()
            assert results["eval"] == pytest.approx(eval_loss.item(), rel=1e-3)


@pytest.mark.parametrize(("tensor_parallel", "share"), [(1, 0.25), (2, 0.5), (4, 1.0)])
def test_processes_that_share_their_batches_count_as_one(tensor_parallel, share):
    """With a fake trainer: a real one would split a mixture of experts over four processes."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(average_tokens_across_devices=True),
        accelerator=SimpleNamespace(num_processes=4),
        get_tp_size=lambda: tensor_parallel,
        model=SimpleNamespace(training=False),
    )
    holder = SimpleNamespace(router_aux_loss_coef=COEFFICIENT)
    with averaged_aux_loss(trainer, [(holder, "router_aux_loss_coef")], torch.tensor(10)):
        assert holder.router_aux_loss_coef == COEFFICIENT * share
    assert holder.router_aux_loss_coef == COEFFICIENT
