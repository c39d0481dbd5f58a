"""What the vendors' data sheets say of a card: memory, and how fast it computes and sends."""

from __future__ import annotations

import dataclasses
import re

from liger_trainer.callbacks.throughput import peak_of
from liger_trainer.errors import UserError
from liger_trainer.plan.cluster import NVLINK_STEP, PCIE_STEP, Cluster

MATMUL_SHARE, MEMORY_SHARE, LINK_SHARE = 0.645, 0.89, 0.8
"""Shares of the data sheet's rates that training sustains. The first is of Llama-3 8B without checkpointing on one
H200, the second of a copy there (4.27 of 4.8 TB/s). The third, for links and networks, is assumed."""

GB, GBIT = 10**9, 10**9 / 8


@dataclasses.dataclass(frozen=True)
class Card:
    """One kind of GPU; rates in bytes/s, of one direction."""

    name: str  # words of its device's name
    size: int  # bytes of its memory
    memory: float  # rate of its memory
    link: float  # to the other GPUs of its host: NVLink, Infinity Fabric, or PCIe
    network: float = 0.0  # to other hosts, as its vendor builds them; 0 if there is no usual one
    fp8: bool = False  # whether it has the matmuls of `kernels.fp8.linear.has_fp8`


_PCIE_4, _PCIE_5 = 32 * GB, 64 * GB
CARDS = (
    Card("B200", 180 * GB, 8000 * GB, 900 * GB, 400 * GBIT, fp8=True),
    Card("H200", 141 * GB, 4800 * GB, 450 * GB, 400 * GBIT, fp8=True),
    Card("H100 NVL", 94 * GB, 3900 * GB, _PCIE_5, fp8=True),
    Card("H100 PCIe", 80 * GB, 2000 * GB, _PCIE_5, fp8=True),
    Card("H100", 80 * GB, 3350 * GB, 450 * GB, 400 * GBIT, fp8=True),
    Card("H800", 80 * GB, 3350 * GB, 200 * GB, 400 * GBIT, fp8=True),
    Card("A100 PCIe", 80 * GB, 1935 * GB, _PCIE_4),
    Card("A100", 80 * GB, 2039 * GB, 300 * GB, 200 * GBIT),
    Card("A800", 80 * GB, 2039 * GB, 200 * GB, 200 * GBIT),
    Card("L40S", 48 * GB, 864 * GB, _PCIE_4),
    Card("L4", 24 * GB, 300 * GB, _PCIE_4),
    Card("A10G", 24 * GB, 600 * GB, _PCIE_4),
    Card("A10", 24 * GB, 600 * GB, _PCIE_4),
    Card("RTX 4090", 24 * GB, 1008 * GB, _PCIE_4),
    Card("RTX 3090", 24 * GB, 936 * GB, _PCIE_4),
    Card("MI355X", 288 * GB, 8000 * GB, 537.6 * GB, 400 * GBIT),
    Card("MI325X", 256 * GB, 6000 * GB, 448 * GB, 400 * GBIT),
    Card("MI300X", 192 * GB, 5300 * GB, 448 * GB, 400 * GBIT),
)
DEFAULT_CARD = next(card for card in CARDS if card.name == "H100")
MEASURED = ("H100", "H200")  # on which the model of the time was compared with runs


def card_named(text: str) -> Card | None:
    """The card of a name such as ``"h100"`` or ``"NVIDIA H100 80GB HBM3"``; None if it is not known."""
    words = text.lower().replace("-", " ").split()
    return next((card for card in CARDS if all(word in words for word in card.name.lower().split())), None)


def cluster_of(card: Card, gpus: int, hosts: int = 1, network: tuple[float, bool] | None = None) -> Cluster:
    """The GPUs of `hosts`; `network` is bytes/s and whether they are those of a whole host, None the card's own.

    Raises:
        UserError: for hosts that cannot have as many GPUs, and for a network that is not given and not known.
    """
    if gpus % hosts:
        raise UserError(
            f"`--hosts` is {hosts}, but `--gpus` is {gpus}, which it does not divide; count the GPUs of all hosts, as "
            f"many in each, such as `--gpus {hosts * max(gpus // hosts, 1)}`."
        )
    if network is not None and hosts == 1:
        raise UserError(
            "`--network` is that between hosts, but `--hosts` is 1; give the number of hosts, or leave it out."
        )
    rate, of_host = network or (card.network, False)
    if not rate and hosts > 1:
        raise UserError(
            f"`--network` is not given, and hosts with {card.name} have no usual one; give the bits a second, such as "
            "`--network 25Gb/s` a GPU or `--network 100Gb/s/host`."
        )
    return Cluster(
        gpus,
        hosts,
        flops=MATMUL_SHARE * (peak_of(card.name) or 0.0),
        memory=MEMORY_SHARE * card.memory,
        link=LINK_SHARE * card.link,
        network=LINK_SHARE * rate / (gpus // hosts if of_host else 1),
        link_step=PCIE_STEP if card.link <= _PCIE_5 else NVLINK_STEP,
        fp8=card.fp8,
    )


_UNITS = {"Mb": 1e6 / 8, "Gb": 1e9 / 8, "Tb": 1e12 / 8, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def network_rate(text: str) -> tuple[float, bool] | None:
    """Bytes/s, and whether they are those of a whole host, of a text such as ``400Gb/s`` or ``3.2Tb/s/host``."""
    found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})/s(/gpu|/host)?", text, re.ASCII)
    if found is None or not float(found[1]):
        return None
    return float(found[1]) * _UNITS[found[2]], found[3] == "/host"
