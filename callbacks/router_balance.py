"""How evenly the routers of a mixture of experts use the experts during training."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerControl, TrainerState, TrainingArguments

from liger_trainer.callbacks.logged import LoggedMetricsCallback, summed_over_processes
from liger_trainer.compat.private import require
from liger_trainer.compat.torch import ROUTER_BALANCE
from liger_trainer.compat.transformers import GATED_EXPERTS
from liger_trainer.patching.moe.experts_formula import layout_of
from liger_trainer.patching.moe.quantized_experts import declared_weights
from liger_trainer.patching.probe import full_shape, only_argument

require(GATED_EXPERTS)
(current_graph_task_id,) = require(ROUTER_BALANCE)

NO_EXPERTS = "no experts with stacked weights (it is dense, or has a list of experts)"


class RouterBalanceCallback(LoggedMetricsCallback):
    """Logs how the tokens are spread over the experts, and plots it in `output_dir` at the end of the run.

    With n_e the tokens given to expert e of E of a layer since the last training log, of all processes, and
    ``p = n / sum(n)``, each log gets

    - `router/entropy`: ``-sum p ln p`` in nats, the mean over the layers; ``ln E`` where all experts get as much;
    - `router/entropy_percent`: the same in percent of ``ln E``, and `router/least_entropy_percent`, the worst layer's;
    - `router/max_load`: the largest ``n_e / mean(n)``, the mean over the layers, and `router/worst_max_load`, the worst
      layer's; 1 where all get as much, E where one gets all;
    - `router/dropped_tokens`: choices that name no expert of the layer; 0 unless the model has a capacity.

    `router_balance.csv` has these and n itself for each log and layer. `router_balance.png` is a heat map of
    ``n_e / mean(n)`` over the whole run, with a row for each layer and a column for each expert. A resumed run starts
    both again from its first step.

    Tokens are counted where the experts' modules receive them (for Llama 4, where its routers choose), in forwards that
    a backward follows: not in evaluation or generation, and not when a checkpointed layer is recomputed. Padding
    counts, since the experts compute it. Processes that share their tokens (tensor parallelism) each count them. The
    counts stay on the device and are read with the log; the modules have hooks during training only.

    Attributes:
        layers: Names of the modules, in the order of the rows.
        history: For each log its step and n, `(layers, E)` int64 on the CPU.
    """

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.history: list[tuple[int, torch.Tensor]] = []
        self._num_experts: list[int] = []
        self._handles: list[RemovableHandle] = []
        self._pending: dict[int, torch.Tensor] = {}
        self._seen_forward: set[int] = set()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Adds the hooks."""
        self._release()
        self.layers, self.history, self._num_experts, self._pending = [], [], [], {}
        model = kwargs["model"]
        for layer, (name, module) in enumerate(experts_of(model)):
            self.layers.append(name.partition(".base_layer")[0])
            self._num_experts.append(_num_experts(module))
            self._handles.append(self._hooked(model, layer, module))
        if not self.layers:
            raise ValueError(
                f"{type(model).__name__} has {NO_EXPERTS}; leave out RouterBalanceCallback, or `router_balance` of a "
                "recipe."
            )

    def _hooked(self, model: nn.Module, layer: int, experts: nn.Module) -> RemovableHandle:
        """Counts the tokens that the experts receive; if they receive all, those that their block's router chooses."""
        called = self.layers[layer]
        if only_argument(experts) is not None:
            block: Any = model.get_submodule(called.rpartition(".")[0])

            def count_logits(module: nn.Module, args: tuple[Any, ...], result: tuple[torch.Tensor, ...]) -> None:
                if self._is_first_forward(layer):
                    self._count(layer, result[1].detach().topk(block.top_k).indices.reshape(-1))

            return block.router.register_forward_hook(torch.compiler.disable(count_logits))

        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_first_forward(layer):
                given = (*args[1:], *kwargs.values())
                chosen = next(t for t in given if isinstance(t, torch.Tensor) and not t.is_floating_point())
                self._count(layer, chosen.detach().reshape(-1).long())

        # With adapters this is PEFT's wrapper, which may not call the module.
        wrapper = model.get_submodule(called)
        return wrapper.register_forward_pre_hook(torch.compiler.disable(count), with_kwargs=True)

    def _is_first_forward(self, layer: int) -> bool:
        """Whether this is a forward with gradients, and not a recomputation of one."""
        if not torch.is_grad_enabled():
            return False
        # A checkpoint recomputes its forward inside the backward. A reentrant one first ran without gradients.
        if current_graph_task_id() == -1:
            self._seen_forward.add(layer)
            return True
        return layer not in self._seen_forward

    def _count(self, layer: int, chosen: torch.Tensor) -> None:
        experts = self._num_experts[layer]
        pending = self._pending.get(layer)
        if pending is None or pending.device != chosen.device:
            before, pending = pending, chosen.new_zeros(max(self._num_experts) + 1)
            self._pending[layer] = pending if before is None else pending.add_(before.to(chosen.device))
            pending = self._pending[layer]
        # The last column is for ids without an expert.
        bins = chosen.masked_fill((chosen < 0) | (chosen >= experts), pending.numel() - 1)
        pending.scatter_add_(0, bins, torch.ones_like(bins))

    def metrics(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """Balance since the last training log."""
        tokens, dropped = self._take(args.device)
        self.history.append((state.global_step, tokens))
        rows = [_statistics(row[:experts]) for row, experts in zip(tokens, self._num_experts)]
        rows = [row for row in rows if row is not None]
        if not rows:
            return {}
        entropy, percent, load = (list(column) for column in zip(*rows))
        return {
            "router/entropy": sum(entropy) / len(rows),
            "router/entropy_percent": sum(percent) / len(rows),
            "router/least_entropy_percent": min(percent),
            "router/max_load": sum(load) / len(rows),
            "router/worst_max_load": max(load),
            "router/dropped_tokens": dropped,
        }

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Removes the hooks, and writes the files on the main process."""
        self._release()
        tokens, _ = self._take(args.device)
        if tokens.any():  # steps after the last log
            self.history.append((state.global_step, tokens))
        if state.is_world_process_zero and self.history:
            folder = Path(str(args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            self._write_csv(folder / "router_balance.csv")
            self._draw(folder / "router_balance.png")

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen_forward = [], set()

    def _take(self, device: torch.device) -> tuple[torch.Tensor, int]:
        """The counts of all processes since the last call, `(layers, E)`, and of dropped tokens; one transfer."""
        width = max(self._num_experts) + 1
        empty = torch.zeros(width, dtype=torch.int64, device=device)
        counts = torch.stack([self._pending.get(layer, empty).to(device) for layer in range(len(self.layers))])
        self._pending = {}
        counts = summed_over_processes(counts).cpu()
        return counts[:, :-1], int(counts[:, -1].sum())

    def _write_csv(self, path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            experts = [f"expert_{index}" for index in range(max(self._num_experts))]
            writer.writerow(["step", "layer", "entropy", "entropy_percent", "max_load", *experts])
            for step, tokens in self.history:
                for name, row, count in zip(self.layers, tokens, self._num_experts):
                    numbers = _statistics(row[:count]) or (math.nan,) * 3
                    writer.writerow([step, name, *(f"{number:.6g}" for number in numbers), *row[:count].tolist()])

    def _draw(self, path: Path) -> None:
        from matplotlib.figure import Figure

        tokens = torch.stack([tokens for _, tokens in self.history]).sum(0).double()
        experts = torch.tensor(self._num_experts).double()
        load = tokens * experts[:, None] / tokens.sum(1, keepdim=True).clamp(min=1)
        load[torch.arange(tokens.shape[1])[None, :] >= experts[:, None]] = math.nan
        rows, columns = load.shape
        figure = Figure(figsize=(min(4 + columns * 0.12, 18), min(2.5 + rows * 0.18, 14)), layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(load.numpy(), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0.0)
        axes.set(xlabel="expert", ylabel="layer", title="Tokens of each expert, relative to its layer's mean")
        figure.colorbar(image, ax=axes, label="load (1 = even)")
        figure.savefig(path, dpi=150)


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of a model's experts with stacked weights.

    Their forward takes hidden states, the experts chosen for each token, and the weights of those; or, as in Llama 4,
    all tokens of a block whose child `router` returns scores and logits.
    """
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if hasattr(type(module), "_apply_gate"):
            yield name, module
        elif layout_of(module) is not None:
            block = modules[name.partition(".base_layer")[0].rpartition(".")[0]]
            routed = "router" in block._modules and isinstance(getattr(block, "top_k", None), int)
            if only_argument(module) is None or routed:
                yield name, module


def _num_experts(module: Any) -> int:
    """The number of experts of the layer on all processes; a module that is split has only its own."""
    shapes = (full_shape(weight) for weight in declared_weights(module).values())
    stacked = next((shape[0] for shape in shapes if len(shape) == 3), None)
    return module.num_experts if stacked is None else stacked


def _statistics(tokens: torch.Tensor) -> tuple[float, float, float] | None:
    """Entropy in nats and in percent of the largest, and the largest load; None without tokens."""
    total = tokens.sum().item()
    if not total:
        return None
    share = tokens.double() / total
    entropy = -torch.special.xlogy(share, share).sum().item()
    most = math.log(len(tokens))
    return entropy, 100.0 * entropy / most if most else 100.0, share.max().item() * len(tokens)
