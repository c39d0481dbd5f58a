"""tiled_mlp: gradients, what is saved, calls of the forward, hooks, random numbers, checkpoints, memory on a GPU."""

from __future__ import annotations

import copy
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.mlp.glu import swiglu
from liger_trainer.nn import LigerSwiGLUMLP
from liger_trainer.tiling.tiled_mlp import tile_length, tiled_mlp
from tests.calls import saved_tensors
from tests.device import peak_memory

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
    """A decoder layer without its attention."""

    def __init__(self, mlp, num_tiles=3):
        super().__init__()
        self.mlp, self.num_tiles = mlp, num_tiles

    def forward(self, x):
        x = x + x.sin()
        return x + tiled_mlp(MLP.forward, self.mlp, x, self.num_tiles)


def gradients(function, module, x):
    y = function(module, x)
    leaves = [leaf for leaf in (x, *module.parameters()) if leaf.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).to(y).view_as(y))]


def mean_error(results, exact):
    """Relative, over all results: that of one with few numbers is mostly chance."""
    pairs = [(mine, right) for mine, right in zip(results, exact, strict=True) if right is not None]
    return sum(((mine - right).norm() / right.norm()).item() for mine, right in pairs) / len(pairs)


def in_tiles(num_tiles, **options):
    return lambda module, x: tiled_mlp(MLP.forward, module, x, num_tiles, **options)


def assert_same_in_tiles(mlp, x, run=None):
    torch.testing.assert_close(gradients(run or in_tiles(3), mlp, x), gradients(MLP.forward, mlp, x))


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
    assert_same_in_tiles(MLP(), torch.randn(HIDDEN, 4, 3).permute(1, 2, 0).requires_grad_())


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
        assert_same_in_tiles(mlp, x)
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
    assert_same_in_tiles(mlp, x)


def test_a_layer_under_two_names():
    mlp, x = MLP(), torch.randn(7, HIDDEN, requires_grad=True)
    mlp.up_proj = mlp.gate_proj
    parameters = list(mlp.parameters())
    assert_same_in_tiles(mlp, x)
    assert all(ours is theirs for ours, theirs in zip(mlp.parameters(), parameters, strict=True))


def test_only_x_and_the_weights_are_saved():
    mlp, x = MLP(), torch.randn(7, HIDDEN, requires_grad=True)
    with saved_tensors() as saved:
        tiled_mlp(MLP.forward, mlp, x, 3)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (x, *mlp.parameters())]


@pytest.mark.parametrize("num_tiles", [2, 8, 64, 512])
def test_bfloat16_gradients_of_any_number_of_tiles_are_as_exact_as_those_of_the_mlp_in_one_piece(num_tiles):
    """No gradient of a tile is rounded, only the sums."""
    mlp, x = MLP(bias=True).bfloat16(), torch.randn(2048, HIDDEN).bfloat16().requires_grad_()
    truth = MLP(bias=True).double()
    truth.load_state_dict({name: value.double() for name, value in mlp.state_dict().items()})
    exact = gradients(MLP.forward, truth, x.detach().double().requires_grad_())
    ours, eager = gradients(in_tiles(num_tiles), mlp, x), gradients(MLP.forward, mlp, x)
    assert {each.dtype for each in ours} == {torch.bfloat16}
    assert mean_error(ours, exact) <= 1.25 * mean_error(eager, exact)


