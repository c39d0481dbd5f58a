"""`LigerAdamW` is AdamW on fp32 weights, whatever the weights are in, and keeps its state however it is saved."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter

from liger_trainer.optim import LigerAdamW, adamw_state_dict
from liger_trainer.optim.states import remainder_of
from tests.optim.stored import as_stored

STATES = ("8bit", "bf16", "fp32")
MASTERS = ("remainder", "stochastic", None)
CODED = (16, 256)  # the smallest shape with states in 8 bits
DTYPES = (torch.float32, torch.float16)


def _weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype)) for shape in shapes]


def _gradients(parameters: list[Parameter], step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(each.shape, generator=generator).to(each.dtype) for each in parameters]


def _train(optimizer: Any, parameters: list[Parameter], steps: range) -> None:
    for step in steps:
        for parameter, gradient in zip(parameters, _gradients(parameters, step)):
            parameter.grad = gradient
        optimizer.step()


def _numbers(optimizer: LigerAdamW, parameters: list[Parameter]) -> list[torch.Tensor]:
    """All that an optimizer trains and keeps, as integers: NaN equals itself, and -0 is not 0."""
    whole = [tensor for each in parameters for tensor in (each.detach(), *optimizer.state[each].values())]
    return [tensor.clone().view(torch.uint8) if tensor.ndim else tensor.clone() for tensor in whole]


def _same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(torch.equal(*pair) for pair in zip(found, wanted))


@pytest.mark.parametrize("shape", [(3, 5), CODED, (), (0, 4)])
def test_bf16_weights_are_trained_as_fp32_ones(shape: tuple[int, ...]) -> None:
    """Bit for bit, for 1,000 steps, with groups, a schedule, decay masks and parameters that join later."""
    ours = _weights(shape, shape, shape, shape)
    theirs = [Parameter(each.detach().float()) for each in ours]
    both = []
    for build, (decayed, plain, fast, late) in (
        (lambda groups: LigerAdamW(groups, lr=2e-4, betas=(0.8, 0.95), states="fp32"), ours),
        (lambda groups: torch.optim.AdamW(groups, lr=2e-4, betas=(0.8, 0.95), foreach=False), theirs),
    ):
        groups = [{"params": [decayed], "weight_decay": 0.1}, {"params": [plain, late], "weight_decay": 0.0}]
        optimizer: Any = build(groups)
        optimizer.add_param_group({"params": [fast], "lr": 3e-2, "eps": 1e-3})
        both.append((optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000, 1e-7)))
    for step in range(1000):
        gradients = _gradients(ours, step)
        for parameters, (optimizer, schedule) in zip((ours, theirs), both):
            for index, (parameter, gradient) in enumerate(zip(parameters, gradients)):
                absent = index == 3 and (step < 500 or step % 3 == 0)
                parameter.grad = None if absent else gradient.to(parameter.dtype)
            optimizer.step()
            schedule.step()
    optimizer, reference = (each for each, _ in both)
    for parameter, wanted in zip(ours, theirs):
        assert torch.equal(optimizer.fp32_weight(parameter), wanted)
        for name, value in reference.state[wanted].items():
            assert torch.equal(optimizer.state[parameter][name], value)


@pytest.mark.parametrize("seed", range(3))
def test_small_updates_are_not_lost(seed: int) -> None:
    """300 updates with a learning rate of 5e-7, at which bf16 alone stands still."""
    generator = torch.Generator().manual_seed(seed)
    (start,) = _weights((32, 256), seed=seed)
    signal = torch.randn(start.shape, generator=generator)  # which gives the updates a direction
    runs: dict[str, tuple[Any, Parameter]] = {}
    for name in (*STATES, "stochastic", "bf16 alone"):
        weight = Parameter(start.detach().clone())
        options: dict[str, Any] = {"master": name} if name == "stochastic" else {"states": name}
        kind = torch.optim.AdamW if name == "bf16 alone" else LigerAdamW
        runs[name] = kind([weight], lr=5e-7, weight_decay=0, **({} if name == "bf16 alone" else options)), weight
    for _ in range(300):
        gradient = (signal + torch.randn(start.shape, generator=generator)).bfloat16()
        for optimizer, weight in runs.values():
            weight.grad = gradient.clone()
            optimizer.step()

    changed = {name: (weight != start).float().mean().item() for name, (_, weight) in runs.items()}
    way = {name: runs[name][0].fp32_weight(runs[name][1]) - start.float() for name in (*STATES, "stochastic")}
    way["bf16 alone"] = runs["bf16 alone"][1].detach().float() - start.float()
    whole = way["fp32"]
    error = {name: ((each - whole).norm() / whole.norm()).item() for name, each in way.items()}
    share = {name: ((each * whole).sum() / whole.square().sum()).item() for name, each in way.items()}
    assert share["bf16 alone"] < 4e-4
    assert changed["bf16 alone"] < 0.06
    assert min(changed[name] for name in STATES) > 0.9
    assert error["fp32"] == 0
    assert error["bf16"] < 0.006
    assert error["8bit"] < 0.07
    assert changed["stochastic"] > 0.6
    assert share["stochastic"] == pytest.approx(1, abs=0.25)  # of its noise, 1.1 of the whole, 1 % remains in the sum


def test_closure() -> None:
    (weight,) = _weights((4, 4))
    optimizer = LigerAdamW([weight])

    def closure() -> float:
        assert torch.is_grad_enabled()
        weight.grad = torch.ones_like(weight)
        return 3.5

    assert optimizer.step(closure) == 3.5
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_weights_are_trained_as_torch_does(dtype: torch.dtype, scaled: bool) -> None:
    shapes = (CODED, (3, 5), (0, 4), ())
    ours, theirs = _weights(*shapes, dtype=dtype), _weights(*shapes, dtype=dtype)
    optimizers = LigerAdamW(ours, lr=1e-3), torch.optim.AdamW(theirs, lr=1e-3, fused=True)
    for each in optimizers:
        each.grad_scale = torch.tensor(8.0) if scaled else None  # type: ignore[union-attr]
    for optimizer, parameters in zip(optimizers, (ours, theirs)):
        _train(optimizer, parameters, range(20))
    for mine, wanted in zip(ours, theirs):
        assert torch.equal(mine, wanted)
        assert optimizers[0].state[mine].keys() == optimizers[1].state[wanted].keys()
        for name, value in optimizers[1].state[wanted].items():
            assert torch.equal(optimizers[0].state[mine][name], value)
            assert optimizers[0].state[mine][name].dtype == value.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["transposed", "every second column", "gradient transposed"])
def test_strides(layout: str, dtype: torch.dtype) -> None:
    """Parameters and gradients that are not contiguous; what lies between the elements stays."""
    plain, held = _weights((8, 512), (8, 1024), dtype=dtype)
    around = held.detach().clone()
    if layout == "every second column":
        weight = Parameter(held.detach()[:, ::2])
        plain.data.copy_(weight)
    else:
        weight = Parameter(plain.detach().clone() if "gradient" in layout else plain.detach().t().clone().t())
    optimizers = LigerAdamW([weight], lr=1e-2), LigerAdamW([plain], lr=1e-2)
    for step in range(3):
        (gradient,) = _gradients([plain], step)
        plain.grad = gradient
        weight.grad = gradient.t().clone().t() if "gradient" in layout else gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    ours, wanted = (optimizer.fp32_weight(each) for optimizer, each in zip(optimizers, (weight, plain)))
    # States in 8 bits are for contiguous weights; those of the others are in fp32.
    torch.testing.assert_close(ours, wanted, rtol=0, atol=0 if dtype == torch.float32 or "gr" in layout else 6e-3)
    assert torch.equal(held[:, 1::2], around[:, 1::2])


@pytest.mark.parametrize(
    ("shape", "coded"),
    [(CODED, True), ((2, 8, 256), True), ((15, 256), False), ((4096,), False), ((64, 255), False), ((0, 256), False)],
)
def test_which_states_are_in_8_bits(shape: tuple[int, ...], coded: bool) -> None:
    (weight,) = _weights(shape)
    optimizer = LigerAdamW([weight])
    _train(optimizer, [weight], range(1))
    dtypes = {name: value.dtype for name, value in optimizer.state[weight].items() if name != "step"}
    if coded:
        kinds = {"codes": torch.uint8, "scales": torch.float32}
        wanted = {f"{name}_{kind}": kinds[kind] for name in ("exp_avg", "exp_avg_sq") for kind in kinds}
    else:
        wanted = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)
    assert dtypes == wanted | {"remainder": torch.bfloat16}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": -1e-3}, "`lr` is -0.001; it must be a finite number, 0 or more."),
    "no number": ({"eps": float("nan")}, "`eps` is nan; it must be a finite number, 0 or more."),
    "decay": ({"weight_decay": True}, "`weight_decay` is True; it must be a finite number, 0 or more."),
    "one beta": ({"betas": 0.9}, "`betas` is 0.9; it must be two numbers from 0 to below 1."),
    "betas": ({"betas": (0.9, 1.0)}, "`betas` is (0.9, 1.0); it must be two numbers from 0 to below 1."),
    "states": ({"states": "4bit"}, "`states` is '4bit'; it must be one of '8bit', 'bf16', 'fp32'."),
    "master": ({"master": "fp32"}, "`master` is 'fp32'; it must be one of 'remainder', 'stochastic', None."),
    "eps": (
        {"eps": 0.0},
        "`eps` is 0.0; with `states` of '8bit', in which very small second moments are 0, it must be 1e-15 or more. "
        "Or set `states` to 'bf16' or 'fp32'.",
    ),
    "seed": ({"seed": -1}, "`seed` is -1; it must be an integer from 0 to 2**32 - 1."),
    "amsgrad": ({"amsgrad": True}, "`amsgrad` is True; LigerAdamW knows False only. Use `torch.optim.AdamW`."),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options(case: str) -> None:
    options, message = WRONG[case]
    first, second = _weights((2, 2), (2, 2))
    optimizer = LigerAdamW([first])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        optimizer.add_param_group({"params": [second], **options})
    assert len(optimizer.param_groups) == 1
    if case != "amsgrad":
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            LigerAdamW([first], **options)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize(("before", "after"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_parameter_that_changes_its_dtype_is_refused(before: torch.dtype, after: torch.dtype, states: Any) -> None:
    """Its remainder would be lost, or it would have none."""
    layer = torch.nn.Linear(256, 16, bias=False, dtype=before)
    optimizer = LigerAdamW(layer.parameters(), states=states)
    _train(optimizer, list(layer.parameters()), range(1))
    layer.to(after)
    with pytest.raises(ValueError, match=rf"of shape \(16, 256\) is in {after}, and its state is of another dtype"):
        _train(optimizer, list(layer.parameters()), range(1))


def test_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        LigerAdamW(_weights(CODED)).step()


def test_parameters_are_rounded_by_random_bits_of_their_own() -> None:
    weights = [Parameter(torch.ones(CODED, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = LigerAdamW([{"params": weights[:2]}, {"params": weights[2:]}], lr=1e-3, master="stochastic")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    changed = torch.stack([(weight != 1).float().flatten() for weight in weights])  # a quarter of them
    correlation = torch.corrcoef(changed).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / 64  # five deviations, of 4,096 independent numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_gradients_are_refused(dtype: torch.dtype) -> None:
    embedding = torch.nn.Embedding(4, 8, sparse=True, dtype=dtype)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"of shape \(4, 8\) is sparse. .*`sparse=False`"):
        LigerAdamW(embedding.parameters()).step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *DTYPES])
@pytest.mark.parametrize("states", STATES)
def test_gradient_scaler(states: Any, dtype: torch.dtype) -> None:
    """A scale, a power of two, changes no bit; a step that is left out changes nothing and does not count."""
    scaled, plain = (_weights(CODED, (3, 5), dtype=dtype) for _ in range(2))
    optimizers = [LigerAdamW(each, lr=1e-3, states=states) for each in (scaled, plain)]
    optimizers[0].grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    for step in range(4):
        for parameters, factor in ((scaled, 4), (plain, 1)):
            for parameter, gradient in zip(parameters, _gradients(parameters, step)):
                parameter.grad = gradient * factor
        if step == 2:
            before = _numbers(optimizers[0], scaled)
            optimizers[0].found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
            optimizers[0].step()
            assert _same(_numbers(optimizers[0], scaled), before)
            continue
        optimizers[0].found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
        for optimizer in optimizers:
            optimizer.step()
    assert optimizers[0].state[scaled[0]]["step"] == 3
    assert _same(_numbers(optimizers[0], scaled), _numbers(optimizers[1], plain))


def test_torch_s_gradient_scaler_drives_it() -> None:
    """It gives the optimizer its scale, and the finding, in place of dividing the gradients itself."""
    scaled, plain = _weights(CODED), _weights(CODED)
    optimizers = LigerAdamW(scaled, lr=1e-3), LigerAdamW(plain, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    for step, (factor, counts) in enumerate(((4.0, True), (float("inf"), False), (2.0, True))):
        (gradient,) = _gradients(plain, step)
        scaled[0].grad, plain[0].grad = gradient * factor, gradient
        scaler.step(optimizers[0])
        scaler.update()
        if counts:
            optimizers[1].step()
    assert _same(_numbers(optimizers[0], scaled), _numbers(optimizers[1], plain))


def _through_a_file(optimizer: LigerAdamW, parameters: list[Parameter]) -> tuple[LigerAdamW, list[Parameter]]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    parameters = [Parameter(each.detach().clone()) for each in parameters]
    options = {name: optimizer.defaults[name] for name in ("states", "master", "seed")}
    resumed = LigerAdamW(parameters, **options)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    return resumed, parameters


def _copied(optimizer: LigerAdamW, parameters: list[Parameter]) -> tuple[LigerAdamW, list[Parameter]]:
    optimizer, parameters = copy.deepcopy((optimizer, parameters))
    return optimizer, parameters


def _pickled(optimizer: LigerAdamW, parameters: list[Parameter]) -> tuple[LigerAdamW, list[Parameter]]:
    optimizer = pickle.loads(pickle.dumps(optimizer))
    return optimizer, optimizer.param_groups[0]["params"]


def _by_dcp(optimizer: LigerAdamW, parameters: list[Parameter]) -> tuple[LigerAdamW, list[Parameter]]:
    model, other = torch.nn.ParameterList(parameters), torch.nn.ParameterList(copy.deepcopy(parameters))
    options = {name: optimizer.defaults[name] for name in ("states", "master", "seed")}
    resumed = LigerAdamW(other.parameters(), **options)
    set_optimizer_state_dict(other, resumed, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    return resumed, list(other)


@pytest.mark.parametrize("way", [_through_a_file, _copied, _pickled, _by_dcp])
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("states", STATES)
def test_goes_on_where_it_was(states: Any, master: Any, way: Callable[..., Any]) -> None:
    parameters = [*_weights(CODED, (3, 5), (0, 4)), *_weights((3, 5), dtype=torch.float32)]
    optimizer = LigerAdamW(parameters, lr=1e-3, states=states, master=master, seed=7)
    _train(optimizer, parameters, range(3))
    resumed, others = way(optimizer, parameters)
    assert _same(_numbers(resumed, others), _numbers(optimizer, parameters))
    assert resumed.param_groups[0]["lr"] == 1e-3
    assert resumed._step_supports_amp_scaling
    for each, trained in ((optimizer, parameters), (resumed, others)):
        _train(each, trained, range(3, 6))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(parameters, others) if a.numel())
    assert _same(_numbers(resumed, others), _numbers(optimizer, parameters))


def test_every_remainder_survives() -> None:
    """All 65,536 of them, some of which are not numbers in bf16."""
    parameters = _weights((256, 256))
    optimizer = LigerAdamW(parameters)
    _train(optimizer, parameters, range(1))
    remainder = remainder_of(optimizer.state[parameters[0]])
    assert remainder is not None
    remainder.copy_(torch.arange(-(2**15), 2**15, dtype=torch.int16).view(256, 256))
    for way in (_through_a_file, _copied, _pickled, _by_dcp):
        assert _same(_numbers(*way(optimizer, parameters)), _numbers(optimizer, parameters)), way


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("states", STATES)
def test_a_step_of_nothing_changes_nothing(states: Any, master: Any) -> None:
    """`torch.distributed.checkpoint` takes one, with a rate of 0, to make the states that it loads into."""
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1e-40, -1e-40, 3e38, -1.0])
    weight = Parameter(special.repeat(16, 32).bfloat16())
    optimizer = LigerAdamW([weight], states=states, master=master)
    before = weight.detach().clone().view(torch.int16)
    get_optimizer_state_dict(torch.nn.ParameterList([weight]), optimizer)
    assert torch.equal(weight.detach().view(torch.int16), before)
    remainder = remainder_of(optimizer.state[weight])
    assert remainder is None or not remainder.any()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", STATES)
def test_loads_the_state_of_torch_s_adamw(states: Any, moments: torch.dtype) -> None:
    shapes = CODED, (3, 5)
    theirs, ours = _weights(*shapes, dtype=moments), _weights(*shapes)
    reference = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.5)
    _train(reference, theirs, range(3))
    optimizer = LigerAdamW(ours, lr=1.0, states=states)
    optimizer.load_state_dict(reference.state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["states"]) == (1e-3, 0.5, states)
    found = adamw_state_dict(optimizer.state_dict())["state"]
    for index, wanted in enumerate(theirs):
        state = reference.state[wanted]
        assert found[index]["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            kept = "fp32" if states == "8bit" and shapes[index] != CODED else states
            assert torch.equal(found[index][name].float(), as_stored(state[name], kept, signed=name == "exp_avg"))
    _train(optimizer, ours, range(3, 5))
    assert optimizer.state[ours[0]]["step"] == 5


@pytest.mark.parametrize("states", STATES)
def test_torch_s_adamw_goes_on_with_its_state(states: Any) -> None:
    ours = _weights(CODED, (3, 5))
    optimizer = LigerAdamW(ours, lr=1e-3, states=states)
    _train(optimizer, ours, range(3))
    theirs = [Parameter(optimizer.fp32_weight(each)) for each in ours]
    reference = torch.optim.AdamW(theirs, foreach=False)
    state_dict = copy.deepcopy(adamw_state_dict(optimizer.state_dict()))
    reference.load_state_dict({**state_dict, "param_groups": [{**state_dict["param_groups"][0], "fused": False}]})
    (gradient, small) = _gradients(ours, 3)
    for parameters in (ours, theirs):
        for parameter, value in zip(parameters, (gradient, small)):
            parameter.grad = value.to(parameter.dtype)
    optimizer.step()
    reference.step()
    for mine, wanted in zip(ours, theirs):
        assert torch.equal(optimizer.fp32_weight(mine), wanted)


def _state_of(kind: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> dict[str, Any]:
    parameters = _weights(*shapes, dtype=torch.float32)
    optimizer = kind(parameters, **options)
    _train(optimizer, parameters, range(1))
    return optimizer.state_dict()


NOT_TAKEN: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "another shape": (
        lambda: _state_of(torch.optim.AdamW, (16, 255)),
        r"is of shape \(16, 255\), and the parameter's of shape \(16, 256\)",
    ),
    "another number": (lambda: _state_of(torch.optim.AdamW, CODED, CODED), "doesn't match the size"),
    "SGD": (lambda: _state_of(torch.optim.SGD, CODED, momentum=0.9), "has no `betas`, so it is not of an AdamW"),
    "AMSGrad": (lambda: _state_of(torch.optim.AdamW, CODED, amsgrad=True), "`amsgrad` is True; LigerAdamW knows False"),
    "Adam": (lambda: _state_of(torch.optim.Adam, CODED), "`decoupled_weight_decay` is False; LigerAdamW knows True"),
    "Adamax": (lambda: _state_of(torch.optim.Adamax, CODED), "has no 'exp_avg_sq', so it is not of an AdamW"),
}


@pytest.mark.parametrize("case", NOT_TAKEN)
def test_states_that_are_refused(case: str) -> None:
    state_dict, message = NOT_TAKEN[case]
    with pytest.raises(ValueError, match=message):
        LigerAdamW(_weights(CODED)).load_state_dict(state_dict())
