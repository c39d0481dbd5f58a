"""tiled_mlp: gradients, what is saved, how often a forward runs, hooks, random numbers, autocast, checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.swiglu import swiglu
from liger_trainer.kernels.tiled_mlp import tile_length, tiled_mlp

HIDDEN, INTERMEDIATE = 6, 10


class MLP(nn.Module):
    def __init__(self, dropout=0.0, bias=False):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=bias)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=bias)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=bias)
        self.dropout, self.calls = nn.Dropout(dropout), 0

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.calls += 1
        return self.dropout(self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x))))


class Layer(nn.Module):
    """What stands around an MLP in a model."""

    def __init__(self, mlp, num_tiles=3):
        super().__init__()
        self.mlp, self.num_tiles = mlp, num_tiles

    def forward(self, x):
        x = x + x.sin()
        return x + tiled_mlp(MLP.forward, self.mlp, x, self.num_tiles)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def gradients(function, module, x):
    y = function(module, x)
    leaves = [leaf for leaf in (x, *module.parameters()) if leaf.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).to(y).view_as(y))]


def in_tiles(num_tiles, **options):
    return lambda module, x: tiled_mlp(MLP.forward, module, x, num_tiles, **options)


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 3, 4), (1, 1), (0,)])
@pytest.mark.parametrize("num_tiles", [1, 2, 3, 100])
def test_equals_the_mlp_itself(shape, num_tiles):
    mlp, x = MLP(bias=True).double(), torch.randn(*shape, HIDDEN, dtype=torch.float64, requires_grad=True)
    expected = gradients(MLP.forward, mlp, x)
    mlp.calls = 0
    ours = gradients(in_tiles(num_tiles), mlp, x)
    tokens = x.numel() // HIDDEN
    assert 2 <= mlp.calls <= 2 * min(num_tiles, max(tokens, 1))
    torch.testing.assert_close(ours, expected)


def test_gradcheck():
    x = torch.randn(5, HIDDEN, dtype=torch.float64, requires_grad=True)
    mlp = MLP().double()
    assert torch.autograd.gradcheck(lambda x, *_: tiled_mlp(MLP.forward, mlp, x, 2), (x, *mlp.parameters()))


def test_any_layout():
    mlp, x = MLP(), torch.randn(HIDDEN, 4, 3).permute(1, 2, 0).requires_grad_()
    torch.testing.assert_close(gradients(in_tiles(5), mlp, x), gradients(MLP.forward, mlp, x))


@pytest.mark.parametrize("frozen", ["x", "gate_proj", "everything but x", "all"])
def test_frozen_inputs_get_nothing(frozen):
    mlp, x = MLP(), torch.randn(7, HIDDEN, requires_grad=frozen not in ("x", "all"))
    if frozen == "gate_proj":
        mlp.gate_proj.requires_grad_(False)
    elif frozen != "x":
        mlp.requires_grad_(False)
    if frozen == "all":
        assert not tiled_mlp(MLP.forward, mlp, x, 3).requires_grad
    else:
        torch.testing.assert_close(gradients(in_tiles(3), mlp, x), gradients(MLP.forward, mlp, x))
    assert x.grad is None


def test_a_parameter_without_use():
    mlp, x = MLP(), torch.randn(7, HIDDEN, requires_grad=True)
    mlp.unused = nn.Parameter(torch.ones(2))
    tiled_mlp(MLP.forward, mlp, x, 3).sum().backward()
    assert mlp.unused.grad is None
    assert mlp.up_proj.weight.grad is not None


def test_tied_parameters():
    mlp, x = MLP(), torch.randn(7, HIDDEN, requires_grad=True)
    mlp.up_proj.weight = mlp.gate_proj.weight
    torch.testing.assert_close(gradients(in_tiles(3), mlp, x), gradients(MLP.forward, mlp, x))


def test_only_x_and_the_weights_are_saved():
    mlp, x, saved = MLP(), torch.randn(7, HIDDEN, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        tiled_mlp(MLP.forward, mlp, x, 3)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (x, *mlp.parameters())]


def test_sums_of_bfloat16_gradients_do_not_drift():
    """Over 64 tiles: each tile's gradient is rounded, and their sum once more, but not after every addition."""
    mlp, x = MLP().bfloat16(), torch.randn(512, HIDDEN).bfloat16().requires_grad_()
    truth = MLP().double()
    truth.load_state_dict({name: value.double() for name, value in mlp.state_dict().items()})

    def weights(gradients):
        return torch.cat([gradient.double().flatten() for gradient in gradients[2:]])

    exact = weights(gradients(MLP.forward, truth, x.detach().double().requires_grad_()))
    eager = (weights(gradients(MLP.forward, mlp, x)) - exact).norm()
    ours = gradients(in_tiles(64), mlp, x)
    assert {gradient.dtype for gradient in ours} == {torch.bfloat16}
    assert (weights(ours) - exact).norm() <= 1.25 * eager
    mlp.zero_grad()
    for tile, dy in zip(x.split(8), torch.linspace(-1, 1, x.numel()).bfloat16().view_as(x).split(8)):
        mlp(tile).backward(dy)
    assert (weights([x, x, *(p.grad for p in mlp.parameters())]) - exact).norm() > 2 * eager


