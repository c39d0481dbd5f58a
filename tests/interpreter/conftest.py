"""Kernel tests: on a GPU they run natively; without one they need ``TRITON_INTERPRET=1`` set before Triton is imported.

Anywhere else this folder is not collected. ``make test`` runs it as a second pytest call.
"""

import os

import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_sessionfinish(session, exitstatus):
    """Nothing collected here is no failure: pytest's exit code 5 becomes 0."""
    ignored = "collect_ignore_glob" in globals()
    if ignored and exitstatus == 5:
        session.exitstatus = 0
