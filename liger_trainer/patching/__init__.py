"""Kernels put into a model's instances, proved equal first, and taken out again."""
