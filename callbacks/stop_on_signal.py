"""Ends training with a checkpoint on Ctrl-C, and on SIGTERM and SIGHUP, which clusters send before a machine goes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_trainer.callbacks.logged import is_distributed
from liger_trainer.kernels.runtime import sent

_HANGUP = getattr(signal, "SIGHUP", None)  # not on Windows
SIGNALS = (signal.SIGINT, signal.SIGTERM, *([] if _HANGUP is None else [_HANGUP]))

_REPEATED_WITHIN = 2.0  # seconds; a launcher forwards the signal to its processes, which have already received it


class StoppedBySignal(KeyboardInterrupt):
    """Training was ended by a signal, whose number is `number`."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(what)
        self.number = number


class StopOnSignalCallback(TrainerCallback):
    """Ends training after a step, with a checkpoint, once [`receive`] has been called in any process.

    In transformers' own callback for SIGTERM (`enable_jit_checkpoint`) each process decides alone, and processes that
    save at different steps wait for each other forever. Here all of them reduce one number per step. On an accelerator
    its copy is read one step later, when it has arrived; every process reads it in the same step.

    Args:
        announces: Whether this process prints that it has received a signal.

    Attributes:
        received: The signal's number, 0 without one. After training has stopped, that of whichever process had one.
        stopped: Whether this callback has ended the training.
    """

    def __init__(self, announces: bool = True) -> None:
        self.announces = announces
        self.received = 0
        self.stopped = False
        self._pending: tuple[torch.Tensor, Any] | None = None
        self._first = 0.0
        self._process = os.getpid()
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def receive(self, number: int, frame: Any = None) -> None:
        """The handler of a signal: the first one is recorded, a later one ends the process at once."""
        if os.getpid() != self._process and number == signal.SIGINT:
            return  # a terminal sends it to the workers of data loaders too, which the training still needs
        if os.getpid() != self._process or (self.received and time.monotonic() - self._first > _REPEATED_WITHIN):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self.received:
            self.received, self._first = number, time.monotonic()
            name = signal.Signals(number).name
            with contextlib.suppress(OSError, RuntimeError):  # the terminal is gone, or a print was interrupted
                if self.announces:
                    what = "stops after this step, with a checkpoint; once more ends it at once"
                    print(f"\n{name}: {what}.", file=sys.stderr, flush=True)
            if number == _HANGUP:  # the terminal is gone, so from now on writing to it is an error
                with open(os.devnull, "w") as nowhere:
                    for stream in self._terminals:
                        os.dup2(nowhere.fileno(), stream)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stops with a checkpoint, without an evaluation before it."""
        number = self._of_all(args.device)
        if number:
            self.received, self.stopped = number, True
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Neither saves nor evaluates again; the Trainer calls this once more after a stop."""
        if self.stopped:
            control.should_save = control.should_evaluate = False

    def _of_all(self, device: torch.device) -> int:
        """The signal that any process has received, the same on all; on an accelerator that of the previous step."""
        if not is_distributed():
            return self.received
        number = torch.tensor(self.received, dtype=torch.int32)
        if device.type == "cpu":
            torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
            return int(number)
        reduced = sent(number, device)
        torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MAX)
        copied = torch.empty((), dtype=torch.int32, pin_memory=device.type == "cuda")
        copied.copy_(reduced, non_blocking=True)
        ready = torch.get_device_module(device).Event()
        ready.record()
        before, self._pending = self._pending, (copied, ready)
        if before is None:
            return 0
        before[1].synchronize()
        return int(before[0])


@contextlib.contextmanager
def stopping_on_signals(trainer: Trainer) -> Iterator[None]:
    """Around training: installs the handlers, and restores the earlier ones afterwards.

    A signal that is ignored, such as SIGHUP under ``nohup``, stays ignored. Outside the main thread, which alone can
    install handlers, signals are not handled.

    Raises:
        StoppedBySignal: after a stop, and in place of any error after a signal, such as that of a data loader's worker
            which the signal has ended too.
    """
    callback = StopOnSignalCallback(announces=trainer.is_world_process_zero())
    trainer.add_callback(callback)
    main = threading.current_thread() is threading.main_thread()
    heard = [number for number in SIGNALS if main and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, callback.receive) for number in heard}
    try:
        yield
    except Exception as error:
        if not callback.received:
            raise
        name = signal.Signals(callback.received).name
        raise StoppedBySignal(callback.received, f"stopped by {name}, without a checkpoint ({error})") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None is one that is not Python's
        trainer.remove_callback(callback)
    if callback.stopped:
        name = signal.Signals(callback.received).name
        folder = f"checkpoint-{trainer.state.global_step} is saved"
        raise StoppedBySignal(callback.received, f"stopped by {name} at step {trainer.state.global_step}; {folder}")
