"""Adapters on experts: values and gradients are those of W + s B A, which is never built."""

from __future__ import annotations

import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.moe import expert_layers as layers
from liger_trainer.kernels.moe import expert_lora
from liger_trainer.kernels.moe.experts import ExpertLoRA, moe_experts, moe_experts_reference
from tests.calls import created_sizes, recorded_calls, saved_tensors

TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 13, 3, 5, 12, 7


class Case:
    """Operands of a block of experts with adapters, each a leaf that needs a gradient."""

    def __init__(self, ranks=(3,), bias=False, dtype=torch.float64, adapter_dtype=None, device="cpu", **options):
        generator = torch.Generator().manual_seed(0)

        def leaf(*shape, of=dtype):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, of).requires_grad_()

        self.options, transposed = options, options.get("transposed", False)
        width = 2 * INTERMEDIATE if options.get("gated", True) else INTERMEDIATE
        first, second = (EXPERTS, width, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
        if transposed:
            first, second = (EXPERTS, HIDDEN, width), (EXPERTS, INTERMEDIATE, HIDDEN)
        self.hidden, self.weights = leaf(TOKENS, HIDDEN), leaf(TOKENS, TOP_K)
        # The last expert has no rows, and one choice is no expert.
        self.index = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:TOP_K] for _ in range(TOKENS)])
        self.index[4, 1] = EXPERTS
        self.index = self.index.to(device)
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
        upstream = torch.arange(output.numel(), dtype=torch.float64).cos().view(output.shape).to(output)
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


