"""The generators of Python and numpy, of which code of a model may draw beside torch's."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple


class HostState(NamedTuple):
    """Where both generators stand; states are compared by ``==``."""

    of_python: tuple[Any, ...]
    of_numpy: tuple[Any, ...] | None  # None as long as nobody has imported numpy, which torch does without

    @classmethod
    def now(cls) -> HostState:
        """The current state."""
        numpy: Any = sys.modules.get("numpy")
        if numpy is None:
            return cls(random.getstate(), None)
        name, keys, *others = numpy.random.get_state()
        return cls(random.getstate(), (name, tuple(keys.tolist()), *others))

    def restore(self) -> None:
        """Makes both generators stand there again."""
        random.setstate(self.of_python)
        if self.of_numpy is not None:
            sys.modules["numpy"].random.set_state(self.of_numpy)
