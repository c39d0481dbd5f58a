"""`cuda_graphs` in a trainer: where its layers run from graphs, where that is refused, and what is said of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from liger_trainer.configs.flags import cuda_graphs_of
from liger_trainer.graphs.capture import Captures, CudaCaptures
from liger_trainer.graphs.captured import CapturedLayers
from liger_trainer.head.lm_head import PLAIN
from liger_trainer.packing.packing import draws_beside_dropout
from liger_trainer.patching.shared_layers import shares_keys
from liger_trainer.recompute.keeping import OF_TRANSFORMERS, layers_of
from liger_trainer.trainers.activation_memory import ActivationMemoryMixin

_OTHERS = ("ref_model", "teacher_model")
"""TRL's models beside the one that is trained, of which a loss runs the forward."""


class CudaGraphsMixin(ActivationMemoryMixin):
    """Comes before a Trainer: the layers of its model run from CUDA graphs, where `cuda_graphs` asks for that."""

    model_wrapped: Any  # this is the Trainer's
    _generates = False  # whether it generates texts during training
    _graphs: CapturedLayers | None = None  # of the model that is trained
    _others: Mapping[str, CapturedLayers] = {}  # of those beside it
    _loss_is_ours = False  # whether a loss has run its layers from graphs, or there was a reason not to

    def _prepare_cuda_graphs(self) -> None:
        """To be called once the trainer is built.

        Raises:
            ValueError: if `cuda_graphs` is true, and its layers cannot run from graphs.
        """
        wanted = cuda_graphs_of(self.args)
        if wanted is False:
            return
        obstacle = next((reason for reason, holds in _obstacles(self) if holds), "")
        if not obstacle:
            make = functools.partial(CapturedLayers, self._captures(), only_if_faster=wanted is None)
            self._graphs, self._others = make(memory=self._kept), {name: make() for name in _OTHERS}
            if self._kept is not None:
                self._kept.may_grow = self._generates
        elif wanted or obstacle != _elsewhere(self.args):  # where nobody expects graphs
            self._refuse(obstacle)

    def _refuse(self, obstacle: str) -> None:
        if cuda_graphs_of(self.args):
            raise ValueError(f"`cuda_graphs` is true, but {obstacle}. Set it to 'auto' or to false.")
        self._announce(f"cuda_graphs: no layer runs from graphs, because {obstacle}.")

    def _captures(self) -> Captures:
        return CudaCaptures(self.args.device)

    @contextlib.contextmanager
    def _from_graphs(self, graphs: CapturedLayers) -> Iterator[None]:
        """In the context of a loss, the layers of its models run from graphs; `graphs` belong to the trained model."""
        self._loss_is_ours = True
        config = getattr(self.model, "config", None)
        if graphs.gains.in_training and config is not None and shares_keys(config):
            # Without graphs these layers run on labelled tokens alone, which gains more where the device is busy.
            yield
            return
        if self._kept is not None and not self._kept.is_decided:
            yield
            return
        with graphs.attached(self.model_wrapped), contextlib.ExitStack() as around:
            for name, of_other in self._others.items():
                if isinstance(other := getattr(self, name, None), nn.Module):
                    around.enter_context(of_other.attached(other))
            yield

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; see [`~transformers.Trainer.train`]. The memory of graphs is free afterwards."""
        result = super().train(*args, **kwargs)
        self._free_graphs()
        return result

    def _free_graphs(self) -> None:
        for each in (self._graphs, *self._others.values()):
            if each is not None:
                each.free()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One micro-batch; see [`~transformers.Trainer.training_step`]."""
        loss = super().training_step(*args, **kwargs)
        if self._graphs is None:
            return loss
        if not self._loss_is_ours:
            self._loss_is_ours = True
            self._refuse(f"`{type(self).__name__}.compute_loss` does not call `super().compute_loss`")
        self._graphs.settle()
        if (line := self._graphs.news()) is not None:
            self._announce(line)
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates; see [`~transformers.Trainer.evaluation_loop`]."""
        if self._kept is None or self._graphs is None:
            return super().evaluation_loop(*args, **kwargs)
        with self._kept.evaluating(self._graphs.give_back):
            return super().evaluation_loop(*args, **kwargs)


def _elsewhere(args: Any) -> str:
    return f"training is on {args.device.type}, which has no CUDA graphs"


def _differ(one: torch.device, other: torch.device) -> bool:
    """Whether these are two devices; one without an index may be any of its type."""
    return one.type != other.type or (None not in (one.index, other.index) and one.index != other.index)


def _obstacles(trainer: Any) -> Iterator[tuple[str, bool]]:
    """Why no layer of a trainer could run from graphs, each reason with whether it holds."""
    args = trainer.args
    yield _elsewhere(args), args.device.type != "cuda"
    yield "FSDP gathers weights for each layer", trainer.is_fsdp_enabled
    yield "DeepSpeed gathers weights for each layer", trainer.is_deepspeed_enabled
    yield "`torch_compile` is true, whose graphs are its own", args.torch_compile
    split = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1
    yield "processes exchange tensors inside the layers", split or getattr(args, "expert_parallel_size", 1) > 1
    yield "`activation_offloading` moves what layers keep", getattr(args, "activation_offloading", False)
    yield "the routers' z-loss is taken from the layers", bool(getattr(args, "router_z_loss_coef", 0.0))
    checkpoints = args.gradient_checkpointing_kwargs or {} if args.gradient_checkpointing else {}
    yield "`gradient_checkpointing_kwargs` has `selective`", bool(checkpoints.get("selective"))
    yield "`gradient_checkpointing_kwargs` has `use_reentrant: true`", checkpoints.get("use_reentrant") is True
    layers = [each for each, (_, kind) in layers_of(trainer.model).items() if kind == OF_TRANSFORMERS]
    yield f"{type(trainer.model).__name__} has no layers that transformers can checkpoint", not layers
    weights = [each for layer in layers for each in layer.parameters()]
    beside = next((str(each.device) for each in weights if _differ(each.device, args.device)), "")
    yield f"weights of its layers are on {beside}, not on {args.device}", bool(beside)
    other = next((type(each).__name__ for each in weights if type(each) not in PLAIN), "")
    yield f"weights of its layers are of the class {other}", bool(other)
    drawn = "its layers draw random numbers beside those of dropout, maybe on the host"
    yield drawn, draws_beside_dropout(trainer.model)
