"""Who looks at a projection's output keeps what it saw."""

import torch
from torch import nn

from liger_trainer.nn.mlp import outputs_are_unhooked


def test_hooks_of_a_module_and_of_all_modules_are_seen():
    linear = nn.Linear(2, 2)
    assert outputs_are_unhooked(linear)
    handle = linear.register_forward_hook(lambda *_: None)
    assert not outputs_are_unhooked(linear)
    handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not outputs_are_unhooked(linear)
    handle.remove()
    assert outputs_are_unhooked(linear)