def test_hooks_of_a_parameter_see_one_gradient():
    mlp, x, seen = MLP(), torch.randn(8, HIDDEN, requires_grad=True), []
    weight = mlp.up_proj.weight
    weight.register_hook(lambda gradient: seen.append(("gradient", gradient.clone())))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(("accumulated", parameter.grad.clone())))
    tiled_mlp(MLP.forward, mlp, x, 4).sum().backward()
    assert [what for what, _ in seen] == ["gradient", "accumulated"]
    whole = torch.autograd.grad(mlp(x).sum(), weight)[0]
    for _, gradient in seen:
        torch.testing.assert_close(gradient, whole)


@pytest.mark.parametrize("preserved", [True, False])
def test_dropout_is_the_forwards(preserved):
    mlp, x = MLP(dropout=0.5), torch.randn(50, HIDDEN, requires_grad=True)
    y = tiled_mlp(MLP.forward, mlp, x, 4, preserve_rng_state=preserved)
    state = torch.get_rng_state()
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(torch.get_rng_state(), state) == preserved
    alive = (y != 0).double()
    mlp.dropout.p = 0.0
    (right,) = torch.autograd.grad(mlp(x), x, 2 * alive.float())
    assert torch.allclose(dx, right, atol=1e-5) == preserved


def test_autocast_of_the_forward_holds_in_the_backward():
    mlp, x = MLP(), torch.randn(9, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = tiled_mlp(MLP.forward, mlp, x, 3)
        expected = mlp(x)
        # What autocast cached of the weights must have a graph for those who use them next.
        assert torch.autograd.grad(expected.float().sum(), mlp.up_proj.weight, retain_graph=True)[0].any()
    assert y.dtype == torch.bfloat16
    leaves = (x, *mlp.parameters())
    ours, theirs = (torch.autograd.grad(out.float().sum(), leaves) for out in (y, expected))
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, right, rtol=2e-2, atol=2e-2)


def test_two_backwards_and_a_recorded_one():
    mlp, x = MLP(), torch.randn(7, HIDDEN, requires_grad=True)
    y = tiled_mlp(MLP.forward, mlp, x, 3).sum()
    leaves = (x, *mlp.parameters())
    first = torch.autograd.grad(y, leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(y, leaves)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves)
    with pytest.raises(RuntimeError, match="tiled_mlp cannot itself be differentiated"):
        torch.autograd.grad(tiled_mlp(MLP.forward, mlp, x, 3).sum(), x, create_graph=True)


def test_a_weight_that_was_changed_since_is_noticed():
    mlp, x = MLP(), torch.randn(7, HIDDEN, requires_grad=True)
    y = tiled_mlp(MLP.forward, mlp, x, 3).sum()
    with torch.no_grad():
        mlp.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize(("use_reentrant", "runs"), [(False, 2), (True, 3)])
