"""swiglu_down and geglu_down on the CPU, and their kernels compiled for every GPU."""

import pytest
import torch

from liger_trainer.kernels.mlp import gated_activation as operators
from liger_trainer.kernels.mlp import gated_down as down_operators
from liger_trainer.kernels.mlp.gated_down import geglu_down, swiglu_down
from liger_trainer.kernels.mlp.geglu import geglu
from liger_trainer.kernels.mlp.swiglu import swiglu
from tests.aot import TARGETS, compile_launch, recorded_launches


def test_float64_runs_as_reference(device):
    gate, up, weight, bias = (
        torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        for shape in ((2, 4), (2, 4), (3, 4), 3)
    )
    linear = torch.nn.functional.linear
    torch.testing.assert_close(swiglu_down(gate, up, weight, bias), linear(swiglu(gate, up), weight, bias))
    torch.testing.assert_close(geglu_down(gate, up, weight), linear(geglu(gate, up), weight))
    fused = torch.cat((gate, up), dim=-1)
    torch.testing.assert_close(swiglu_down(fused, None, weight), swiglu_down(gate, up, weight))
    assert torch.autograd.gradcheck(swiglu_down, (gate, up, weight, bias))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_ahead_of_time(target, dtype):
    gate, gate_up = torch.zeros(64, 1024, dtype=dtype), torch.zeros(64, 2048, dtype=dtype)
    plain = operators.scalars()
    with recorded_launches() as launches:
        down_operators._gated_recompute(gate, gate, gate, "silu", plain, False, True, True)
        down_operators._gated_recompute(gate, gate_up, None, "gelu_tanh", plain, False, True, False)
        down_operators._gated_recompute_(gate, gate_up, None, "silu", plain, True)
    assert [launch.arguments["NEED_H"] for launch in launches] == [True] * 3
    for launch in launches:
        compiled = compile_launch(launch, target)
        if target == "sm_90":  # 128-bit reads and writes: three tensors read, three written
            assert compiled.asm["ptx"].count(".v4.b32") == 6
