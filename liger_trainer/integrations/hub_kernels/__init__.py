"""Our kernels as a local kernel of Hugging Face's `kernels` library, for models with `use_kernels`.

The library imports this folder under the name in `metadata.json`, and takes the classes of `layers`.
"""

from pathlib import Path

from liger_trainer.integrations.hub_kernels import layers

__all__ = ["folder", "layers"]


def folder() -> str:
    """The path of this folder, for ``KernelConfig({"RMSNorm": f"{folder()}:RMSNorm"}, use_local_kernel=True)``."""
    return str(Path(__file__).parent)
