"""The page about a training run, from what the Trainer has logged."""

from liger_trainer.run_report.report import run_report

__all__ = ["run_report"]
