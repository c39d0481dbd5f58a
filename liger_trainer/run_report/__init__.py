"""`report.html`: the page about a training run, and the pages and curves that other reports share."""

from liger_trainer.run_report.report import run_report

__all__ = ["run_report"]
