"""How exact a kernel must be.

Truth is float64. A low-precision result may be no further from it than torch's own result of that dtype is, times 1.1
and what chance does on few numbers; fp32 results get a few units in the last place for another order of summation.
"""

import torch


def seeded_randn(*shape, seed=0, dtype=torch.float32, device="cpu", scale=1.0):
    """`scale` times normal numbers, the same on every device."""
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(device, dtype)


def value_and_gradients(function, *inputs):
    """The result of `function` and the gradients of its `inputs`, for an upstream gradient that every dtype holds."""
    y = function(*inputs)
    dy = seeded_randn(*y.shape, seed=2, dtype=torch.bfloat16, device=y.device, scale=3.0).to(y.dtype)
    return [y, *torch.autograd.grad(y, inputs, dy)]


def result_and_gradients(function, dy, *inputs):
    """The result of `function`, and the gradients of its detached `inputs` for the upstream gradient `dy`."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def in_float64(function, *inputs):
    """`value_and_gradients` on the same numbers in float64."""
    return value_and_gradients(function, *(x.detach().double().requires_grad_() for x in inputs))


def run(function, tensors, upstream=None, **options):
    """Outputs and gradients of `function` on detached copies; `upstream` are the gradients of the outputs."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    outputs = function(*leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if upstream is None:
        upstream = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, [u.to(o.dtype) for u, o in zip(upstream, outputs)])
    return [*outputs, *[leaf.grad for leaf in leaves if leaf is not None]], upstream


def errors(results, truth):
    return [((a.double() - b.double()).norm() / (b.double().norm() + 1e-30)).item() for a, b in zip(results, truth)]


def as_large_as(their_error, count, rounding):
    """The relative error that `count` numbers may have where those of eager torch have `their_error`.

    Both round at random: by at most `rounding` a number, so their errors differ by about a third of
    `rounding / count ** 0.5` though they round alike. Ten times that is allowed, which on thousands of numbers is less
    than another rounding of each would cost.
    """
    return 1.1 * their_error + 3 * rounding / max(count, 1) ** 0.5


def assert_no_worse(ours, eager, exact, slack=1.1):
    """Our results have eager's dtypes, and errors of at most `slack` times eager's and some chance (`as_large_as`)."""
    for mine, theirs, right in zip(ours, eager, exact, strict=True):
        assert mine.dtype == theirs.dtype
        chance = as_large_as(0.0, mine.numel(), torch.finfo(mine.dtype).eps / 2)
        assert (mine - right).norm() <= slack * (theirs - right).norm() + chance * right.norm()


def assert_as_accurate(function, reference, tensors, upstream=None, **options):
    """`function` is as far from float64 as the eager reference at most (`as_large_as`), and 4e-7 for fp32's sums."""
    rounding = max(torch.finfo(t.dtype).eps for t in tensors if t is not None) / 2
    ours, upstream = run(function, tensors, upstream, **options)
    eager, _ = run(reference, tensors, upstream, **options)
    exact_tensors = [None if t is None else t.double() for t in tensors]
    truth, _ = run(reference, exact_tensors, [u.double() for u in upstream], **options)
    assert [t.dtype for t in ours] == [t.dtype for t in eager]
    assert [t.shape for t in ours] == [t.shape for t in eager]
    for index, (our, their) in enumerate(zip(errors(ours, truth), errors(eager, truth))):
        allowed = as_large_as(their, ours[index].numel(), rounding) + 4e-7
        assert our <= allowed, f"result {index}: our error {our:.2e}, eager's {their:.2e}"
