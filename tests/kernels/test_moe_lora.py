"""Adapters on experts: values and gradients are those of W + s B A, which is never made."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.moe import down as _moe_down
from liger_trainer.kernels.moe import expert_lora as _moe_lora
from liger_trainer.kernels.moe import experts as operator
from liger_trainer.kernels.moe import gate_up as _moe_gate_up
from liger_trainer.kernels.moe import grouped_library as _grouped_library
from liger_trainer.kernels.moe import grouped_rows_kernel as _grouped_rows_kernel
from liger_trainer.kernels.moe.experts import ExpertLoRA, moe_experts, moe_experts_reference
from liger_trainer.kernels.moe.routing import sort_by_expert
from tests.aot import compile_launch, recorded_launches

TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 13, 3, 5, 12, 7


class Case:
    """Operands of a block of experts with adapters, each a leaf that needs a gradient."""

    def __init__(self, ranks=(3,), bias=False, dtype=torch.float64, adapter_dtype=None, **options):
        generator = torch.Generator().manual_seed(0)

        def leaf(*shape, of=dtype):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(of).requires_grad_()

        self.options, transposed = options, options.get("transposed", False)
        width = 2 * INTERMEDIATE if options.get("gated", True) else INTERMEDIATE
        first, second = (EXPERTS, width, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
        if transposed:
            first, second = (EXPERTS, HIDDEN, width), (EXPERTS, INTERMEDIATE, HIDDEN)
        self.hidden, self.weights = leaf(TOKENS, HIDDEN), leaf(TOKENS, TOP_K)
        # The last expert has no rows, and one choice is of no expert.
        self.index = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:TOP_K] for _ in range(TOKENS)])
        self.index[4, 1] = EXPERTS
        self.bases = [leaf(*first), leaf(*second)]
        self.biases = [leaf(EXPERTS, width), leaf(EXPERTS, HIDDEN)] if bias else []
        self.factors = [
            [(leaf(EXPERTS, rank, inputs, of=of), leaf(EXPERTS, outputs, rank, of=of)) for rank in ranks]
            for inputs, outputs in ((HIDDEN, width), (INTERMEDIATE, HIDDEN))
            for of in [adapter_dtype or dtype]
        ]

    @property
    def adapters(self):
        return [factor for projection in self.factors for pair in projection for factor in pair]

    @property
    def leaves(self):
        return [self.hidden, self.weights, *self.bases, *self.biases, *self.adapters]

    def __call__(self, function=moe_experts):
        gate_up, down = ([ExpertLoRA(*pair, 0.5 + i) for i, pair in enumerate(each)] for each in self.factors)
        options = dict(self.options, gate_up_adapters=gate_up, down_adapters=down)
        if self.biases:
            options.update(gate_up_bias=self.biases[0], down_bias=self.biases[1])
        return function(self.hidden, self.index, self.weights, *self.bases, **options)

    def results(self, function=moe_experts):
        """The output and the gradients of all leaves that need one."""
        output = self(function)
        leaves = [leaf for leaf in self.leaves if leaf.requires_grad]
        upstream = torch.arange(output.numel(), dtype=torch.float64).cos().view(output.shape).to(output.dtype)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


@pytest.mark.parametrize("ranks", [(3,), (16,), (2, 17)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "transposed": True, "interleaved": True, "limit": 1.0, "up_offset": 1.0},
        {"gated": False, "activation": "relu_squared"},
        {"bias": True, "activation": "gelu_tanh", "down_multiplier": 0.5},
    ],
    ids=str,
)
def test_values_and_all_gradients(ranks, options):
    case = Case(ranks, **options)
    torch.testing.assert_close(case.results(), case.results(moe_experts_reference))


@pytest.mark.parametrize("projection", [0, 1])
def test_one_projection_alone(projection):
    case = Case()
    case.factors[1 - projection] = []
    torch.testing.assert_close(case.results(), case.results(moe_experts_reference))


def test_wide_adapters_on_half_precision():
    """Products are in the activations' dtype, gradients in the adapters'."""
    case = Case(dtype=torch.bfloat16, adapter_dtype=torch.float32)
    output, *gradients = case.results()
    assert output.dtype == torch.bfloat16
    assert [gradient.dtype for gradient in gradients] == [leaf.dtype for leaf in case.leaves]
    exact = Case()
    for leaf, wide in zip(case.leaves, exact.leaves):
        wide.data.copy_(leaf.data)
    for got, expected in zip([output, *gradients], exact.results(moe_experts_reference)):
        assert (got.double() - expected).norm() <= 0.02 * expected.norm()


def test_autocast():
    case, exact = Case(dtype=torch.float32), Case()
    for leaf, wide in zip(case.leaves, exact.leaves):
        wide.data.copy_(leaf.data)
    with torch.autocast("cpu", torch.bfloat16):
        output, *gradients = case.results()
    assert output.dtype == torch.bfloat16
    for leaf, gradient, expected in zip(case.leaves, gradients, exact.results(moe_experts_reference)[1:]):
        assert gradient.dtype == leaf.dtype
        assert (gradient.double() - expected).norm() <= 0.03 * expected.norm()


@pytest.fixture
def products(monkeypatch):
    """The shapes of the weight gradients that are computed."""
    shapes = []
    for module in (_moe_gate_up, _moe_down, _moe_lora):
        native = module.grouped_weight_gradient

        def counting(*args, native=native, **kwargs):
            shapes.append(tuple(native(*args, **kwargs).shape))
            return native(*args, **kwargs)

        monkeypatch.setattr(module, "grouped_weight_gradient", counting)
    return shapes


def test_what_is_frozen_costs_no_product(products):
    case = Case()
    for base in case.bases:
        base.requires_grad_(False)
    (first_a, first_b), (second_a, second_b) = case.factors[0][0], case.factors[1][0]
    expected = case.results(moe_experts_reference)
    torch.testing.assert_close(case.results(), expected)
    width = 2 * INTERMEDIATE
    thin = [(HIDDEN, 16), (16, HIDDEN), (16, INTERMEDIATE), (width, 16)]
    assert sorted(products) == sorted((EXPERTS, *shape) for shape in thin)

    products.clear()
    second_a.requires_grad_(False)
    first_b.requires_grad_(False)
    torch.testing.assert_close(case.results(), case.results(moe_experts_reference))
    assert products == [(EXPERTS, HIDDEN, 16), (EXPERTS, 16, HIDDEN)]

    products.clear()
    first_a.requires_grad_(False)
    second_b.requires_grad_(False)
    case.results()
    assert products == []


class Sizes(TorchDispatchMode):
    """The numbers of elements of what any operation makes."""

    def __init__(self):
        super().__init__()
        self.made = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {x.data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in inputs:
                self.made.add(tensor.numel())
        return result


def test_the_adapted_weights_are_never_made():
    case = Case(bias=True)
    for base in case.bases:
        base.requires_grad_(False)
    sizes = {base.numel() for base in case.bases}

    def made(function):
        with Sizes() as operations:
            case.results(function)
        return operations.made

    assert sizes <= made(moe_experts_reference)
    assert not sizes & made(moe_experts)


def test_parameters_alone_are_saved_for_adapters():
    case = Case()
    parameters = {leaf.data_ptr() for leaf in case.leaves}
    saved = []

    def shapes(run):
        saved.clear()
        with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            run()
        return sorted(tuple(x.shape) for x in saved if x.data_ptr() not in parameters)

    adapted = shapes(case)
    case.factors = [[], []]
    assert adapted == shapes(case)


@pytest.mark.parametrize(
    ("trained", "kept"), [((), False), ((0,), True), ((1,), True), ((0, 1), True)], ids=["none", "A", "B", "both"]
)
def test_the_input_is_kept_where_a_factor_of_the_first_layer_is_trained(trained, kept):
    case = Case(bias=True)
    factors = case.factors[0][0]
    for leaf in (*case.bases, *factors):
        leaf.requires_grad_(False)
    for position in trained:
        factors[position].requires_grad_()
    saved = set()
    with saved_tensors_hooks(lambda x: saved.add(x.data_ptr()) or x, lambda x: x):
        got = case.results()
    assert (case.hidden.data_ptr() in saved) == kept
    torch.testing.assert_close(got, case.results(moe_experts_reference))


def test_a_checkpoint_repeats_neither_the_second_product_nor_its_adapters(monkeypatch):
    case = Case()
    expected = case.results(moe_experts_reference)
    thin = []
    native = _moe_lora.grouped_rows
    monkeypatch.setattr(_moe_lora, "grouped_rows", lambda x, *a, **k: thin.append(x.shape[1]) or native(x, *a, **k))
    got = case.results(lambda *args, **kwargs: checkpoint(moe_experts, *args, use_reentrant=False, **kwargs))
    torch.testing.assert_close(got, expected)
    # z of both layers, z of the first again, then dz and z of the second and of the first
    width = 2 * INTERMEDIATE
    assert thin == [HIDDEN, INTERMEDIATE, HIDDEN, HIDDEN, INTERMEDIATE, width, HIDDEN]


@pytest.mark.parametrize("ranks", [(3,), (2, 17)], ids=str)
def test_operators_keep_torchs_rules(ranks, monkeypatch):
    calls = []
    for name in ("moe_gate_up", "moe_down_save", "moe_down"):
        native = getattr(operator, name)
        monkeypatch.setattr(operator, name, lambda *a, _f=native: calls.append((_f, a)) or _f(*a))
    Case(ranks, bias=True)()
    assert len(calls) == 3
    for each, given in calls:
        leaves = tree_map_only(torch.Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), given)
        rules = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(each, leaves, test_utils=rules)


def test_compiles_to_one_graph():
    case = Case(dtype=torch.float32)
    expected = case.results()
    compiled = torch.compile(lambda: case().square().sum(), fullgraph=True, backend="aot_eager")
    assert compiled().item() == pytest.approx(expected[0].square().sum().item())
    gradients = torch.autograd.grad(compiled(), case.leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad(case().square().sum(), case.leaves))


def test_adapters_that_do_not_fit():
    case = Case()
    (a, b) = case.factors[0][0]
    case.factors[0][0] = (a, b[:, :-1])
    with pytest.raises(ValueError, match=r"`gate_up_adapters` has an A of \(5, 3, 12\) and a B of \(5, 13, 3\); they"):
        case()
    case.factors[0][0] = (a.long(), b)
    with pytest.raises(ValueError, match=r"`gate_up_adapters` has a factor of torch.int64"):
        case()


def test_an_adapter_of_another_kind_is_named():
    hidden, index, weights = torch.randn(3, 8), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    experts = torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    adapter = torch.randn(4, 2, 6), torch.randn(4, 8, 2), 0.5
    with pytest.raises(ValueError, match=r"`down_adapters` holds a tuple; give an ExpertLoRA\(a, b, scaling\) each"):
        moe_experts(hidden, index, weights, *experts, down_adapters=[adapter])


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_kernels_compile(target):
    """The thin product of A, and the product that takes B along, in Triton and behind torch's grouped matmul."""
    rows = sort_by_expert(torch.arange(64).view(32, 2) % 4, 4)
    x, z = torch.zeros(64, 48, dtype=torch.bfloat16), torch.zeros(64, 16, dtype=torch.bfloat16)
    a, b, weight = (torch.zeros(4, *shape, dtype=torch.bfloat16) for shape in ((16, 48), (96, 16), (96, 48)))
    with recorded_launches() as launches:
        _grouped_rows_kernel.launch(z, x, a, rows, 0, False, None, None)
        _grouped_rows_kernel.launch(torch.zeros(64, 96, dtype=torch.bfloat16), x, weight, rows, 0, False, None, (z, b))
        _grouped_library.add_to_rows(torch.zeros(64, 96, dtype=torch.bfloat16), rows, None, (z, b))
    assert launches[0].arguments["COLUMNS"] == 16
    assert len(launches) == 3
    for launch in launches:
        compile_launch(launch, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_of_a_program_does_not_grow_with_the_rank(dtype):
    """Shared memory, of which an A100 has 163 KiB a program and an H100 227."""
    rows = sort_by_expert(torch.arange(4096).view(2048, 2) % 4, 4)
    x, z = torch.zeros(4096, 64, dtype=dtype), torch.zeros(4096, 512, dtype=dtype)
    b, weight = torch.zeros(4, 256, 512, dtype=dtype), torch.zeros(4, 256, 64, dtype=dtype)
    out = torch.zeros(4096, 256, dtype=dtype)
    with recorded_launches() as launches:
        _grouped_rows_kernel.launch(out, x, weight, rows, 0, False, None, (z, b))
        _grouped_library.add_to_rows(out, rows, None, (z, b))
    assert len(launches) == 2
    for launch in launches:
        assert compile_launch(launch, "sm_90").metadata.shared <= 163 * 1024
