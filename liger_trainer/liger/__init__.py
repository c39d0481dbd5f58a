"""Liger's names for what this package has; see docs/liger.md."""
