"""Checkpoints: written whole, checked when resumed, one run per folder."""
