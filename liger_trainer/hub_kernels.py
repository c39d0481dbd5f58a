"""The path of our kernels for Hugging Face's `kernels` library."""

from liger_trainer.integrations.hub_kernels import folder as folder
