"""liger_trainer: fast, small-memory fine-tuning inside the Hugging Face stack."""

import os as _os

from liger_trainer._version import __version__ as __version__

# In a source tree the sibling folders kernels/, configs/, callbacks/ and recipes/ are subpackages of
# liger_trainer, as they are in the installed wheel (see the package-dir map in pyproject.toml).
_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if _os.path.isfile(_os.path.join(_root, "pyproject.toml")) and _os.path.isdir(_os.path.join(_root, "kernels")):
    __path__.append(_root)

from liger_trainer.integration import install as _install
from liger_trainer.integration import set_stock_trainer_kernels as set_stock_trainer_kernels

_install()
