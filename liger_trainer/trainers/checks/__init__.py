"""Checks of what a trainer is given, and errors that say what to do."""
