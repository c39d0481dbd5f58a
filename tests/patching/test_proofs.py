"""Where proofs look: what differs from a served part at one kind of input alone, or keeps something, is left alone."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

from liger_trainer import apply_liger_kernel
from liger_trainer.head.forward import make_head_forward
from liger_trainer.patching import inputs
from liger_trainer.patching.head import TOLERANCE, probe_head
from liger_trainer.patching.moe.load_balancing import _prove
from liger_trainer.patching.probe import Probe, identity
from liger_trainer.patching.side_effects import SideEffectError, run_part
from liger_trainer.patching.trial import FP32_TOLERANCE, Trial
from tests.patching import toys, twins
from tests.patching.test_routers import ONLY
from tests.tiny_models import TINY_MODELS

CPU = torch.device("cpu")
OF_KIND = {"gated_norm": ("rms_norm",), "layer_norm": ("layer_norm", "rms_norm"), "block": ("experts",)}
"""The components of kinds with another name; a LayerNorm that is none of ours may be any norm."""
ALL_TWINS = [(kind, name) for kind, (_, table) in twins.TWINS.items() for name in table]


def rows_of(module, kind):
    report = apply_liger_kernel(toys.Toy(it=module), ONLY)
    components = OF_KIND.get(kind, (kind, "other"))  # what looks like no served part is another
    return [row for row in report if row.component in components]


def report_of(model):
    return [(row.component, row.target, row.count, row.kernel, row.reason) for row in apply_liger_kernel(model)]


def test_there_are_twins_of_every_kind():
    assert len(ALL_TWINS) >= 40
    assert all(len(table) >= 3 for _, table in twins.TWINS.values())


@pytest.mark.parametrize("kind", twins.TWINS)
def test_what_they_are_twins_of_is_served(kind):
    rows = rows_of(twins.TWINS[kind][0](), kind)
    assert rows
    assert all(row.applied and row.probe_error <= FP32_TOLERANCE / 4 for row in rows)


def test_the_router_with_a_correction_that_has_twins_is_served():
    assert all(row.applied and row.probe_error <= FP32_TOLERANCE / 4 for row in rows_of(twins.Corrected(), "router"))


@pytest.mark.parametrize(("kind", "name"), ALL_TWINS)
def test_a_twin_is_left_alone_with_the_reason(kind, name):
    module = twins.TWINS[kind][1][name]()
    before = dict(module.__dict__)
    del twins.RECORDED[:]
    rows = rows_of(module, kind)
    assert rows
    assert not any(row.applied for row in rows)
    assert all(row.reason for row in rows)
    assert "forward" not in module.__dict__
    assert all("also sets" in row.reason for row in rows) == name.startswith(("keeps", "counts", "moves"))
    # The proof has left no trace either.
    assert module.__dict__.keys() == before.keys()
    assert getattr(module, "seen", []) == []
    assert twins.RECORDED == []


def limited(value, limit):
    return value.clamp(-limit, limit)


ATTENTIONS = {  # what becomes of the scores and of the values, and the inputs that show it
    "scores up to 20": (lambda module, scores, values: (limited(scores, 20), values), "scores of about 8"),
    "values up to 100": (lambda module, scores, values: (scores, limited(values, 100)), "values of about 300"),
    "another scale in evaluation": (
        lambda module, scores, values: (scores * (1 if module.training else 1.01), values),
        "evaluation mode",
    ),
    "scores of 0 are ranked": (
        lambda module, scores, values: (scores + (scores == 0) * torch.arange(scores.shape[-1]), values),
        "rows of zeros",
    ),
}


@pytest.mark.parametrize("name", ["served", *ATTENTIONS])
def test_an_attention_is_proved_where_its_formula_matters(name, monkeypatch):
    change, case = ATTENTIONS.get(name, (lambda module, scores, values: (scores, values), ""))

    def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        groups = module.num_key_value_groups
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        scores, value = change(module, query @ key.transpose(2, 3) * scaling, value)
        scores = scores if attention_mask is None else scores + attention_mask
        weights = scores.softmax(-1, torch.float32).to(query.dtype)
        return (weights @ value).transpose(1, 2), weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager_attention_forward)
    (row,) = (row for row in apply_liger_kernel(TINY_MODELS["llama"]()) if row.component == "attention")
    assert row.applied == (name == "served"), row.reason
    assert case in row.reason


def test_the_reason_names_the_inputs():
    def reason(kind, name):
        return rows_of(twins.TWINS[kind][1][name](), kind)[0].reason

    assert "with mean squares near epsilon, relative difference" in reason("rms_norm", "epsilon outside the root")
    assert "with evaluation mode" in reason("rms_norm", "no weight in evaluation")
    assert "with inputs of about 300" in reason("experts", "gates up to 500")
    assert "with rows of zeros" in reason("swiglu", "zero rows give ones")
    assert "with more tokens than experts x k" in reason("router", "a capacity of 2.5")
    assert reason("router", "keeps a loss").startswith("its forward also sets aux")


class WithoutAutocast(twins.MLP):
    def forward(self, states):
        with torch.autocast(states.device.type, enabled=False):
            return super().forward(states)


class SquaredWithoutAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, states):
        with torch.autocast(states.device.type, enabled=False):
            return self.down_proj(self.up_proj(states).relu().square())


class LimitedInHalf:
    """Limits its inputs in float16 alone, as T5 does."""

    def forward(self, states):
        return super().forward(states.clamp(-100.0, 100.0) if states.dtype == torch.float16 else states)


class NormLimitedInHalf(LimitedInHalf, toys.Norm):
    pass


class MLPLimitedInHalf(LimitedInHalf, twins.MLP):
    pass


@pytest.mark.parametrize(
    ("part", "kind", "case"),
    [
        (WithoutAutocast, "swiglu", "autocast"),
        (SquaredWithoutAutocast, "relu_squared", "autocast"),
        (NormLimitedInHalf, "rms_norm", "float16"),
        (MLPLimitedInHalf, "swiglu", "float16"),
    ],
)
def test_where_another_precision_is_another_formula_the_class_runs(part, kind, case):
    torch.manual_seed(0)
    module = part()
    x = torch.randn(2, 3, 8) * torch.tensor([1.0, 300.0, 1.0]).view(3, 1)
    if case == "float16":
        module, x = module.half(), x.half()
    original = copy.deepcopy(module)
    (row,) = (row for row in rows_of(module, kind) if row.applied)
    assert row.component == kind
    assert row.reason == ("under autocast its class's own code runs" if case == "autocast" else "")
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        ours, expected = module(x), original(x)
    assert expected.isfinite().all()
    assert ours.dtype == expected.dtype
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("attribute", ["limit", "_limit"])
def test_modules_that_differ_in_an_attribute_have_a_proof_each(attribute):
    class Limited(twins.MLP):
        def product(self, gate, up):
            limit = getattr(self, attribute)
            return F.silu(gate if limit is None else gate.clamp(max=limit)) * up

    free, limited = Limited(), Limited()
    setattr(free, attribute, None)
    setattr(limited, attribute, 0.7)
    report = apply_liger_kernel(toys.Toy(one=free, other=limited), ONLY)
    assert sorted((row.count, row.applied) for row in report) == [(1, False), (1, True)]


def test_equal_modules_share_a_proof():
    assert identity(nn.LayerNorm(8)) == identity(nn.LayerNorm(8))
    assert identity(nn.LayerNorm(8)) != identity(nn.LayerNorm(8, bias=False))
    assert identity(nn.LayerNorm(8)) != identity(nn.LayerNorm(8, eps=1e-6))
    gelus = TINY_MODELS["gemma"]().model.layers
    assert identity(gelus[0].mlp) == identity(gelus[1].mlp)


# ---------------------------------------------------------------------------------------------------------------------
# The head and the load-balancing loss
# ---------------------------------------------------------------------------------------------------------------------


def changed_head(change):
    deferring = make_head_forward(True, 2**20)
    return lambda self, input: deferring(self, change(input))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.clamp(-20.0, 20.0),
        lambda x: x.where(x.abs() > 1e-4, 0.0),
        lambda x: x.where(x.any(-1, keepdim=True), 1.0),
    ],
)
def test_a_head_is_proved_on_every_input(change):
    assert probe_head(changed_head(lambda x: x), False, CPU) <= 1e-6
    assert not probe_head(changed_head(change), False, CPU) <= TOLERANCE


def test_a_load_balancing_loss_is_proved_on_large_logits():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as native

    def limited(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        return native(tuple(each.clamp(-10.0, 10.0) for each in gate_logits), num_experts, top_k, attention_mask)

    probe = Probe(CPU)
    with probe.isolated():
        assert _prove(native, probe).equal
        assert "another loss (with logits of about 30" in _prove(limited, probe).reason


# ---------------------------------------------------------------------------------------------------------------------
# The lists
# ---------------------------------------------------------------------------------------------------------------------

LISTS = {
    "norm": (inputs.norm_inputs(1e-5), [(2, 5, 8), (8,)]),
    "norm of heads": (inputs.norm_inputs(1e-5), [(2, 5, 3, 8), (3, 8)]),
    "norm of one head": (inputs.norm_inputs(1e-5), [(2, 5, 1, 8), (1, 8)]),
    "norm with a gate": (inputs.norm_inputs(1e-5) + inputs.GATES, [(2, 5, 8), (2, 5, 8), (8,)]),
    "mlp": (inputs.MLP, [(4, 16, 8), (12, 8), (8, 12)]),
    "router": (inputs.ROUTER + inputs.BIASES, [(32, 8), (6, 8), (6,)]),
    "rotation": (inputs.ROTATION, [(2, 4, 5, 8), (2, 2, 5, 8)]),
    "head": (inputs.HEAD, [(2, 8, 8)]),
}


@pytest.mark.parametrize("name", LISTS)
def test_cases_change_values_alone(name):
    """Neither dtypes nor, but for norms, shapes, for which a GPU would compile again; nor what they are given."""
    cases, shapes = LISTS[name]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=generator) for shape in shapes]
    given = copy.deepcopy(tensors)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        changed = case.change(list(tensors))
        if case.required:
            layouts = [[(x.shape, x.dtype, x.stride()) for x in each] for each in (changed, tensors)]
            assert layouts[0] == layouts[1]
        else:
            assert all(one.dtype == other.dtype for one, other in zip(changed, tensors))
        infinite = case is inputs.NOT_FINITE or case.name in ("gates that are not finite", "biases of minus infinity")
        assert all(x.isfinite().all() for x in changed) != infinite
        assert not (case.training and case.gradients) or not all(map(torch.equal, changed, tensors))
    assert all(map(torch.equal, tensors, given))


def test_large_terms_of_a_weights_gradient_do_not_cancel():
    """Their sum would be little but rounding, which differs from kernel to kernel."""
    (case,) = (case for case in inputs.norm_inputs(1e-5) if case.name == "one large element in a row")
    x = case.change([torch.randn(2, 5, 16), torch.randn(16)])[0].flatten(0, 1)
    assert (x.abs() == 300.0).sum(1).tolist() == [1] * 10
    assert len({*x.abs().argmax(1).tolist()}) == 10


def test_more_tokens_than_places():
    hidden, weight = inputs.crowded(6, 2).change([torch.randn(4, 8), torch.randn(6, 8)])
    assert hidden.shape == (1060, 8)
    assert weight.shape == (6, 8)


def test_the_original_runs_once_on_each_input():
    calls = []

    def original(x, training=True):
        calls.append((x.dtype, training))
        return x.sin()

    trial = Trial(original, [torch.linspace(-1.0, 1.0, 64).view(8, 8)], inputs.MODES)
    for ours in (torch.cos, torch.sin, torch.sin):
        agreement = trial.prove(lambda x, training=True, ours=ours: ours(x))
    assert agreement.equal
    assert calls == [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False), (torch.float32, False)]


def test_not_a_number_counts_as_equal_in_a_case_alone():
    zero = [torch.ones(4, 4)]
    trial = Trial(lambda x: x / x, zero, [inputs.ZERO_ROWS])
    assert trial.prove(lambda x: x / x).equal
    refused = trial.prove(lambda x: (x / x).nan_to_num(1.0))
    assert math.isinf(refused.error)
    assert refused.case == "rows of zeros"
    everywhere = Trial(lambda x: x * math.nan, zero)
    assert not everywhere.compare(lambda x: x * math.nan).equal


def test_what_the_original_does_not_take_says_nothing_where_it_need_not():
    def original(x):
        if x.dim() != 3:
            raise ValueError("three dimensions")
        return x.sin()

    flat = inputs.Case("flat", lambda tensors: [tensors[0].flatten(0, 1)], required=False)
    x = [torch.linspace(-1.0, 1.0, 64).view(2, 4, 8)]
    assert Trial(original, x, [flat]).prove(torch.sin).equal
    assert not Trial(original, x, [dataclasses.replace(flat, required=True)]).prove(torch.sin).equal
    other_when_flat = Trial(torch.sin, x, [flat]).prove(lambda x: x.sin() * (x.dim() - 2))
    assert other_when_flat.case == "flat"


def test_a_gradient_that_is_not_a_number_is_seen():
    def ours(x):
        return x + (x - x.detach()).abs().sqrt()  # the values are those of x

    assert not Trial(lambda x: x * 1.0, [torch.ones(4, 4)]).compare(ours).equal


# ---------------------------------------------------------------------------------------------------------------------
# What a forward leaves behind, and the state around it
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [{"a": 1}, [1, 2], {3}])
def test_shared_containers_get_back_what_they_held(held):
    class Keeps(nn.Module):
        shared = held

        def forward(self, x):
            (self.shared.update if hasattr(self.shared, "update") else self.shared.extend)({5: x})
            return x

    before = copy.copy(held)
    with pytest.raises(SideEffectError, match=r"also sets Keeps\.shared"):
        run_part(Keeps.forward, Keeps(), torch.ones(2))
    assert held == before


def test_nothing_is_kept_by_reading():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].eval()
    x = torch.ones(3, 2)
    torch.testing.assert_close(run_part(type(module).forward, module, x), module(x))
    module.train()
    with pytest.raises(SideEffectError, match=r"also sets 1\.num_batches_tracked, which"):
        run_part(type(module).forward, module, x)


def state_around():
    products = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    return torch.get_default_dtype(), torch.get_default_device(), torch.is_inference_mode_enabled(), products


class Ambient:
    """States of a process in which a model may be patched."""

    @staticmethod
    def default_dtype():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        return lambda: torch.set_default_dtype(before)

    @staticmethod
    def default_device():
        torch.set_default_device("meta")
        return lambda: torch.set_default_device(None)

    @staticmethod
    def products_in_bf16():
        torch.set_float32_matmul_precision("medium")
        return lambda: torch.set_float32_matmul_precision("highest")

    @staticmethod
    def inference():
        mode = torch.inference_mode()
        mode.__enter__()
        return lambda: mode.__exit__(None, None, None)

    @staticmethod
    def empty_weights():
        """As accelerate builds models: parameters that are registered meanwhile are on the meta device."""
        before = nn.Module.register_parameter

        def register(module, name, parameter):
            before(module, name, None if parameter is None else nn.Parameter(parameter.to("meta")))

        nn.Module.register_parameter = register
        return lambda: setattr(nn.Module, "register_parameter", before)


@pytest.mark.parametrize("state", [name for name in vars(Ambient) if not name.startswith("_")])
def test_the_state_around_changes_nothing(state):
    model = TINY_MODELS["qwen3_moe"]()
    expected = report_of(model)
    assert all(kernel for _, _, _, kernel, _ in expected)
    restore = getattr(Ambient, state)()
    try:
        before = state_around()
        assert report_of(model) == expected
        assert state_around() == before
    finally:
        restore()


def test_constants_of_a_forward_have_the_dtype_of_a_fresh_process():
    thirds = twins.norm(lambda self, x: self.weight * self.normed(x) * torch.tensor(1 / 3) * 3.0)()
    restore = Ambient.default_dtype()
    try:
        (row,) = rows_of(thirds, "rms_norm")
    finally:
        restore()
    assert row.applied, row.reason


def test_a_proof_with_dropout_draws_nothing_of_the_callers():
    module = twins.MLPS["dropout"]()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    (row,) = rows_of(module, "swiglu")
    assert not row.applied
    assert torch.equal(torch.rand(3), expected)


def test_the_report_says_how_long_it_took():
    report = apply_liger_kernel(toys.Toy(it=toys.Norm()), ONLY)
    assert report.seconds > 0.0
    assert str(report).endswith(f"Proved and patched in {report.seconds:.1f} s.")
    assert report == apply_liger_kernel(toys.Toy(it=toys.Norm()), ONLY)


def test_a_norm_with_one_weight_for_a_row_of_many_runs_as_written():
    """Torch spreads the weight over the row; the kernel's is as long as the row."""
    model = toys.Toy(it=twins.norm(lambda self, x: self.weight * self.normed(x), size=1)())
    x = torch.randn(3, 64)
    expected = model.it(x)
    assert any(row.applied for row in apply_liger_kernel(model, ONLY) if row.component == "rms_norm")
    torch.testing.assert_close(model.it(x), expected, rtol=0, atol=0)
