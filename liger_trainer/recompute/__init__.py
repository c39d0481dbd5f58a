"""Gradient checkpointing that keeps what a budget of memory allows, instead of recomputing it."""
