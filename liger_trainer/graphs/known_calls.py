"""The calls of one layer: which kinds come often, and the graphs of these."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable

from liger_trainer.graphs.layers import LayerGraphs

_AT = 3  # a kind of call is captured when it comes this often
_MOST = 16  # kinds of calls of a layer that have graphs at a time
_COUNTED = 512  # kinds of calls of a layer that are counted
_STATES = 2  # of a layer, for which a kind of call has graphs: with its adapters on, and off for a reference
_CHANGES = 3  # how often graphs of a state are dropped for those of another


class KnownCalls:
    """The kinds of calls of one layer: how often each came, and its graphs, the last used last.

    A kind has graphs for each state of the layer, such as with adapters and without them.
    """

    def __init__(self) -> None:
        self.graphs: OrderedDict[Hashable, list[LayerGraphs]] = OrderedDict()
        self.counts: Counter[Hashable] = Counter()
        self.changes = 0
        self.unserved = 0
        self.obstacle = ""

    @property
    def reason(self) -> str:
        """Why the layer runs without graphs; empty if it has some, or is not known yet."""
        never = self.unserved >= _AT and not any(self.graphs.values())
        return self.obstacle or ("it is given something that no graph can hold, such as a cache" if never else "")

    def find(self, key: Hashable) -> LayerGraphs | None:
        """The graphs for a kind of call of the layer as it is."""
        for graphs in self.graphs.get(key, ()):
            if graphs.state.holds():
                self.graphs.move_to_end(key)
                return graphs
        return None

    def is_due(self, key: Hashable) -> bool:
        """Counts a call without graphs, and returns whether its kind has come often enough."""
        if len(self.counts) > _COUNTED:
            self.counts.clear()
        self.counts[key] += 1
        return self.counts[key] >= _AT

    def add(self, key: Hashable, graphs: LayerGraphs) -> None:
        """Keeps graphs, and drops those of weights that have moved, of earlier states and of too many kinds."""
        for kind, known in [*self.graphs.items()]:
            self.graphs[kind] = [each for each in known if not each.state.has_moved()]
        states = self.graphs.setdefault(key, [])
        states.append(graphs)
        del self.counts[key]
        if len(states) > _STATES:
            del states[0]
            self.changes += 1
        if self.changes > _CHANGES:
            self.drop("its attributes change while it is trained")
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
        """Drops all graphs; the layer gets no others."""
        self.obstacle = obstacle
        self.graphs.clear()
