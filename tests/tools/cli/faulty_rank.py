"""`python -m liger_trainer RECIPE ...`, one rank of which dies in a step: in a way and at a step of the environment."""

import os
import signal
import sys
import time

from liger_trainer.tools.cli import run_recipe_file
from liger_trainer.trainers.trainer import LigerTrainer


def run_with_fault(recipe, options):
    """Runs a recipe; the environment says at which step rank 1 fails, and how."""
    training_step = LigerTrainer.training_step

    def faulty_step(self, *args, **kwargs):
        if self.args.process_index == 1 and self.state.global_step == int(os.environ["FAULT_STEP"]):
            if os.environ["FAULT"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if os.environ["FAULT"] == "hang":
                time.sleep(3600)
            if os.environ["FAULT"] == "raise":
                raise ArithmeticError("the fault of rank 1")
            os.kill(os.getpid(), signal.SIGTERM)
        return training_step(self, *args, **kwargs)

    LigerTrainer.training_step = faulty_step
    return run_recipe_file(recipe, options)


if __name__ == "__main__":
    sys.exit(run_with_fault(sys.argv[1], sys.argv[2:]))
