"""Several hosts on this machine: namespaces of Linux with networks, names, disks and processes of their own.

A host lives as long as its first process, which ends with this one, however that ends; with it end its programs, and
its network. The hosts are joined by a [`Link`], which takes their packets from one to another: it can be slow, or be
cut, as a cable is, so that no host is told.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import itertools
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests import forked
from tests.distributed.nodes import ROOT

DISK = Path("/mnt")
"""Where each host has a disk of its own."""

_NAMESPACES = ("--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
_ENTERED = 0x40000000 | 0x00020000 | 0x04000000 | 0x20000000  # network, mounts, name, processes
_TUNSETIFF, _TUN, _NO_INFO = 0x400454CA, 0x0001, 0x1000  # <linux/if_tun.h>
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl
_LIMIT = 150
"""Seconds after which a program is killed."""
_numbers = itertools.count()


class Link:
    """What joins hosts: an interface for each, and a thread that takes packets from one to another.

    Args:
        count: How many hosts.
        delay: Seconds that a packet takes.
        rate: Bytes a second that a host sends at most; None for no bound.
    """

    def __init__(self, count: int, delay: float = 0.0, rate: float | None = None) -> None:
        self.cut = False
        self._delay, self._rate = delay, rate
        number = next(_numbers)
        self.interfaces = [f"h{os.getpid()}x{number}n{rank}" for rank in range(count)]
        self._ends: list[int] = []
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        try:
            for name in self.interfaces:
                self._ends.append(os.open("/dev/net/tun", os.O_RDWR))
                fcntl.ioctl(self._ends[-1], _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN | _NO_INFO))
        except OSError:
            self._close_files()
            raise
        self._thread.start()

    def _carry(self) -> None:
        ends = {socket.inet_aton(address(rank)): end for rank, end in enumerate(self._ends)}
        free = dict.fromkeys(self._ends, 0.0)  # when an end has sent what it has to send
        waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
        while True:
            until = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready, _, _ = select.select([*self._ends, self._wake], [], [], until)
            if self._wake in ready:
                return
            now = time.monotonic()
            for end in ready:
                packet = os.read(end, 65536)
                to = ends.get(packet[16:20]) if packet[0] >> 4 == 4 else None  # where IPv4 has the destination
                if to is None or self.cut:
                    continue
                free[end] = max(now, free[end]) + (len(packet) / self._rate if self._rate else 0.0)
                waiting.append((free[end] + self._delay, to, packet))
            waiting = collections.deque(sorted(waiting))
            while waiting and waiting[0][0] <= time.monotonic():
                _, to, packet = waiting.popleft()
                if not self.cut:
                    os.write(to, packet)

    def close(self) -> None:
        """Ends the thread; the interfaces vanish."""
        os.close(self._stop)
        self._stop = -1
        self._thread.join()
        self._close_files()

    def _close_files(self) -> None:
        for file in (*self._ends, self._wake, self._stop):
            if file >= 0:
                os.close(file)


def address(rank: int) -> str:
    """The address of a host."""
    return f"10.23.0.{rank + 1}"


class Host:
    """A host `host<rank>`, at an interface of a link.

    Args:
        rank: Its number.
        count: How many there are; it knows all their names.
        interface: Name of the link's end.
        disk: The folder that it sees as [`DISK`].
    """

    def __init__(self, rank: int, count: int, interface: str, disk: Path) -> None:
        self.rank, self.name, self.disk = rank, f"host{rank}", disk
        self._programs: list[forked.Running] = []
        self._network = -1
        self._first = subprocess.Popen(
            ["unshare", *_NAMESPACES, "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        streams = (self._first.stdin, self._first.stdout, self._first.stderr)
        _, self._said, self._complained = self._streams = [stream for stream in streams if stream is not None]
        try:
            if not self._said.readline():
                raise PermissionError(f"unshare: {self._complained.read().strip()}")
            children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text()
            self.pid = int(children)
            # Open here, it outlives the processes inside, whose sockets are then closed as on a host that runs on.
            self._network = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
            _done(["ip", "link", "set", interface, "netns", str(self.pid), "name", "eth0"])
            names = "\\n".join(["127.0.0.1 localhost", *(f"{address(other)} host{other}" for other in range(count))])
            lines = f"""
                hostname {self.name}
                ip link set lo up
                ip address add {address(rank)}/24 dev eth0
                ip link set eth0 mtu 1500 up
                mount --bind {disk} {DISK}
                printf '{names}\\n' > {DISK}/hosts
                mount --bind {DISK}/hosts /etc/hosts
            """
            _done([*self._inside, "sh", "-ec", lines])
        except BaseException:
            self.close()
            raise

    @property
    def _inside(self) -> list[str]:
        return ["nsenter", "--all", "--target", str(self.pid), "env", "-C", str(ROOT)]

    def command(self, words: Sequence[str], output: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Starts a program as a user does; what it writes is in the file `output`."""
        with output.open("wb") as file:
            return subprocess.Popen(
                [*self._inside, *words], env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def start(self, work: Callable[..., int | None], *arguments: Any, **variables: str) -> forked.Running:
        """Starts `work(*arguments)` in a forked process on this host."""
        program = forked.start(_enter_and_work, self.pid, work, arguments, environment=variables)
        self._programs.append(program)
        return program

    def die(self) -> None:
        """Ends all that runs on it by SIGKILL, and waits for that; its system closes their sockets."""
        self._first.kill()  # and with it the first process inside, and all others there
        self._first.wait()
        for program in self._programs:  # a slow machine takes a while, in which they would go on
            program.process.join()

    def close(self) -> None:
        """Ends it, and removes what is left."""
        self.die()
        for stream in self._streams:
            stream.close()
        if self._network >= 0:
            os.close(self._network)


def _enter_and_work(host: int, work: Callable[..., int | None], arguments: tuple[Any, ...]) -> int | None:
    system = ctypes.CDLL(None, use_errno=True)
    system.prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    file = os.pidfd_open(host)
    if system.setns(file, _ENTERED):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(file)
    faulthandler.cancel_dump_traceback_later()  # its thread would not be in the child
    child = os.fork()  # which has a number there
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    system.prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    faulthandler.dump_traceback_later(_LIMIT, exit=True)
    os.chdir(ROOT)
    return work(*arguments)


def _done(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"{' '.join(words[:3])}: {done.stderr.strip()}")


@contextlib.contextmanager
def joined(count: int, folder: Path, **link: float) -> Iterator[tuple[list[Host], Link]]:
    """Hosts with disks in `folder`, and the [`Link`] between them."""
    between = Link(count, **link)
    hosts: list[Host] = []
    try:
        for rank, interface in enumerate(between.interfaces):
            disk = folder / f"disk{rank}"
            disk.mkdir(exist_ok=True)
            hosts.append(Host(rank, count, interface, disk))
        yield hosts, between
    finally:
        between.close()
        for host in hosts:
            host.close()


@functools.cache
def why_not() -> str:
    """Why this machine allows no hosts; empty if it does."""
    import tempfile

    try:
        with tempfile.TemporaryDirectory() as folder, joined(1, Path(folder)):
            return ""
    except OSError as error:
        return str(error)


def launched(rank: int, count: int) -> dict[str, str]:
    """What `accelerate launch` with one process a host puts into its environment, as far as a CPU needs it."""
    return {
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank), "MASTER_ADDR": "host0", "MASTER_PORT": "29500", "ACCELERATE_MIXED_PRECISION": "bf16",
    }  # fmt: skip


def run_on(hosts: Sequence[Host], work: Callable[..., int | None], *arguments: Any) -> list[forked.Running]:
    """Starts `work` on each host, as the processes of one launch."""
    return [host.start(work, *arguments, **launched(host.rank, len(hosts))) for host in hosts]
