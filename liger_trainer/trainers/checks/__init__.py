"""Checks of what a trainer is given."""
