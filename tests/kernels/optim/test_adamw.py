"""The step of AdamW on bf16 weights: the kernel and its reference against float64 and `torch.optim.AdamW`."""

import pytest
import torch

from liger_trainer.kernels.optim import adamw
from liger_trainer.kernels.optim.adamw import Moments, Options, Scaler, Update, adamw_, joined, random_bits, split
from liger_trainer.kernels.runtime import INTERPRETED
from liger_trainer.optim.states import moments_of, new_state, remainder_of
from tests.aot import compile_launch, on_targets, recorded_launches

DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
NO_SCALER = Scaler()
NUMBERS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def options(master="remainder", seed=3):
    return Options(**NUMBERS, stochastic=master == "stochastic", seed=seed)


def bf16(*shape, seed=0, scale=0.02):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16().to(DEVICE)


def gradients(shape, steps, dtype=torch.bfloat16):
    """Rows of very different sizes, some of them 0."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.rand(shape[0], 1, generator=generator).pow(8)
    sizes[0] = 0.0
    return [(torch.randn(shape, generator=generator) * sizes).to(DEVICE, dtype) for _ in range(steps)]


def trained(weight, steps, states, master, step=adamw_, scaler=NO_SCALER, offset=0):
    """The weight in fp32, and its state, after the gradients in `steps`."""
    weight, state = weight.clone(), new_state(weight, states, master)
    for number, gradient in enumerate(steps, 1):
        update = Update(weight, gradient, moments_of(state), remainder_of(state), offset)
        step([update], [torch.tensor(float(number), device=weight.device)], options(master), scaler)
    return (joined(weight, remainder_of(state)) if "remainder" in state else weight.float()), state


def in_torch(updates, steps, options, scaler):
    for update, row in zip(updates, adamw._corrections(steps, options)):
        adamw._adamw_in_torch_(update, row, options, scaler)


def trained_by_torch(weight, steps, dtype):
    """The weight in `dtype` after the gradients in `steps`."""
    parameter = torch.nn.Parameter(weight.to(dtype))
    numbers = {key: NUMBERS[key] for key in ("lr", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW([parameter], betas=(NUMBERS["beta1"], NUMBERS["beta2"]), foreach=False, **numbers)
    for gradient in steps:
        parameter.grad = gradient.to(dtype)
        optimizer.step()
    return parameter.detach()


def test_every_fp32_number_is_a_weight_and_a_remainder():
    for exponent in range(256):
        mantissas = torch.cat([torch.arange(0, 1 << 23, 509), torch.tensor([0x7FFF, 0x8000, 0x8001, (1 << 23) - 1])])
        bits = (mantissas + (exponent << 23)).int()
        for signed in (bits, bits | torch.tensor(-(1 << 31), dtype=torch.int32)):
            numbers = signed.view(torch.float32)
            back = joined(*split(numbers))
            same = back.view(torch.int32) == signed
            assert (same | (numbers.isnan() & back.isnan())).all()


def test_the_weight_is_the_nearest_bf16_number():
    numbers = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    weight, _ = split(numbers)
    nearest = (numbers - numbers.bfloat16().float()).abs()
    assert torch.equal((numbers - weight.float()).abs(), nearest)


def test_the_reference_has_the_bits_of_torch():
    weight = bf16(8, 512).cpu()
    steps = [gradient.cpu() for gradient in gradients((8, 512), 50)]
    ours, _ = trained(weight, steps, "fp32", "remainder", in_torch)
    assert torch.equal(ours, trained_by_torch(weight, steps, torch.float32))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 512), (3, 77), (1, 5)])
def test_fp32_states_against_float64(shape, dtype):
    weight, steps = bf16(*shape), gradients(shape, 10, dtype)
    ours, _ = trained(weight, steps, "fp32", "remainder")
    expected = trained_by_torch(weight, steps, torch.float64)
    theirs = trained_by_torch(weight, steps, torch.float32)
    error = (ours - expected).abs().max()
    assert error <= 1.5 * (theirs - expected).abs().max() + 1e-9


@pytest.mark.kernel
@pytest.mark.parametrize("master", ["remainder", "stochastic"])
@pytest.mark.parametrize("states", ["8bit", "bf16", "fp32"])
def test_the_kernel_does_what_the_reference_does(states, master):
    weight, steps = bf16(16, 512), gradients((16, 512), 5)
    ours, state = trained(weight, steps, states, master, offset=2**33)
    expected, expected_state = trained(weight, steps, states, master, in_torch, offset=2**33)
    moved = (expected - weight.float()).abs().mean()
    # A rounding in fp32 can be another code, or another bf16 number, of a few elements.
    assert (ours - expected).abs().mean() < 1e-3 * moved
    for name, values in expected_state.items():
        if name != "remainder":  # of a weight that has another rounding, the remainder wraps around
            apart = (state[name].float() - values.float()).abs()
            assert (apart > 0.02 * values.float().abs() + 1e-30).float().mean() < 2e-3, name


@pytest.mark.kernel
def test_many_weights_in_one_launch():
    shapes = [(16, 512), (7,), (0, 256), (4096,), (3, 256), (5, 33), (64, 256)]
    weights = [bf16(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    weights.append(bf16(9, 64, seed=9).t())  # not contiguous
    weights.append(bf16(1025, seed=10)[1:])  # not at a multiple of 16 bytes
    for states in ("8bit", "bf16", "fp32"):
        together = [weight.clone() if weight.is_contiguous() else weight.t().clone().t() for weight in weights]
        together[-1] = bf16(1025, seed=10)[1:]
        alone = [weight.clone() for weight in weights]
        some = [new_state(weight, states, "remainder") for weight in together]
        each = [new_state(weight, states, "remainder") for weight in alone]
        steps = [torch.tensor(float(step), device=DEVICE) for step in range(1, len(weights) + 1)]
        grads = [torch.full_like(weight, 0.1) for weight in weights]
        updates = [
            Update(weight, gradient, moments_of(state), remainder_of(state), 0)
            for weight, gradient, state in zip(together, grads, some)
        ]
        adamw_(updates, steps, options(), NO_SCALER)
        for weight, gradient, state, step in zip(alone, grads, each, steps):
            update = Update(weight, gradient, moments_of(state), remainder_of(state), 0)
            adamw_([update], [step], options(), NO_SCALER)
        for ours, expected, shape in zip(together, alone, shapes):
            assert torch.equal(ours, expected), (states, shape)
        assert all(not torch.equal(ours, weight) for ours, weight in zip(together, weights) if weight.numel())


@pytest.mark.kernel
@pytest.mark.parametrize("states", ["8bit", "fp32"])
def test_a_gradient_scaler(states):
    weight, steps = bf16(16, 512), gradients((16, 512), 3, torch.float32)
    plain, _ = trained(weight, steps, states, "remainder")
    scale, zero, one = (torch.tensor(number, device=DEVICE) for number in (1024.0, 0.0, 1.0))
    scaled, _ = trained(weight, [1024 * step for step in steps], states, "remainder", scaler=Scaler(scale, zero))
    torch.testing.assert_close(scaled, plain, rtol=0.0, atol=1e-8)
    skipped, state = trained(weight, steps, states, "remainder", scaler=Scaler(None, one))
    assert torch.equal(skipped, weight.float())
    assert not any(tensor.any() for name, tensor in state.items() if name != "step")


@pytest.mark.kernel
@pytest.mark.parametrize("step", [adamw_, in_torch])
def test_weights_that_are_set_to_zero(step):
    """As by a mask, after which negative remainders are left."""
    steps, mask = gradients((16, 512), 5), bf16(16, 512, seed=5) > 0
    weight = bf16(16, 512)
    state = new_state(weight, "fp32", "remainder")
    for number, gradient in enumerate(steps, 1):
        weight *= mask  # also to -0
        update = Update(weight, gradient, moments_of(state), remainder_of(state), 0)
        step([update], [torch.tensor(float(number), device=DEVICE)], options(), NO_SCALER)
        assert weight.isfinite().all()
        assert (weight * ~mask).abs().max() < 2 * NUMBERS["lr"] * number


@pytest.mark.kernel
def test_under_another_default_device():
    """The table of addresses is on the host."""
    weight, steps = bf16(16, 512), gradients((16, 512), 1)
    expected, _ = trained(weight, steps, "8bit", "remainder")
    state, step = new_state(weight, "8bit", "remainder"), torch.ones((), device=DEVICE)
    update = Update(weight, steps[0], moments_of(state), remainder_of(state), 0)
    with torch.device("meta"):
        adamw_([update], [step], options(), NO_SCALER)
    assert torch.equal(joined(weight, remainder_of(state)), expected)


@pytest.mark.kernel
def test_a_nan_stays_one():
    weight, gradient = bf16(16, 512), torch.zeros(16, 512, device=DEVICE)
    gradient[3, 4] = float("nan")
    ours, _ = trained(weight, [gradient], "fp32", "remainder")
    assert ours.isnan().nonzero().tolist() == [[3, 4]]


def test_random_bits_are_those_of_the_element_in_the_whole_tensor():
    def bits(rows, offset, seed=5, step=7):
        weight = torch.empty(rows, 256)
        return random_bits(Update(weight, weight, Moments(weight, weight), None, offset), seed, step)

    whole = bits(8, 0)
    assert torch.equal(whole[3:5], bits(2, 3 * 256))
    for other in (bits(8, 0, seed=6), bits(8, 0, step=8), bits(8, 2**32)):
        assert (whole != other).float().mean() > 0.99


@pytest.mark.parametrize(("target", "states"), on_targets(("8bit",), ("bf16",), ("fp32",)))
def test_compiles_ahead_of_time(target, states, monkeypatch):
    monkeypatch.setattr(adamw, "use_triton", lambda tensor: True)
    with recorded_launches() as launches:
        trained(torch.zeros(16, 512, dtype=torch.bfloat16), [torch.zeros(16, 512)], states, "remainder")
    (launch,) = launches
    compiled = compile_launch(launch, target)
    if target == "sm_90":  # whole vectors of weights, although addresses come from a table
        assert compiled.asm["ptx"].count(".v4.b32") >= 3


@pytest.mark.kernel
def test_stochastic_rounding_keeps_the_expectation():
    weight = torch.full((64, 512), 1.0, dtype=torch.bfloat16, device=DEVICE)
    gradient = torch.ones(64, 512, device=DEVICE)
    ours, _ = trained(weight, [gradient] * 4, "fp32", "stochastic")
    exact, _ = trained(weight, [gradient] * 4, "fp32", "remainder")
    spacing = 2.0**-8
    assert set((ours.unique() / spacing).tolist()) <= set((torch.arange(250.0, 260.0)).tolist())
    # The mean of 2^15 roundings, each with a deviation of at most half of the spacing a step.
    assert (ours.mean() - exact.mean()).abs() < 4 * spacing / 2**7.5
    assert (ours.mean() - exact.mean()).abs() < 0.2 * (1.0 - exact.mean()).abs()
