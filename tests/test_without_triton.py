"""Without Triton, as on macOS, and without what Windows lacks too, all imports, and training is that of plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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

WITHOUT_POSIX = """
    import os, pkgutil, signal, sys, tempfile
    import datasets, peft, torch, transformers, trl  # which ask for the platform; what they have imported stays

    for name in ("triton", "fcntl", "resource", "termios", "tty", "pwd", "grp"):
        sys.modules[name] = None
    for name in ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "alarm", "pthread_sigmask"):
        delattr(signal, name)
    for name in ("fork", "getuid", "getgid", "geteuid", "getpgid", "setsid", "killpg", "sched_getaffinity", "uname"):
        delattr(os, name)

    import liger_trainer
    from liger_trainer.callbacks.memory import peak_memory
    from liger_trainer.callbacks.stop_on_signal import SIGNALS, StopOnSignalCallback
    from liger_trainer.tools.cli import doctor
    from tests.trainers.builders import causal, losses_and_norms

    others = {"liger_trainer.integrations", "liger_trainer.benchmarks"}
    for module in pkgutil.walk_packages(liger_trainer.__path__, "liger_trainer."):
        apart = module.name.endswith("__main__") or "gluon" in module.name  # runs the command; Triton's own language
        if not apart and not any(module.name.startswith(name) for name in others):
            __import__(module.name)
    assert SIGNALS == (signal.SIGINT, signal.SIGTERM)
    assert peak_memory(torch.device("cpu")) == 0
    assert "plain torch reference path" in doctor.devices()[0].text
    curves = []
    for trainer_class in (transformers.Trainer, liger_trainer.LigerTrainer):
        with tempfile.TemporaryDirectory() as folder:
            further = {"callbacks": [StopOnSignalCallback()]} if trainer_class is liger_trainer.LigerTrainer else {}
            trainer = causal(folder, trainer_class=trainer_class, max_steps=2, save_strategy="steps", **further)
            trainer.train()
            curves.append(losses_and_norms(trainer))
    torch.testing.assert_close(*curves, rtol=1e-5, atol=1e-6)
    print("trained")
"""


@pytest.mark.parametrize("program", [PROGRAM, WITHOUT_POSIX], ids=["macOS", "Windows"])
def test_imports_and_trains(program):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parent.parent,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("trained\n")
