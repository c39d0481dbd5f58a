"""The base of modules that have options and no parameters."""

from torch import nn


class OptionsModule(nn.Module):
    """A module that is a dataclass of its options, in the order of Liger's arguments."""

    def __post_init__(self) -> None:
        super().__init__()
