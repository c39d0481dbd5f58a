"""`activation_offloading`: who sees to it, and that our operators' saved tensors may be taken away and brought back."""

import contextlib
import gc
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.autograd.graph import saved_tensors_hooks

from liger_trainer.configs.flags import LigerTrainingArguments
from liger_trainer.configs.trl_configs import LigerDPOConfig
from liger_trainer.trainers.activation_memory import PartialOffload, step_offloading
from tests.trainers.builders import causal, dpo, sft
from tests.trainers.tiny import COMMON, llama

HIDDEN, VOCAB = 32, 128


class Offload(saved_tensors_hooks):
    """What TRL's does on an accelerator, on the CPU: copies, each of which is handed out once and forgotten.

    `lm_head` gets the hooks that TRL puts on it.
    """

    def __init__(self, model):
        self.away, self.shapes, self.parameters = {}, [], {p.data_ptr() for p in model.parameters()}
        super().__init__(self.pack, self.away.pop)
        head, inner = model.get_output_embeddings(), saved_tensors_hooks(lambda t: t, lambda t: t)
        head.register_forward_pre_hook(lambda *args: inner.__enter__())
        head.register_forward_hook(lambda *args: inner.__exit__(), always_call=True)

    def pack(self, tensor):
        key = object()
        if tensor.data_ptr() in self.parameters:
            self.away[key] = tensor
        else:
            self.shapes.append(tuple(tensor.shape))
            self.away[key] = tensor.clone()
        return key


def lora():
    model = llama()
    model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def weights_after(trainer):
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.fixture
def step_context(monkeypatch):
    """Puts a context around a trainer's steps, where TRL's trainers and ours have theirs."""

    def put(trainer, context):
        own = hasattr(trainer, "maybe_activation_offload_context")
        monkeypatch.setattr(trainer, "maybe_activation_offload_context" if own else "_offloading", context)

    return put


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", [causal, sft, dpo])
@pytest.mark.parametrize("make", [llama, lora])
@pytest.mark.parametrize(
    ("checkpointing", "config", "more"),
    [
        (False, {}, {}),
        (False, {"tiled_mlp": True}, {}),
        (True, {"tiled_mlp": True}, {}),
        (True, {"linear_cross_entropy": False}, {"activation_memory": "1GiB"}),
    ],
)
def test_training_is_the_same(build, make, checkpointing, config, more, tmp_path, step_context):
    options = {"gradient_checkpointing": checkpointing, "liger_kernel_config": config, **more}
    expected = weights_after(build(tmp_path, make(), **options))
    trainer = build(tmp_path, make(), **options)
    offload = Offload(trainer.model)
    step_context(trainer, offload)
    ours = weights_after(trainer)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    left = [tensor.shape for tensor in offload.away.values() if HIDDEN in tensor.shape]
    assert not left  # but for the scalars of metrics
    wide = [shape for shape in offload.shapes if shape[-2:-1] and shape[-1] == HIDDEN]
    assert len(wide) >= 2 * COMMON["max_steps"]  # the layers' inputs
    assert not [shape for shape in offload.shapes if VOCAB in shape]  # what the head saves is wanted at once


def test_trl_does_it_where_it_can(tmp_path, monkeypatch):
    made = []

    def make(model):
        made.append(model)
        return contextlib.nullcontext(model)

    monkeypatch.setattr("trl.models.activation_offloading.get_act_offloading_ctx_manager", make)
    monkeypatch.setattr("trl.trainer.sft_trainer.get_act_offloading_ctx_manager", make)
    monkeypatch.setattr("liger_trainer.trainers.trl_mixin.check_offloading", lambda args: None)
    trainer = sft(tmp_path, llama(), activation_offloading=True)
    assert made == [trainer.model]
    trainer = causal(tmp_path)
    assert len(made) == 1
    monkeypatch.setattr(LigerTrainingArguments, "device", torch.device("cuda"))
    trainer.args.activation_offloading = True
    trainer._offloading = step_offloading(trainer)
    assert trainer._offloading.enter_result is trainer.model
    assert len(made) == 2


