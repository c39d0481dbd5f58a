"""The attention of a model type's layers by itself, at the sizes of its configuration: stock, and with our kernels.

    python -m liger_trainer.benchmarks.attention_block glm_moe_dsa --batch 4 --length 4096

The layers are those of a decoder whose MLPs give nothing: what is left is attention, its norm and its residual, and the
masks, which are made once for all layers. No layer is checkpointed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
)

from liger_trainer import apply_liger_kernel
from liger_trainer.benchmarks.device import Device, find_device
from liger_trainer.benchmarks.registry import BenchmarkError, closest
from liger_trainer.benchmarks.report import make_console, make_table, milliseconds, number

PROVIDERS = ("hf", "liger_trainer")


class Nothing(nn.Module):
    """Takes the place of an MLP."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Zeros, in the shape of `hidden`, that have its gradient."""
        return hidden * 0


@dataclasses.dataclass(frozen=True)
class Rows:
    """What the layers get: rows of one document each, or of packed documents."""

    batch: int
    length: int  # tokens in a row
    document: int = 0  # tokens in each packed document; 0 for one document a row

    def arguments(self, hidden_size: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """The decoder's arguments: random embeddings (batch, length, hidden), and the positions of documents."""
        random = torch.Generator(device).manual_seed(0)
        shape = (self.batch, self.length, hidden_size)
        embeddings = torch.randn(shape, device=device, dtype=dtype, generator=random)
        found: dict[str, Any] = {"inputs_embeds": embeddings.requires_grad_(), "use_cache": False}
        if self.document:
            places = torch.arange(self.length, device=device).expand(self.batch, -1)
            found["position_ids"] = places % self.document
        return found


@dataclasses.dataclass
class Measured:
    """One provider's layers: medians of a layer in milliseconds, and GiB of all layers above weights and inputs."""

    forward: float
    backward: float
    gibibytes: float | None
    result: Tensor  # of the last layer, normed


def published(kind: str, layers: int) -> PretrainedConfig:
    """The configuration of a model type with so many layers, whose MLPs have no experts, and few embeddings.

    Raises:
        BenchmarkError: if transformers has no causal language model of this type.
    """
    if (
        kind not in CONFIG_MAPPING
        or type(AutoConfig.for_model(kind).get_text_config()) not in MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        raise BenchmarkError(f"{kind!r} is no type of a causal language model in transformers; give a `model_type`.")
    config = AutoConfig.for_model(kind).get_text_config()
    config.num_hidden_layers, config.vocab_size = layers, 256
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = layers
    for kinds in ("layer_types", "indexer_types", "mlp_layer_types"):
        if vars(config).get(kinds):
            whole = ["dense"] * layers if kinds == "mlp_layer_types" else getattr(config, kinds)[:layers]
            setattr(config, kinds, whole)
    return config


def measure(config: PretrainedConfig, provider: str, rows: Rows, device: Device, rounds: int = 9) -> Measured:
    """Runs the layers forward and backward, for the gradients of the inputs and of all weights.

    Args:
        config: The decoder's; see `published`.
        provider: One of `PROVIDERS`.
        rows: The rows that the layers get.
        device: Where they run, in bfloat16, or in float32 on a CPU.
        rounds: How many times; once more before, which is not timed.

    Raises:
        BenchmarkError: if the layers have no `mlp` that may be left out.
    """
    dtype = torch.float32 if device.module is None else torch.bfloat16
    torch.manual_seed(0)
    with device.device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    decoder = model.get_decoder()
    if not all(hasattr(layer, "mlp") for layer in getattr(decoder, "layers", [None])):
        raise BenchmarkError(
            f"The layers of {config.model_type!r} are not `layers` with an `mlp` each; take another type."
        )
    for layer in decoder.layers:
        layer.mlp = Nothing()
    if provider == "liger_trainer":
        apply_liger_kernel(model)
    arguments = rows.arguments(config.hidden_size, device.device, dtype)
    wanted = [arguments["inputs_embeds"], *(weight for weight in decoder.parameters() if weight.requires_grad)]
    upstream = torch.randn_like(arguments["inputs_embeds"])

    def forward(_: object = None) -> Tensor:
        return decoder(**arguments).last_hidden_state

    def backward(result: Tensor) -> None:
        torch.autograd.grad(result, wanted, upstream, allow_unused=True)

    result = forward()
    backward(result)
    samples = [device.time(forward, backward) for _ in range(rounds)]
    there, back = (statistics.median(times) / config.num_hidden_layers for times in zip(*samples))
    return Measured(there, back, device.peak_gibibytes(lambda: backward(forward())), result.detach())


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", metavar="TYPE", help="a `model_type`, whose sizes are those of its configuration")
    parser.add_argument("--layers", type=int, default=3, help="how many layers share the masks")
    parser.add_argument("--batch", type=int, default=4, help="rows")
    parser.add_argument("--length", type=int, default=4096, help="tokens in a row")
    parser.add_argument("--documents", type=int, default=0, help="tokens in each packed document")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="of these, in this order")
    parser.add_argument("--device", help="default: the accelerator, else cpu")
    arguments = parser.parse_args(argv)
    if min(arguments.layers, arguments.batch, arguments.length) < 1:
        parser.error("`--layers`, `--batch` and `--length` must be 1 or more")
    if not 0 <= arguments.documents <= arguments.length:
        parser.error(f"`--documents` is {arguments.documents}; give 0 to {arguments.length}, the tokens of a row")
    try:
        device = Device(find_device(arguments.device))
        providers = [closest(name, PROVIDERS, "provider") for name in arguments.providers.split(",")]
        config = published(arguments.kind, arguments.layers)
    except BenchmarkError as error:
        parser.error(str(error))
    rows = Rows(arguments.batch, arguments.length, arguments.documents)
    title = f"Attention of {arguments.kind}, {rows.batch}×{rows.length}: a layer's ms · {device.name()}"
    table = make_table(title, "forward", "backward", "both", "GiB of all", "difference", remark=False)
    first: Tensor | None = None
    for provider in providers:
        try:
            found = measure(config, provider, rows, device)
        except BenchmarkError as error:
            parser.error(str(error))
        first = found.result if first is None else first
        away = (found.result - first).float().norm() / first.float().norm()
        times = (found.forward, found.backward, found.forward + found.backward)
        table.add_row(provider, *map(milliseconds, times), number(found.gibibytes, ".2f"), f"{away:.1e}")
        device.collect()
    make_console().print(table)


if __name__ == "__main__":
    main()