class Products(TorchDispatchMode):
    """Counts the multiplications of matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = args[-2:]
            self.count += left.numel() * right.shape[1]
        return function(*args, **(kwargs or {}))


def test_the_backward_computes_what_a_checkpoint_computes():
    """The result of the last layer is not computed again."""
    mlp, x = MLP(bias=True), torch.randn(8, HIDDEN, requires_grad=True)

    def work(function):
        y = function(mlp, x)
        with Products() as products:
            y.sum().backward()
        return products.count

    assert work(in_tiles(4)) == work(lambda mlp, x: checkpoint(mlp, x, use_reentrant=False)) > 0


def _checkpointed(mlp, x):
    inner = checkpoint(lambda x: swiglu(mlp.gate_proj(x), mlp.up_proj(x)), x, use_reentrant=False)
    return mlp.down_proj(inner)


def _result_in_other_places(mlp, x):
    y = mlp.down_proj(mlp.gate_proj(x).relu_())
    y.mul_(y.detach().sigmoid())
    return y


def _sometimes_the_result_itself(mlp, x):
    y = mlp.down_proj(mlp.up_proj(x).sin())
    return y * y.sigmoid() if x.sum() > 0 else y


FORWARDS = {
    "checkpoint inside": _checkpointed,
    "written in place": _result_in_other_places,
    "another result for some tiles": _sometimes_the_result_itself,
    "weights in other functions": lambda mlp, x: torch.sin(x @ mlp.gate_proj.weight.T + mlp.gate_proj(x)),
    "a layer twice": lambda mlp, x: mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.gate_proj(x.sin()))),
    "a result that is not used": lambda mlp, x: (mlp.down_proj(mlp.up_proj(x)), mlp.gate_proj(x))[0],
    "part of a result": lambda mlp, x: mlp.down_proj(mlp.up_proj(x).relu())[..., :4],
    "compiled": torch.compile(MLP.forward, backend="aot_eager", fullgraph=True),
}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_whatever_a_module_does_with_its_layers(forward, autocast):
    torch.compiler.reset()
    mlp, x = MLP(bias=True), torch.randn(20, 25, HIDDEN)
    eager = MLP.forward if forward is FORWARDS["compiled"] else forward

    def results(function, autocast=False):
        dtype = torch.float32 if autocast else torch.float64
        module, leaf = copy.deepcopy(mlp).to(dtype), x.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = function(module, leaf)
        dy = torch.linspace(-1, 1, y.numel()).to(y).view_as(y)
        return [y, *torch.autograd.grad(y, [leaf, *module.parameters()], dy, allow_unused=True)]

    eagers, exact = results(partial(_by_tile, eager), autocast), results(partial(_by_tile, eager))
    for _ in range(5):  # compiled code is compiled once
        ours = results(partial(tiled_mlp, forward, num_tiles=7), autocast)
        kinds = [[each if each is None else each.dtype for each in results] for results in (ours, eagers)]
        assert kinds[0] == kinds[1]
        # Whose gradients of tiles autocast rounds, so that the quotient of the two scatters around a half.
        assert mean_error(ours, exact) <= 4 * mean_error(eagers, exact) + 1e-12


def _by_tile(forward, mlp, x):
    """The MLP on each tile; the results of some depend on all tokens of the tile."""
    y = torch.cat([forward(mlp, tile) for tile in x.view(1, -1, HIDDEN).split(72, dim=1)], dim=1)
    return y.view(*x.shape[:-1], -1)


def test_a_hook_of_a_layer_sees_its_results():
    mlp, x, seen = MLP(), torch.randn(9, HIDDEN, requires_grad=True), []
    mlp.down_proj.register_forward_hook(lambda layer, inputs, y: seen.append(y.detach()))
    y = tiled_mlp(MLP.forward, mlp, x, 3)
    y.sum().backward()
    torch.testing.assert_close(torch.cat(seen), torch.cat([y, y]).detach())


def test_layers_are_what_they_were_after_an_error():
    mlp, x, calls = MLP(), torch.randn(9, HIDDEN, requires_grad=True), []

    def forward(module, tile):
        calls.append(tile)
        if len(calls) > 4:
            raise KeyError("in the backward")
        return module(tile)

    y = tiled_mlp(forward, mlp, x, 3)
    with pytest.raises(KeyError, match="in the backward"):
        y.sum().backward()
    assert {type(layer) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)} == {nn.Linear}
    torch.testing.assert_close(mlp(x), y)


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
        # The weights that autocast has cached must have a graph for later uses.
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
    """A checkpoint that stops at the last saved tensor does not run the MLP a third time."""
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
    """Their weights have other shapes, such as a column of bytes."""

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": torch.randn(HIDDEN)}, r"`x` is \(6,\)"),
        ({"num_tiles": 0}, "`num_tiles` is 0"),
        ({"tile_memory": 0}, "`tile_memory` is 0"),
        ({"module": nn.Identity()}, "give `num_tiles`"),
        ({"mlp_forward": lambda module, x: x.sum(-1), "num_tiles": 1}, r"`mlp_forward` returned \(7,\) for \(7, 6\)"),
        ({"mlp_forward": lambda module, x: (x, x), "num_tiles": 1}, "`mlp_forward` returned tuple"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        tiled_mlp(**{"mlp_forward": MLP.forward, "module": MLP(), "x": torch.randn(7, HIDDEN), **options})


def test_partitioned_parameters_are_refused():
    mlp = MLP()
    mlp.up_proj.weight.ds_id = 1
    with pytest.raises(ValueError, match="DeepSpeed ZeRO-3"):
        tiled_mlp(MLP.forward, mlp, torch.randn(7, HIDDEN), 1)


def test_inference_mode():
    mlp, x = MLP(), torch.randn(7, HIDDEN)
    with torch.inference_mode():
        torch.testing.assert_close(tiled_mlp(MLP.forward, mlp, x, 3), mlp(x))


def test_compiles_fullgraph():
    torch.compiler.reset()
    mlp, x = MLP(), torch.randn(2, 7, HIDDEN, requires_grad=True)
    compiled = torch.compile(in_tiles(3), fullgraph=True, backend="aot_eager")
    assert_same_in_tiles(mlp, x, compiled)


@pytest.mark.gpu
def test_tiles_need_the_memory_of_a_tile(device):
    config = types.SimpleNamespace(hidden_size=4096, intermediate_size=14336, hidden_act="silu")
    with torch.device(device):
        mlp = LigerSwiGLUMLP(config).bfloat16()
    x, dy = (torch.randn(1, 32768, 4096, device=device).bfloat16() for _ in range(2))
    x.requires_grad_()
    leaves = [x, *mlp.parameters()]

    def tiled(num_tiles=None):
        y = tiled_mlp(LigerSwiGLUMLP.forward, mlp, x, num_tiles)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    weights = sum(p.numel() for p in mlp.parameters())
    floor = 2 * x.numel() * 2 + weights * (4 + 2)  # y, dx; the summed and the rounded gradients
    whole = peak_memory(lambda: torch.autograd.grad(mlp(x), leaves, dy))
    assert peak_memory(tiled) <= floor + 640 * 2**20 < whole
    expected = [mlp(x), *torch.autograd.grad(mlp(x), leaves, dy)]
    for ours, right in zip(tiled(), expected):
        assert (ours - right).norm() <= 5e-3 * right.norm()
