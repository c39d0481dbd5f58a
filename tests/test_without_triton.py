"""Where Triton is not installed everything imports, and a patched model trains on the reference path."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = """
    import sys
    sys.modules["triton"] = None  # importing it now raises ImportError
    import copy
    import torch
    import liger_trainer, liger_trainer.functional, liger_trainer.nn
    from liger_trainer import apply_liger_kernel
    from liger_trainer.head import DeferredLogits
    from types import SimpleNamespace
    from liger_trainer.kernels.runtime import HAS_TRITON, use_triton
    from tests.tiny_models import TINY_MODELS, tiny_batch

    assert not HAS_TRITON
    assert not use_triton(SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16))
    native = TINY_MODELS["llama"]().train()
    model = copy.deepcopy(native)
    assert [row for row in apply_liger_kernel(model) if row.applied]
    inputs = tiny_batch("llama", native)
    outputs = model(**inputs)
    assert type(outputs.logits) is DeferredLogits
    for loss in (outputs.loss, native(**inputs).loss):
        loss.backward()
    for ours, theirs in zip(model.parameters(), native.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    print("trained")
"""


def test_imports_and_trains():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parent.parent,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("trained\n")
