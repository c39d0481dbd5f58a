"""Which calls of layers get graphs: kinds that come often, and for which the host takes longer than the device."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable

import torch

from liger_trainer.graphs.layers import LayerGraphs

_AT = 3  # a kind of call is captured when it comes this often
_MOST = 64  # kinds of calls of a layer that have graphs at a time
_IDLE = 1024  # calls of a layer after which a kind that has not come makes room for another
_COUNTED = 512  # kinds of calls of a layer that are counted
_PAUSE = 512  # calls of a kind for which no graph could be made, before the next attempt
_STATES = 2  # of a layer, for which a kind of call has graphs: with its adapters on, and off for a reference
_CHANGES = 3  # how often graphs of a state are dropped for those of another
_NEVER = torch.iinfo(torch.int64).max  # tokens of a call


class KnownCalls:
    """The kinds of calls of one layer: how often each came, and its graphs, the last used last.

    A kind has graphs for each state of the layer, such as with adapters and without them.
    """

    def __init__(self) -> None:
        self.graphs: OrderedDict[Hashable, list[LayerGraphs]] = OrderedDict()
        self._used: dict[Hashable, int] = {}  # the last call of each kind
        self._calls = 0  # that graphs could serve
        self.counts: Counter[Hashable] = Counter()
        self.changes = 0
        self.unserved: Counter[str] = Counter()  # by the reason, the calls since the last that a graph could serve
        self.obstacle = ""

    @property
    def reason(self) -> str:
        """Why the layer runs without graphs; empty if it has some, or is not known yet."""
        if self.obstacle or any(self.graphs.values()):
            return self.obstacle
        return next((reason for reason, count in self.unserved.most_common(1) if count >= _AT), "")

    @property
    def keeping(self) -> LayerGraphs | None:
        """The graphs used last in which the layer, though checkpointed, keeps something; None if there are none."""
        return next((each for states in reversed(self.graphs.values()) for each in states if each.kept), None)

    def count(self) -> None:
        """Counts a call that graphs could serve."""
        self._calls += 1
        self.unserved.clear()

    def find(self, key: Hashable) -> LayerGraphs | None:
        """The graphs for a kind of call that are valid for the layer as it is; None if there are none."""
        for graphs in self.graphs.get(key, ()):
            if graphs.state.holds():
                self.graphs.move_to_end(key)
                self._used[key] = self._calls
                return graphs
        return None

    def is_due(self, key: Hashable) -> bool:
        """Counts a call without graphs, and returns whether its kind has come often enough, and has room."""
        if len(self.counts) > _COUNTED:
            self.counts.clear()
        self.counts[key] += 1
        return self.counts[key] >= _AT and (key in self.graphs or len(self.graphs) < _MOST or self._is_idle())

    def _is_idle(self) -> bool:
        """Whether the kind that was used least recently has not been used for long."""
        return self._calls - self._used.get(next(iter(self.graphs)), 0) > _IDLE

    def wait(self, key: Hashable) -> None:
        """Makes a kind of call for which no graph can be made now wait before the next attempt."""
        self.counts[key] = -_PAUSE

    def has_changed(self, key: Hashable) -> None:
        """To be called where the graphs of a kind of call are no longer valid, and those of other layers go with them.

        After a few times, the layer gets no graphs any more.
        """
        if self.graphs.get(key):
            self.changes += 1
            self._check_changes()

    def _check_changes(self) -> None:
        if self.changes > _CHANGES:
            self.drop("its attributes or the memory of its weights keep changing")

    def add(self, key: Hashable, graphs: LayerGraphs) -> None:
        """Keeps graphs, and drops those of weights that have moved, of earlier states and of too many kinds."""
        before = sum(map(len, self.graphs.values()))
        for kind, known in [*self.graphs.items()]:
            self.graphs[kind] = [each for each in known if not each.state.has_moved()]
        self.changes += sum(map(len, self.graphs.values())) < before
        states = self.graphs.setdefault(key, [])
        states.append(graphs)
        self._used[key] = self._calls
        del self.counts[key]
        if len(states) > _STATES:
            del states[0]
            self.changes += 1
        self._check_changes()
        while len(self.graphs) > _MOST:
            self.graphs.popitem(last=False)

    def forget_kept(self) -> None:
        """Drops the graphs that keep what a backward needs."""
        for key in [key for key, states in self.graphs.items() if any(each.keeps for each in states)]:
            del self.graphs[key]
        self.counts.clear()

    def forget(self) -> None:
        """Drops all graphs; those of kinds that still come are captured anew."""
        self.graphs.clear()
        self.counts.clear()

    def drop(self, obstacle: str) -> None:
        """Drops all graphs for good, because of `obstacle`."""
        self.obstacle = obstacle
        self.graphs.clear()


class Gains:
    """From how many tokens on a call keeps the device busy, as far as calls have been timed.

    A forward without gradients launches less for its tokens than one with a backward, so each has numbers of its own.

    Args:
        always: Whether calls run from graphs without being timed.

    Attributes:
        busy_from: The fewest tokens of a call in training that is known to keep the device busy, int64 (1,). Processes
            that collate batches may share its memory.
    """

    def __init__(self, always: bool) -> None:
        self.busy_from = torch.full((1,), _NEVER)
        self._busy = {True: self.busy_from, False: self.busy_from.clone()}  # with gradients, and without
        self._waiting = dict.fromkeys(self._busy, _NEVER if always else 0)  # the most tokens known to leave it idle

    @property
    def in_training(self) -> int | None:
        """`busy_from`; None if no batch is known to keep the device busy."""
        return None if self.busy_from == _NEVER else int(self.busy_from)

    def is_busy(self, tokens: int, differentiated: bool) -> bool:
        """Whether a call is known to keep the device busy."""
        return tokens >= int(self._busy[differentiated])

    def is_timed(self, tokens: int, differentiated: bool) -> bool:
        """Whether calls as large have been timed, or need not be."""
        return tokens <= self._waiting[differentiated] or self.is_busy(tokens, differentiated)

    def note(self, tokens: int, differentiated: bool, busy: bool) -> None:
        """Notes what a call did that has been timed."""
        if busy:
            self._busy[differentiated].clamp_(max=tokens)
        else:
            self._waiting[differentiated] = max(self._waiting[differentiated], tokens)