@pytest.mark.kernel
@pytest.mark.parametrize("ranks", [(3,), (2, 17)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True, "transposed": True, "interleaved": True}, {"gated": False, "activation": "gelu"}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_all_gradients_of_the_kernels(dtype, options, ranks, device):
    case = Case(ranks, dtype=dtype, adapter_dtype=torch.float32, device=device, **options)
    wide = Case(ranks, device=device, **options)
    for leaf, exact in zip(case.leaves, wide.leaves):
        exact.data.copy_(leaf.data)
    for ours, true in zip(case.results(), wide.results(moe_experts_reference)):
        assert (ours.double() - true).norm() <= (4e-6 if dtype == torch.float32 else 6e-2) * true.norm()


@pytest.mark.kernel
@pytest.mark.parametrize("options", [{}, {"bias": True, "transposed": True}], ids=str)
def test_ranks_of_several_steps(options, device):
    case, wide = (Case((50, 30), dtype=dtype, device=device, **options) for dtype in (torch.float32, torch.float64))
    for ours, true in zip(case.results(), wide.results(moe_experts_reference)):
        assert (ours.double() - true).norm() <= 1e-6 * true.norm()


@pytest.mark.parametrize("projection", [0, 1])
def test_one_projection_alone(projection):
    case = Case()
    case.factors[1 - projection] = []
    torch.testing.assert_close(case.results(), case.results(moe_experts_reference))


def error_of_all(results, exact):
    """Of their relative errors together: one alone is up to three times as far off as most."""
    errors = [(each.double() - true).norm() / true.norm() for each, true in zip(results, exact, strict=True)]
    return torch.stack(errors).square().mean().sqrt()


def test_wide_adapters_on_half_precision():
    """Products are in the activations' dtype, gradients in the adapters'."""
    case = Case(dtype=torch.bfloat16, adapter_dtype=torch.float32)
    output, *gradients = case.results()
    assert output.dtype == torch.bfloat16
    assert [gradient.dtype for gradient in gradients] == [leaf.dtype for leaf in case.leaves]
    exact = Case()
    for leaf, wide in zip(case.leaves, exact.leaves):
        wide.data.copy_(leaf.data)
    assert error_of_all([output, *gradients], exact.results(moe_experts_reference)) <= 0.05


def test_autocast():
    case, exact = Case(dtype=torch.float32), Case()
    for leaf, wide in zip(case.leaves, exact.leaves):
        wide.data.copy_(leaf.data)
    with torch.autocast("cpu", torch.bfloat16):
        output, *gradients = case.results()
    assert output.dtype == torch.bfloat16
    assert [gradient.dtype for gradient in gradients] == [leaf.dtype for leaf in case.leaves]
    assert error_of_all([output, *gradients], exact.results(moe_experts_reference)) <= 0.05


@pytest.fixture
def products(monkeypatch):
    """The shapes of the weight gradients that are computed."""
    shapes = []
    for module in (layers, expert_lora):
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


def test_the_adapted_weights_are_never_made():
    case = Case(bias=True)
    for base in case.bases:
        base.requires_grad_(False)
    sizes = {base.numel() for base in case.bases}
    assert sizes <= created_sizes(lambda: case.results(moe_experts_reference))
    assert not sizes & created_sizes(case.results)


def test_parameters_alone_are_saved_for_adapters():
    case = Case()
    parameters = {leaf.data_ptr() for leaf in case.leaves}

    def shapes(run):
        with saved_tensors() as saved:
            run()
        return sorted(tuple(x.shape) for x in saved if x.data_ptr() not in parameters)

    adapted = shapes(case)
    case.factors = [[], []]
    assert adapted == shapes(case)


@pytest.mark.parametrize(
    ("trained", "saves_input"),
    [((), False), ((0,), True), ((1,), True), ((0, 1), True)],
    ids=["none", "A", "B", "both"],
)
def test_the_saves_input_where_a_factor_of_the_first_layer_is_trained(trained, saves_input):
    case = Case(bias=True)
    factors = case.factors[0][0]
    for leaf in (*case.bases, *factors):
        leaf.requires_grad_(False)
    for position in trained:
        factors[position].requires_grad_()
    with saved_tensors() as saved:
        got = case.results()
    assert (case.hidden.data_ptr() in {x.data_ptr() for x in saved}) == saves_input
    torch.testing.assert_close(got, case.results(moe_experts_reference))


def test_a_checkpoint_repeats_neither_the_second_product_nor_its_adapters(monkeypatch):
    case = Case()
    expected = case.results(moe_experts_reference)
    thin = recorded_calls(monkeypatch, expert_lora, "grouped_rows")
    got = case.results(lambda *args, **kwargs: checkpoint(moe_experts, *args, use_reentrant=False, **kwargs))
    torch.testing.assert_close(got, expected)
    # z of both layers, z of the first again, then dz and z of the second and of the first
    width = 2 * INTERMEDIATE
    widths = [x.shape[1] for _, _, (x, *_) in thin]
    assert widths == [HIDDEN, INTERMEDIATE, HIDDEN, HIDDEN, INTERMEDIATE, width, HIDDEN]


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
    with pytest.raises(ValueError, match=r"`down_adapters` holds a tuple; give ExpertLoRA\(a, b, scaling\)"):
        moe_experts(hidden, index, weights, *experts, down_adapters=[adapter])


# ---------------------------------------------------------------------------------------------------------------------
# A real layer on a GPU
# ---------------------------------------------------------------------------------------------------------------------

LAYER = types.SimpleNamespace(tokens=4096, top_k=8, experts=64, hidden=2048, intermediate=768)
SCALING = 2.0


def operands(device, rank, transposed=False, dtype=torch.bfloat16):
    """Hidden states, choices and their weights, frozen weights in `dtype`, and adapters in fp32."""
    torch.manual_seed(0)

    def randn(*shape, scale):
        return (scale * torch.randn(shape, device=device)).to(dtype)

    hidden = randn(LAYER.tokens, LAYER.hidden, scale=1.0).requires_grad_()
    weights, index = torch.randn(LAYER.tokens, LAYER.experts, device=device).softmax(-1).topk(LAYER.top_k)
    layers = []
    for inputs, outputs in ((LAYER.hidden, 2 * LAYER.intermediate), (LAYER.intermediate, LAYER.hidden)):
        weight = randn(LAYER.experts, outputs, inputs, scale=inputs**-0.5)
        a, b = randn(LAYER.experts, rank, inputs, scale=inputs**-0.5), randn(LAYER.experts, outputs, rank, scale=0.1)
        factors = [each.float().requires_grad_() for each in (a, b)]
        layers.append([weight.mT.contiguous() if transposed else weight, *factors])
    return hidden, index, weights.requires_grad_(), layers


def ours(hidden, index, weights, layers, transposed=False):
    (first, *first_adapter), (second, *second_adapter) = layers
    adapters = [[ExpertLoRA(*adapter, SCALING)] for adapter in (first_adapter, second_adapter)]
    return moe_experts(
        *(hidden, index, weights, first, second),
        transposed=transposed,
        gate_up_adapters=adapters[0],
        down_adapters=adapters[1],
    )


def adapted(hidden, index, weights, layers, transposed=False):
    """With W + s B A, as PEFT builds it."""
    parameters = []
    for weight, a, b in layers:
        left, right = (a.mT, b.mT) if transposed else (b, a)
        parameters.append(torch.baddbmm(weight, left.to(weight.dtype), right.to(weight.dtype), alpha=SCALING))
    return moe_experts(hidden, index, weights, *parameters, transposed=transposed)


def layer_gradients(function, case, upstream, **options):
    hidden, _, weights, layers = case
    output = function(*case, **options)
    leaves = [hidden, weights, *(factor for layer in layers for factor in layer[1:])]
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rank", "dtype"), [(4, torch.bfloat16), (16, torch.float16), (64, torch.bfloat16)], ids=str)
def test_no_worse_than_adapted_weights(device, rank, dtype, transposed):
    """In bf16 torch's grouped matmul may take the products, in fp16 they are Triton's."""
    hidden, index, weights, layers = case = operands(device, rank, transposed, dtype)
    upstream = torch.randn(LAYER.tokens, LAYER.hidden, device=device).to(dtype)
    with torch.device(device):
        exact = (
            hidden.detach().double().requires_grad_(),
            index,
            weights.detach().double().requires_grad_(),
            [[each.detach().double().requires_grad_(each.requires_grad) for each in layer] for layer in layers],
        )
    truth = layer_gradients(adapted, exact, upstream.double(), transposed=transposed)
    del exact
    results = [layer_gradients(function, case, upstream, transposed=transposed) for function in (ours, adapted)]
    for position, (our, their, true) in enumerate(zip(*results, truth)):
        assert our.dtype == their.dtype
        error, allowed = ((each.double() - true).norm() / true.norm() for each in (our, their))
        assert error <= 1.1 * allowed + 2**-9, position


@pytest.mark.gpu
def test_memory_is_that_of_the_activations(device):
    case = operands(device, 16)
    weights = sum(layer[0].nbytes for layer in case[3])

    def held_and_peak(function):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = function(*case)
        held = torch.cuda.memory_allocated() - before - output.nbytes
        leaves = [case[0], *(factor for layer in case[3] for factor in layer[1:])]
        torch.autograd.grad(output, leaves, torch.ones_like(output))
        return held, torch.cuda.max_memory_allocated() - before

    pre = LAYER.tokens * LAYER.top_k * 2 * LAYER.intermediate * 2
    held, peak = held_and_peak(ours)
    adapted_held, adapted_peak = held_and_peak(adapted)
    assert held <= 1.05 * pre
    assert adapted_held >= pre + weights
    assert peak < adapted_peak - weights
