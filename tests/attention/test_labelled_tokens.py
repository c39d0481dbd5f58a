"""Layers of Gemma 4 that share keys, on the labelled tokens alone: loss and all gradients are those of all tokens."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, RoadConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import init_device_mesh

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.attention import interface
from liger_trainer.head.step import Step, current_step, running, runs_of
from liger_trainer.patching import labelled_tokens as module
from liger_trainer.patching.labelled_tokens import _firsts
from liger_trainer.trainers.base import LigerTrainerMixin
from liger_trainer.trainers.step import KnownBatches, add_facts
from tests.attention.shared_layers import batch_of, build
from tests.attention.test_families import NOISE, attention_rows
from tests.attention.test_masks import Reads
from tests.calls import recorded_calls
from tests.patching.comparisons import assert_same
from tests.steps import step_with
from tests.trainers.builders import causal, losses_and_norms
from tests.trainers.tiny import token_rows

MODELS = ("E2B", "wide heads", "unified", "images")
BATCHES = ("full", "left-padded", "right-padded", "packed")
LABELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the last tokens": lambda places: places >= places.new_tensor([[9], [6]]),
    "turns": lambda places: (places % 5 == 3) & (places > 4),
    "of one row": lambda places: (places > 7) & torch.tensor([[True], [False]]),
    "the last one": lambda places: places == places.shape[1] - 1,
    "none": lambda places: places < 0,
}


@functools.cache
def patched(name: str) -> Any:
    model = build(name)
    apply_liger_kernel(model)
    return model


def labelled(kind: str, labels: str = "the last tokens") -> dict[str, Any]:
    """Two rows of 12 tokens, with these labels."""
    batch = batch_of(kind)
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    places = torch.arange(ids.shape[1]).expand(ids.shape)
    is_labelled = LABELS[labels](places) & (places > 0)
    is_labelled &= True if mask is None else mask.bool()
    return {**batch, "labels": ids.masked_fill(~is_labelled, -100), "use_cache": False}


def step_of(batch: dict[str, Any], read: bool = True) -> Step:
    """What a trainer knows of a batch of its collator."""
    collated, known = dict(batch), KnownBatches()
    add_facts(collated)
    known.take([collated])
    return known.added_to(Step(), batch, read)


@contextlib.contextmanager
def lengths_of_layers(model: Any) -> Iterator[list[tuple[int, ...]]]:
    """The rows and tokens that each layer is given."""
    seen: list[tuple[int, ...]] = []

    def noted(self: Any, native: Callable, x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape[:2]))
        return native(x)

    with pytest.MonkeyPatch.context() as patch:
        for layer in model.get_decoder().layers:
            # A class of its own: a layer whose instance has a forward of somebody's runs on all tokens.
            forward = functools.partialmethod(noted, layer.self_attn.q_proj.forward)
            patch.setattr(layer.self_attn.q_proj, "__class__", type("Noting", (nn.Linear,), {"forward": forward}))
        yield seen


def run(model: Any, batch: dict[str, Any], step: Step, **more: Any) -> dict[str, torch.Tensor]:
    """The loss and all gradients."""
    model.zero_grad(set_to_none=True)
    with running(step):
        loss = model(**{**batch, **more}).loss
    loss.backward()
    return {"loss": loss.detach(), **{key: p.grad for key, p in model.named_parameters() if p.grad is not None}}


def tokens_of_last_layer(model: Any, batch: dict[str, Any], step: Step, **more: Any) -> int:
    with lengths_of_layers(model) as seen:
        run(model, batch, step, **more)
    rows, tokens = seen[model.config.get_text_config().num_hidden_layers - 1]  # before checkpoints run them again
    return rows * tokens


@pytest.mark.parametrize("kernels", [True, False], ids=["plans", "masks"])
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_all_tokens(name, kind, kernels, monkeypatch):
    monkeypatch.setattr(interface, "use_triton", lambda query: kernels)
    model, batch = patched(name), labelled(kind)
    expected = run(model, batch, step_of(batch, read=False))
    with lengths_of_layers(model) as seen:
        found = run(model, batch, step_of(batch))
    shared = model.config.get_text_config().num_kv_shared_layers
    assert {*seen[:-shared]} == {(2, 12)}
    assert len({*seen[-shared:]}) == 1
    assert seen[-1][0] == 1
    assert seen[-1][1] < 16
    assert_same(found, expected, floor=NOISE)


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("kind", BATCHES)
def test_any_labels(kind, labels):
    model, batch = patched("E2B"), labelled(kind, labels)
    found = run(model, batch, step_of(batch))
    assert_same(found, run(model, batch, step_of(batch, read=False)), floor=NOISE)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("full", 4 + 7), ("right-padded", 4 + 3 + 1), ("left-padded", 4 + 1 + 7), ("packed", 1 + 1 + 4 + 1 + 6 + 1)],
)
def test_the_tokens_that_run(kind, tokens):
    """Of each document those from the one before its first label on, or its last; padding is documents too."""
    model, batch = patched("E2B"), labelled(kind)
    assert tokens_of_last_layer(model, batch, step_of(batch)) == tokens


def test_padding_that_no_mask_hides_is_left_out():
    """Behind rows that are nearly whole, where attention takes whole rows."""
    model, batch = patched("E2B"), labelled("full")
    batch["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
    batch["attention_mask"][0, 11:] = 0
    batch["labels"][0, 11:] = -100
    plans: list[Any] = []
    with model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: plans.append(kwargs["attention_mask"]), with_kwargs=True
    ):
        tokens = tokens_of_last_layer(model, batch, step_of(batch))
    assert plans[0].offsets is None
    assert tokens == 3 + 1 + 7, "the padding is a document, of which one token runs"
    assert_same(run(model, batch, step_of(batch)), run(model, batch, step_of(batch, read=False)), floor=NOISE)


def test_documents_and_runs():
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 0, 0, 0, 0, 1]], dtype=torch.bool)
    assert runs_of(mask) == [(2, 4), (5, 7), (11, 12)]
    for bounds in ([0, 12], [0, 6, 12], [0, 1, 4, 8, 12], [0, 5, 7, 11, 12], [*range(13)]):
        places = mask.flatten().nonzero().flatten().tolist()
        expected = [
            next((place for place in places if begin <= place < end), end - 1)
            for begin, end in itertools.pairwise(bounds)
        ]
        assert [*_firsts(bounds, runs_of(mask))] == expected


@pytest.mark.parametrize("kind", ["left-padded", "packed"])
def test_checkpointed_layers(kind):
    model, batch = copy.deepcopy(patched("E2B")), labelled(kind)
    expected = run(model, batch, step_of(batch, read=False))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(run(model, batch, step_of(batch)), expected, floor=NOISE)
    assert tokens_of_last_layer(model, batch, step_of(batch)) < 16


def test_rounding_is_that_of_all_tokens():
    """In bfloat16 the loss and gradients are as near to those in float32 as with all tokens."""
    exact, batch = patched("E2B"), labelled("left-padded")
    truth = run(exact, batch, step_of(batch, read=False))
    model = copy.deepcopy(exact).bfloat16()
    ours, theirs = (run(model, batch, step_of(batch, read=read)) for read in (True, False))
    error, allowed = (
        torch.stack([(found[key].float() - truth[key]).norm() for key in truth]).norm() for found in (ours, theirs)
    )
    assert 0 < error < 1.2 * allowed


def test_nothing_is_read_of_the_device():
    model = patched("E2B")
    for kind in BATCHES:
        numbers = []
        for read in (True, False):
            batch = labelled(kind)
            step = step_of(batch, read)
            with Reads() as reads, running(step):
                model(**batch)
            numbers.append(reads.number)
        assert numbers[0] == numbers[1], kind


def test_hidden_states_are_whole_and_zero_where_no_token_ran():
    model, batch = patched("E2B"), labelled("full")
    outputs: list[Any] = []
    with model.model.register_forward_hook(lambda module, args, output: outputs.append(output)):
        run(model, batch, step_of(batch))
        run(model, batch, step_of(batch, read=False))
    found, expected = (output.last_hidden_state for output in outputs)
    assert found.shape == expected.shape
    ran = found.abs().sum(-1) > 0
    assert ran.tolist() == (torch.arange(12) >= torch.tensor([[8], [5]])).tolist()
    torch.testing.assert_close(found[ran], expected[ran])


# ---------------------------------------------------------------------------------------------------------------------
# Where all tokens run
# ---------------------------------------------------------------------------------------------------------------------


def whole(model: Any, batch: dict[str, Any], step: Step | None = None, **more: Any) -> bool:
    return tokens_of_last_layer(model, batch, step_of(batch) if step is None else step, **more) == 24


@pytest.mark.parametrize(
    "more",
    [
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"logits_to_keep": 12},
        {"logits_to_keep": torch.arange(12)},
    ],
    ids=str,
)
def test_what_else_is_asked_for(more):
    model, batch = patched("E2B"), labelled("full")
    assert not whole(model, batch)
    step = step_of(batch)
    with lengths_of_layers(model) as seen, running(step):
        model(**batch, **more)
    assert seen[-1] == (2, 12)


def test_hidden_states_asked_for_by_the_config():
    model, batch = copy.deepcopy(patched("E2B")), labelled("full")
    model.config.output_hidden_states = True
    assert whole(model, batch)


@pytest.mark.parametrize("change", ["copied", "written to", "of next tokens", "not read", "of several losses"])
def test_labels_that_are_not_those_that_were_read(change):
    model, batch = patched("E2B"), labelled("full")
    step, given = step_of(batch), dict(batch)
    if change == "copied":
        given["labels"] = batch["labels"].clone()
    elif change == "written to":
        given["labels"][:, 1] = 5
    elif change == "of next tokens":
        given["shift_labels"] = batch["labels"].roll(-1, 1)
    elif change == "not read":
        step = Step()
    else:
        step = step_of(batch)
        with running(step), step_with(loss_follows=True):
            step = current_step()
    assert whole(model, given, step)


def test_a_loss_of_the_users_own():
    model, batch = copy.deepcopy(patched("E2B")), labelled("full")
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.float().logsumexp(-1).sum()
    assert whole(model, batch)


def test_evaluation_and_generation():
    model, batch = copy.deepcopy(patched("E2B")).eval(), labelled("full")
    with lengths_of_layers(model) as seen, running(step_of(batch)), torch.no_grad():
        expected = model(**batch).logits
        assert {*seen} == {(2, 12)}
        found = model(input_ids=batch["input_ids"]).logits
        model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False)
    torch.testing.assert_close(found, expected)
    assert all(length in ((2, 12), (2, 1)) for length in seen)


@pytest.mark.parametrize("of_module", ["layer", "mlp", "norm", "all"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks(of_module, kind):
    model, batch = copy.deepcopy(patched("E2B")), labelled("full")
    last = model.model.layers[-1]
    module: Any = {"layer": last, "mlp": last.mlp.up_proj, "norm": model.model.norm, "all": nn.modules.module}[
        of_module
    ]
    if of_module == "all" and kind == "full_backward_pre":
        kind = "full_backward"
    name = f"register_{'module_' if of_module == 'all' else ''}{kind}_hook"
    with getattr(module, name)(lambda *args: None):
        assert whole(model, batch)
    assert not whole(model, batch)


def test_hooks_on_layers_that_make_keys_are_called_with_all_tokens():
    model, batch = copy.deepcopy(patched("E2B")), labelled("full")
    with model.model.layers[0].register_forward_hook(lambda *args: None):
        assert not whole(model, batch)


def test_hooks_that_gather_weights_are_no_reason(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, batch = copy.deepcopy(patched("E2B")), labelled("full")
        expected = run(model, batch, step_of(batch, read=False))
        for layer in model.model.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        assert isinstance(model.model.layers[-1], FSDPModule)
        assert model.model.layers[-1]._forward_hooks
        found = run(model, batch, step_of(batch))
        whole_tensors = {key: x.full_tensor() if hasattr(x, "full_tensor") else x for key, x in found.items()}
        assert_same(whole_tensors, expected, floor=NOISE)
        assert not whole(model, batch)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("adapter", "all_tokens"),
    [
        (LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False), False),
        (RoadConfig(target_modules=["up_proj"], group_size=16), True),
    ],
    ids=["LoRA", "another"],
)
def test_adapters(adapter, all_tokens):
    torch.manual_seed(1)
    model, batch = get_peft_model(copy.deepcopy(build("E2B")), adapter).train(), labelled("full")
    apply_liger_kernel(model)
    expected = run(model, batch, step_of(batch, read=False))
    tokens: list[int] = []
    kind = type(model.get_decoder().layers[-1])
    native = kind.forward

    def noted(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        tokens.append(x[..., 0].numel())
        return native(self, x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", noted)
        found = run(model, batch, step_of(batch))
    assert (tokens[-1] == 24) == all_tokens
    assert_same(found, expected, floor=NOISE)


def test_dropout_in_attention():
    model = build("E2B", attention_dropout=0.1)
    apply_liger_kernel(model)
    assert whole(model, labelled("full"))


def test_attention_that_is_not_ours():
    batch = labelled("full")
    model = copy.deepcopy(patched("E2B"))
    model.set_attn_implementation("eager")
    assert whole(model, batch)
    model = copy.deepcopy(patched("E2B"))
    del model.model.layers[-1].self_attn.__dict__[interface.PROVED]
    assert whole(model, batch)


def test_layers_that_are_compiled():
    model, batch = copy.deepcopy(patched("E2B")), labelled("full")
    model.model.layers[-1].compile(backend="eager")
    assert whole(model, batch)


def test_a_compiled_model():
    model, batch = copy.deepcopy(patched("E2B")), labelled("full")
    expected = run(model, batch, step_of(batch, read=False))
    torch.compiler.reset()
    compiled, shapes = torch.compile(model, backend="eager"), []
    placed = "liger_trainer.patching.labelled_tokens._placed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placed, lambda *args: shapes.append(args))
        model.zero_grad(set_to_none=True)
        with running(step_of(batch)):
            loss = compiled(**batch).loss
        loss.backward()
    assert not shapes
    torch.testing.assert_close(loss.detach(), expected["loss"])


def test_inside_a_transform_of_functions():
    model, batch = copy.deepcopy(patched("E2B")), labelled("full")
    parameters = dict(model.named_parameters())

    def loss(parameters: Any) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (), batch).loss

    expected = run(model, batch, step_of(batch, read=False))
    with lengths_of_layers(model) as seen, running(step_of(batch)):
        found = torch.func.grad(loss)(parameters)
    assert {*seen} == {(2, 12)}
    assert_same(found, {key: expected[key] for key in found}, floor=NOISE)


def test_few_tokens_that_could_be_left_out():
    """Selecting tokens then costs more than it saves."""
    batch = labelled("full")
    batch["labels"] = batch["input_ids"].clone()
    assert whole(patched("E2B"), batch)


# ---------------------------------------------------------------------------------------------------------------------
# What is bound, and what the report says
# ---------------------------------------------------------------------------------------------------------------------


def test_revert_and_copies():
    model, batch = build("E2B"), labelled("full")
    apply_liger_kernel(model)
    assert not whole(copy.deepcopy(model), batch)
    assert "forward" in model.model.__dict__
    revert_liger_kernel(model)
    assert "forward" not in model.model.__dict__
    assert whole(model, batch)


def test_a_forward_that_somebody_has_put_in_stays():
    model = build("E2B")
    forward = model.model.forward
    model.model.forward = functools.partial(forward)
    apply_liger_kernel(model)
    assert isinstance(model.model.forward, functools.partial)
    assert whole(model, labelled("full"))


def test_the_report_says_which_layers_run_on_all_tokens():
    rows = attention_rows(apply_liger_kernel(build("3n")))
    assert [row.reason for row in rows if row.applied] == [
        "layers that share keys run on all tokens, as nothing of the model cuts what they are given"
    ]
    rows = attention_rows(apply_liger_kernel(build("E2B")))
    assert [(row.kernel, row.reason) for row in rows][-1] == (
        "labelled tokens alone in training", "on a GPU, where the labels are known before the forward"
    )  # fmt: skip
    assert not any(row.reason for row in attention_rows(apply_liger_kernel(build("31B"))))


# ---------------------------------------------------------------------------------------------------------------------
# In a trainer of transformers; those of TRL are in tests/packing
# ---------------------------------------------------------------------------------------------------------------------


def few_labels() -> list[dict[str, torch.Tensor]]:
    """Rows whose last four tokens have a label."""
    return [{**row, "labels": row["labels"].index_fill(0, torch.arange(8), -100)} for row in token_rows(length=12)]


TRAINERS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "workers": ({"dataloader_num_workers": 1}, True),
    "accumulation": ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, True),
    "kept activations": ({"gradient_checkpointing": True, "activation_memory": "1GiB", "max_steps": 5}, True),
    "smoothing": ({"label_smoothing_factor": 0.1}, False),
    "a loss of the user's": ({"compute_loss_func": lambda outputs, labels, **_: outputs.logits[..., 0].sum()}, False),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_of_transformers(name, tmp_path, monkeypatch):
    options, leaves_out = TRAINERS[name]
    placed = recorded_calls(monkeypatch, module, "_placed")
    logs = []
    for counts in (True, False):
        monkeypatch.setattr(LigerTrainerMixin, "_counts_labels", counts)
        trainer = causal(tmp_path, build("E2B"), rows=few_labels(), bf16=False, optim="sgd", **options)
        before = len(placed)
        trainer.train()
        assert (len(placed) > before) == (leaves_out and counts)
        logs.append(losses_and_norms(trainer))
    assert len(logs[0]) >= 4
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
