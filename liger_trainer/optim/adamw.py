"""`LigerAdamW`: AdamW that trains bf16 weights as fp32 weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from liger_trainer.compat.private import available, require
from liger_trainer.compat.torch import ARITHMETIC_OF_MANY, PLACE_OF_A_SHARD, SKIPPED_ON_DEVICE
from liger_trainer.kernels.optim.adamw import Options, Scaler, Update, adamw_, joined
from liger_trainer.kernels.runtime import local_part
from liger_trainer.optim.states import loaded_state, moments_of, new_state, remainder_of

require(ARITHMETIC_OF_MANY)
(compute_local_shape_and_global_offset,) = require(PLACE_OF_A_SHARD)

States = Literal["8bit", "bf16", "fp32"]
Master = Literal["remainder", "stochastic"]

_ONLY = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}  # of the options of torch's Adam


class LigerAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101) for weights in bf16.

    bf16 has 8 significant bits, so most updates of a low learning rate would be rounded away. Here each weight has a
    remainder of 16 bits, and the two are an exact fp32 weight. With fp32 states it is trained as AdamW trains fp32
    weights: bit for bit on the CPU, and on a GPU but for the rounding of roots and quotients. With the states in 8
    bits, weight, remainder, gradient and states take 8.03 bytes a parameter, as bf16 weights take with torch's AdamW
    and no remainder; with fp32 weights that takes 16.

    States in 8 bits have one scale for each 256 numbers of the last dimension. Weights with fewer than two dimensions,
    fewer than 4,096 elements, or a last dimension that is not a multiple of 256 have fp32 states; so have weights that
    are sharded within such a block. Parameters in fp32 and fp16, such as LoRA adapters, are trained as
    `torch.optim.AdamW` trains them.

    `load_state_dict` takes the state of any AdamW and stores it as `states` says; [`adamw_state_dict`] makes one that
    `torch.optim.AdamW` loads. DTensors (FSDP2, tensor parallelism) have sharded states, which
    `torch.distributed.checkpoint` saves and splits anew; it loads them with the `states` and the `master` that they
    were saved with. FSDP1 cannot save them with `use_orig_params`, which is refused at the first step.

    Args:
        params: Parameters, or dictionaries with `"params"` and options of a group.
        lr (`float`, *optional*, defaults to `1e-3`):
            The learning rate.
        betas (`tuple[float, float]`, *optional*, defaults to `(0.9, 0.999)`):
            How much of the first and the second moment is kept in each step.
        eps (`float`, *optional*, defaults to `1e-8`):
            Added to the root of the second moment. With `states="8bit"` at least 1e-15, since a block whose second
            moments are all below 2^-100 is stored as zeros.
        weight_decay (`float`, *optional*, defaults to `1e-2`):
            Share of the weight, times the learning rate, that is taken away in each step.
        states (`str`, *optional*, defaults to `"8bit"`):
            How the moments of bf16 weights are stored: `"8bit"`, `"bf16"` (the second one rounded stochastically), or
            `"fp32"`. In bytes a parameter, both together: 2.03, 4 and 8.
        master (`str`, *optional*, defaults to `"remainder"`):
            What keeps updates of bf16 weights from being rounded away: `"remainder"` makes them exact fp32 weights, for
            2 bytes a parameter; `"stochastic"` rounds them stochastically and stores nothing; `None` rounds to nearest.
        seed (`int`, *optional*, defaults to `0`):
            For stochastic rounding: the same seed, step, parameter and element draw the same bits on every process.

    Raises:
        ValueError: for an option that is not one of these, or out of its range.

    Example:
        >>> import torch
        >>> from liger_trainer.optim import LigerAdamW
        >>> model = torch.nn.Linear(256, 256, dtype=torch.bfloat16)
        >>> optimizer = LigerAdamW(model.parameters(), lr=1e-6)
        >>> model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
    """

    # A gradient scaler then sets `grad_scale` and `found_inf`. Of the class: copies of an optimizer have it too.
    _step_supports_amp_scaling = available(SKIPPED_ON_DEVICE)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        states: States = "8bit",
        master: Master | None = "remainder",
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "states": states, "master": master, "seed": seed, "fused": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own, as `torch.optim.Optimizer` does; wrong ones are a ValueError."""
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the parameters that have a gradient.

        Args:
            closure: Computes the loss and the gradients anew.

        Returns:
            The result of `closure`.

        Raises:
            ValueError: for a sparse gradient, for a parameter that became bf16, or another dtype, after its first step,
                and under FSDP1 with `use_orig_params`.
            RuntimeError: while a CUDA graph is captured.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "LigerAdamW cannot be captured in a CUDA graph, which would keep the addresses of the gradients and "
                "the learning rate of this step. Call `step()` outside of the graph."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for device in dict.fromkeys(parameter.device for parameter in trained):
                here = [parameter for parameter in trained if parameter.device == device]
                self._step_in_bf16([each for each in here if each.dtype == torch.bfloat16], group, numbers)
                self._step_in_torch([each for each in here if each.dtype != torch.bfloat16], group)
        return loss

    def _step_in_bf16(
        self, parameters: list[torch.Tensor], group: dict[str, Any], numbers: dict[torch.Tensor, int]
    ) -> None:
        if not parameters:
            return
        states, scaler = [self._state(parameter, group) for parameter in parameters], self._scaler(parameters)
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        updates = [
            Update(
                local_part(parameter),
                _gradient(parameter),
                moments_of(state),
                remainder_of(state),
                _offset(parameter) + (numbers[parameter] << 40),  # parameters draw other bits than each other
            )
            for parameter, state in zip(parameters, states)
        ]
        beta1, beta2 = group["betas"]
        stochastic = group["master"] == "stochastic"
        rate = float(group["lr"])  # a scheduler may set a number of numpy
        options = Options(rate, beta1, beta2, group["eps"], group["weight_decay"], stochastic, group["seed"])
        adamw_(updates, steps, options, scaler)
        if scaler.found_inf is not None:
            torch._foreach_sub_(steps, [scaler.found_inf] * len(steps))

    def _step_in_torch(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        states = [self._state(parameter, group) for parameter in parameters]
        weights = [local_part(parameter) for parameter in parameters]
        firsts = [local_part(state["exp_avg"]) for state in states]
        laid_out = [_laid_out(*tensors) for tensors in zip(weights, firsts)]
        adamw(
            laid_out,
            [_laid_out(_gradient(parameter), first) for parameter, first in zip(parameters, firsts)],
            firsts,
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            **self._scaler(parameters)._asdict(),
            amsgrad=False,
            maximize=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        for weight, updated in zip(weights, laid_out):
            if updated is not weight:
                weight.copy_(updated)

    def _state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state.update(new_state(parameter, group["states"], group["master"]))
        with_remainder = parameter.dtype == torch.bfloat16 and group["master"] == "remainder"
        if ("remainder" in state) != with_remainder:
            raise ValueError(
                f"A parameter of shape {tuple(parameter.shape)} is in {parameter.dtype}, and its state is of another "
                "dtype. Convert the model before the first step, or build a new optimizer."
            )
        return state

    def _scaler(self, parameters: Sequence[torch.Tensor]) -> Scaler:
        found = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        return Scaler(*(None if value is None else value.to(parameters[0].device) for value in found))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this optimizer, or of `torch.optim.AdamW` or another AdamW with the same parameters.

        Learning rates and the other options of a group become those of `state_dict`. `states`, `master` and `seed`
        stay, and the moments are stored as they say.

        Args:
            state_dict: A state as `state_dict()` returns it.

        Raises:
            ValueError: if groups, shapes or the kind of state differ. The optimizer is then not to be used.
        """
        kept = [{key: group[key] for key in ("states", "master", "seed", "fused")} for group in self.param_groups]
        # The state apart, whose tensors torch would cast to the dtype of their parameter.
        super().load_state_dict({**state_dict, "state": {}})
        for group, options in zip(self.param_groups, kept):
            group.update(options)
            _check(group)
            group["betas"] = tuple(group["betas"])  # a list in some checkpoints of `torch.distributed.checkpoint`
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for group in self.param_groups:
            for parameter, key in zip(group["params"], keys):
                if key in state_dict["state"]:
                    saved = state_dict["state"][key]
                    self.state[parameter] = loaded_state(parameter, group["states"], group["master"], saved)

    def fp32_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """The weight that is trained, in fp32: what this process has of `parameter`, with its remainder if it has one.

        Args:
            parameter: One of the optimizer's parameters.

        Returns:
            A new tensor of the shape of the parameter, or of this process's shard of it.
        """
        weight, remainder = local_part(parameter.detach()), remainder_of(self.state[parameter])
        return weight.float() if remainder is None else joined(weight, remainder)


