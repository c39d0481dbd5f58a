"""GPUs in hosts, and the bytes and the time of what they send to each other.

Processes are numbered host by host, and a group has every `stride`-th of them. A collective runs in as many rings as a
host has members of the group: each ring enters and leaves a host over another member's network card, so that a host
sends what one GPU would, over all its cards. Of a ring's time, the part of the bandwidth is that of `(n - 1) / n` of
all bytes at the slower of the link and the cards, and the part of the latency that of its `n - 1` steps:

    all-gather, reduce-scatter of S bytes   S (n - 1) / n      n - 1 steps
    all-reduce                              a reduce-scatter and an all-gather
    all-to-all of S bytes                   S / n to each of the others, at once

(Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005; the factors of
the bus bandwidth in nccl-tests' PERFORMANCE.md.) The seconds of a step are NCCL's own, of its protocol for large
messages (`src/graph/tuning.cc`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

NVLINK_STEP, PCIE_STEP, NETWORK_STEP = 3.4e-6, 5.7e-6, 14e-6
"""Seconds of one step of a ring."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """What one GPU sends, and how long it takes."""

    within: float = 0.0  # bytes to GPUs of its host
    between: float = 0.0  # bytes to other hosts
    seconds: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.within + other.within, self.between + other.between, self.seconds + other.seconds)

    def __mul__(self, times: float) -> Sent:
        return Sent(times * self.within, times * self.between, times * self.seconds)


NOTHING = Sent()


@dataclasses.dataclass(frozen=True)
class Group:
    """Processes that communicate: `each` or more in every one of `hosts`."""

    size: int
    hosts: int
    each: int


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Equal GPUs in equal hosts, at the speeds that they sustain in training."""

    gpus: int  # of all hosts
    hosts: int
    flops: float  # FLOP/s of matmuls in half precision
    memory: float  # bytes/s of a GPU's own memory
    link: float  # bytes/s that a GPU sends to others of its host
    network: float  # bytes/s that a GPU sends to other hosts
    link_step: float = NVLINK_STEP  # seconds of a ring's step within a host
    fp8: bool = False  # whether the GPUs have the matmuls that `fp8` needs

    @property
    def gpus_per_host(self) -> int:
        """GPUs of one host."""
        return self.gpus // self.hosts

    def group(self, size: int, stride: int = 1) -> Group:
        """Of the groups of `size` processes, `stride` apart, the one that is spread most, for which all others wait."""
        return _most_spread(size, stride, self.gpus // (size * stride), self.gpus_per_host)

    def _seconds(self, within: float, between: float) -> float:
        """Of so many bytes to GPUs of the same host and of others, which one GPU sends at once."""
        return max(within / self.link, between / self.network if between else 0.0)

    def gather(self, size: float, group: Group) -> Sent:
        """An all-gather of `size` bytes, of which each member has its part; a reduce-scatter sends the same."""
        if group.size == 1 or not size:
            return NOTHING
        every = size * (group.size - 1) / group.size
        between = every / group.each if group.hosts > 1 else 0.0
        within = every - between
        waits = (group.size - group.hosts) * self.link_step + (group.hosts - 1) * NETWORK_STEP
        return Sent(within, between, self._seconds(within, between) + waits)

    def all_reduce(self, size: float, group: Group) -> Sent:
        """A sum of `size` bytes that every member gets."""
        return self.gather(size, group) * 2

    def exchange(self, size: float, group: Group) -> Sent:
        """An all-to-all: each member has `size` bytes, as many for every member."""
        if group.size == 1:
            return NOTHING
        within, between = (size * count / group.size for count in (group.each - 1, group.size - group.each))
        waits = NETWORK_STEP if group.hosts > 1 else self.link_step
        return Sent(within, between, self._seconds(within, between) + waits)


@functools.cache
def _most_spread(size: int, stride: int, blocks: int, per_host: int) -> Group:
    """[`Cluster.group`] of groups in so many blocks of `size * stride` processes, one after the other."""
    # Where a group begins in its host decides how it lies, so no more of them need be looked at than a host has GPUs.
    begins = {
        (block * size * stride + offset) % per_host
        for block in range(min(blocks, per_host))
        for offset in range(min(stride, per_host))
    }
    members = [Counter((begin + stride * place) // per_host for place in range(size)) for begin in begins]
    hosts, fewest = max((len(each), -min(each.values())) for each in members)
    return Group(size, hosts, -fewest)
