"""Operators that Liger and QuACK offer and no trainer here runs."""