def _check(group: dict[str, Any]) -> None:
    """Raises ValueError for an option that is missing or out of range."""
    for name, only in _ONLY.items():
        if group.get(name, only) != only:
            raise ValueError(f"`{name}` is {group[name]!r}; LigerAdamW knows {only} only. Use `torch.optim.AdamW`.")
    missing = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in group]
    if missing:
        raise ValueError(f"The group of parameters has no `{missing[0]}`, so it is not of an AdamW.")
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"`{name}` is {value!r}; it must be a finite number, 0 or more.")
    betas = group["betas"]
    are_two = isinstance(betas, tuple | list) and len(betas) == 2
    if not are_two or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"`betas` is {betas!r}; it must be two numbers from 0 to below 1.")
    for name, allowed in (("states", get_args(States)), ("master", (*get_args(Master), None))):
        if group[name] not in allowed:
            raise ValueError(f"`{name}` is {group[name]!r}; it must be one of {', '.join(map(repr, allowed))}.")
    if group["states"] == "8bit" and group["eps"] < 1e-15:
        raise ValueError(
            f"`eps` is {group['eps']!r}; with `states` of '8bit', in which very small second moments are 0, it must be "
            "1e-15 or more. Or set `states` to 'bf16' or 'fp32'."
        )
    seed = group["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"`seed` is {seed!r}; it must be an integer from 0 to 2**32 - 1.")


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This process's part of the gradient."""
    gradient: Any = parameter.grad
    if gradient.is_sparse:
        raise ValueError(
            f"The gradient of a parameter of shape {tuple(parameter.shape)} is sparse. LigerAdamW takes dense ones: "
            "build its embedding with `sparse=False`, or train it with `torch.optim.SparseAdam`."
        )
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    gradient = local_part(gradient)
    if hasattr(gradient, "wait"):  # the result of a collective that may still run
        gradient = gradient.wait()
    return gradient.contiguous() if local_part(parameter).is_contiguous() else gradient


def _laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`tensor` with the strides of `like`: torch's fused kernels take those of all tensors to be the same."""
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def _offset(parameter: torch.Tensor) -> int:
    """The index of this process's first element in the whole parameter."""
    if not isinstance(parameter, DTensor):
        return 0
    return _offset_in(parameter.shape, parameter.stride(), parameter.device_mesh, parameter.placements)


@functools.cache  # some placements take milliseconds
def _offset_in(shape: torch.Size, strides: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> int:
    _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return sum(offset * stride for offset, stride in zip(offsets, strides))