def test_inside_a_checkpointed_layer(use_reentrant, runs):
    """A checkpoint that stops when it has what was saved does not run the MLP a third time."""
    layers = [Layer(MLP(dropout=0.3)) for _ in range(2)]
    x = torch.randn(9, HIDDEN, requires_grad=True)
    leaves = [x, *(parameter for layer in layers for parameter in layer.parameters())]

    def backward(run):
        torch.manual_seed(1)
        y = x
        for layer in layers:
            y = run(layer, y)
        for leaf in leaves:
            leaf.grad = None
        y.square().sum().backward()
        return [leaf.grad.clone() for leaf in leaves]

    expected = backward(lambda layer, y: layer(y))
    for layer in layers:
        layer.mlp.calls = 0
    ours = backward(lambda layer, y: checkpoint(layer, y, use_reentrant=use_reentrant))
    torch.testing.assert_close(ours, expected)
    assert [layer.mlp.calls for layer in layers] == [runs * 3] * 2


def test_length_of_a_tile():
    mlp = MLP()
    a_token = 4 * 3 * (HIDDEN + INTERMEDIATE)
    x = torch.randn(10, HIDDEN)
    assert tile_length(mlp, x, 4, 1) == 3
    assert tile_length(mlp, x, None, 5 * a_token) == 5
    assert tile_length(mlp, x, None, 7 * a_token) == 5  # two tiles of one length
    assert tile_length(mlp, x, None, 1) == 1
    x = torch.randn(1000, HIDDEN)
    assert tile_length(mlp, x, None, 300 * a_token) == 256  # four tiles
    assert tile_length(mlp, x, None, 1000 * a_token) == 1000
    y = tiled_mlp(MLP.forward, mlp, x)
    assert y.shape == x.shape


def test_length_of_a_tile_of_quantised_layers():
    """Their weights are stored in other shapes, such as a column of bytes."""

    class Packed(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.weight = nn.Parameter(torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8), False)

    mlp, packed, x = MLP(), MLP(), torch.randn(1000, HIDDEN)
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(packed, name, Packed(getattr(mlp, name)))
    memory = 4 * 3 * (HIDDEN + INTERMEDIATE) * 300
    assert tile_length(packed, x, None, memory) == tile_length(mlp, x, None, memory) == 256


def test_without_gradients_one_tile_is_a_plain_call():
    mlp, x = MLP(), torch.randn(7, HIDDEN)
    with torch.no_grad():
        assert torch.equal(tiled_mlp(lambda module, tile: tile, mlp, x, 1), x)
        assert tiled_mlp(lambda module, tile: tile, mlp, x, 1) is x
        torch.testing.assert_close(tiled_mlp(MLP.forward, mlp, x, 3), mlp(x))


def test_errors():
    mlp, x = MLP(), torch.randn(7, HIDDEN)
    with pytest.raises(ValueError, match=r"`x` is \(6,\)"):
        tiled_mlp(MLP.forward, mlp, x[0])
    with pytest.raises(ValueError, match="`num_tiles` is 0"):
        tiled_mlp(MLP.forward, mlp, x, 0)
    with pytest.raises(ValueError, match="`tile_memory` is 0"):
        tiled_mlp(MLP.forward, mlp, x, tile_memory=0)
    with pytest.raises(ValueError, match="give `num_tiles`"):
        tiled_mlp(lambda module, x: x, nn.Identity(), x)
    with pytest.raises(ValueError, match=r"`mlp_forward` made \(7,\) of \(7, 6\)"):
        tiled_mlp(lambda module, x: x.sum(-1), mlp, x, 1)
    with pytest.raises(ValueError, match="`mlp_forward` made tuple"):
        tiled_mlp(lambda module, x: (x, x), mlp, x, 1)
    mlp.up_proj.weight.ds_id = 1
    with pytest.raises(ValueError, match="DeepSpeed ZeRO-3"):
        tiled_mlp(MLP.forward, mlp, x, 1)


def test_no_grad_and_inference():
    mlp, x = MLP(), torch.randn(7, HIDDEN)
    with torch.no_grad():
        torch.testing.assert_close(tiled_mlp(MLP.forward, mlp, x, 3), mlp(x))
    with torch.inference_mode():
        torch.testing.assert_close(tiled_mlp(MLP.forward, mlp, x, 3), mlp(x))


def test_compiles_fullgraph():
    torch.compiler.reset()
    mlp, x = MLP(), torch.randn(2, 7, HIDDEN, requires_grad=True)
    compiled = torch.compile(in_tiles(3), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, mlp, x), gradients(MLP.forward, mlp, x))
