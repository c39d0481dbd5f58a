"""Handing out the parameters of a head that ZeRO-3 owns: whose hooks run, and where."""

import torch
from torch import nn

from liger_trainer.head.chunked_module import on_whole_parameters


def test_hooks_of_others_run_on_the_copy_alone():
    """DeepSpeed's gather the parameters; a user's see hidden states go in and logits come out, once."""
    head, hidden, seen = nn.Linear(4, 6), torch.randn(3, 4), []

    def of_deepspeed(module, args):
        seen.append("gathered")

    of_deepspeed.__module__ = "deepspeed.runtime.zero.parameter_offload"
    head.register_forward_pre_hook(of_deepspeed)
    head.register_forward_hook(lambda module, args, logits: seen.append(tuple(logits.shape)))
    copied, passed = on_whole_parameters(head, hidden)
    assert seen == ["gathered"]
    torch.testing.assert_close(copied(passed), nn.functional.linear(hidden, head.weight, head.bias))
    assert seen == ["gathered", (3, 6)]
    head(hidden)
    assert seen == ["gathered", (3, 6), "gathered", (3, 6)]
