"""The trainers of transformers and TRL with the kernels."""