def offloading(build, tmp_path, monkeypatch, **options):
    """A trainer whose activations are offloaded by an `Offload` in the place of TRL's, and that."""
    made = []

    def make(model):
        made.append(Offload(model))
        return made[0]

    for place in ("models.activation_offloading", "trainer.sft_trainer", "trainer.dpo_trainer"):
        monkeypatch.setattr(f"trl.{place}.get_act_offloading_ctx_manager", make)
    with monkeypatch.context() as patch:
        patch.setattr("liger_trainer.trainers.base.step_offloading", lambda trainer: None)  # these refuse the CPU
        patch.setattr("liger_trainer.trainers.trl_mixin.check_offloading", lambda args: None)
        trainer = build(tmp_path, llama(num_hidden_layers=6), activation_offloading=True, **options)
    with monkeypatch.context() as patch:
        patch.setattr(LigerTrainingArguments, "device", torch.device("cuda"))
        trainer._offloading = step_offloading(trainer)
    (offload,) = made
    return trainer, offload


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("build", [causal, sft, dpo])
def test_a_fraction_is_offloaded(build, checkpointing, tmp_path, monkeypatch):
    def trained(fraction):
        options = {"gradient_checkpointing": checkpointing, "activation_offloading_fraction": fraction}
        trainer, offload = offloading(build, tmp_path, monkeypatch, **options)
        return weights_after(trainer), sum(torch.Size(shape).numel() for shape in offload.shapes), offload

    expected, everything, _ = trained(1.0)
    ours, half, offload = trained(0.5)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert not [tensor.shape for tensor in offload.away.values() if HIDDEN in tensor.shape]
    assert half == pytest.approx(everything / 2, rel=0.2)  # what is saved twice counts once


def moved(sizes, fraction):
    """Which of the weighted sums' saved vectors of those sizes a fraction moves."""
    model = llama()
    offload = Offload(model)
    factors = [torch.rand(size, requires_grad=True) for size in sizes]
    for _ in range(2):  # the same at every step
        offload.shapes.clear()
        with PartialOffload(offload, fraction):
            sum(factor.square().sum() for factor in factors).backward()
    taken = [size for (size,) in offload.shapes]
    for factor in factors:
        torch.testing.assert_close(factor.grad, 4 * factor, rtol=0, atol=0)
    return taken


def test_what_is_offloaded_is_spread_evenly():
    assert moved(range(100, 110), 0.5) == [100, 102, 104, 106, 108]
    assert moved([100] * 32, 0.75) == [100] * 24
    assert moved(range(1000, 1010), 1 / 3) == [1001, 1004, 1007]
    sizes = [1, 500, 3, 200, 700, 2, 1, 50]
    for fraction in (0.1, 0.4, 0.8):
        assert abs(sum(moved(sizes, fraction)) - fraction * sum(sizes)) <= max(sizes) / 2


def test_a_fraction_of_trls_own(monkeypatch):
    """TRL's class itself, with the CPU for its accelerator."""
    from trl.models.activation_offloading import OffloadActivations

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args: torch.device("cpu"))
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)  # called where bitsandbytes is imported
    offload = OffloadActivations(use_pin_memory=False, use_streams=False)
    factors = [torch.rand(1024, requires_grad=True) for _ in range(8)]
    context = PartialOffload(offload, 0.5)
    for step in range(1, 3):
        with context:
            total = sum(factor.square().sum() for factor in factors)
            assert sum(modified for _, modified, *_ in offload.tracker.values()) == 4
            total.backward()
        assert not offload.tracker
        torch.testing.assert_close([factor.grad for factor in factors], [2 * step * factor for factor in factors])


def test_parameters_are_not_counted_and_views_share_a_fate():
    model = llama()
    offload, weight = Offload(model), torch.nn.Parameter(torch.rand(4, 4))
    offload.parameters.add(weight.data_ptr())
    with PartialOffload(offload, 0.5):
        for each in [torch.rand(4, 4, requires_grad=True) for _ in range(4)]:
            loss = each.view(2, 8).square().sum() + (each @ weight).view(16).square().sum()
            loss.backward()
    # Saved are a view, its base, the weight, and a view of the product: two decisions, in turns.
    assert offload.shapes == [(2, 8), (4, 4)] * 4


def test_what_is_kept_goes_with_its_graph():
    with PartialOffload(Offload(llama()), 1e-9):
        output = torch.rand(8, requires_grad=True).exp()
    alive = weakref.ref(output)
    gc.disable()
    try:
        del output
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, float("nan"), True, "0.5", None])
def test_a_fraction_out_of_range_is_refused(fraction, tmp_path):
    with pytest.raises(ValueError, match=r"`activation_offloading_fraction` is .*above 0 and at most 1"):
        LigerDPOConfig(str(tmp_path), bf16=False, activation_offloading=True, activation_offloading_fraction=fraction)


def test_a_fraction_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is 0\.5, but `activation_offloading` is false; set it to true"):
        LigerTrainingArguments(str(tmp_path), activation_offloading_fraction=0.5)


@pytest.mark.parametrize("build", [causal, sft, dpo])
def test_without_an_accelerator_it_is_refused(build, tmp_path):
    with pytest.raises(ValueError, match="`activation_offloading` is true, but training is on the CPU"):
        build(tmp_path, llama(), activation_offloading=True)


def test_a_flag_that_is_no_flag_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`activation_offloading` is 1; it must be true or false"):
        causal(tmp_path, llama(), activation_offloading=1)
