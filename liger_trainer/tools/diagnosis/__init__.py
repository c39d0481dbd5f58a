"""Finds the silent traps of a model or a recipe before a run: mistakes with which training ends well and teaches wrong.

- `settings`: checks of the keys and the configuration
- `hybrids`: checks of layers with a state, and of what adapters reach
- `sample`: what is checked, with the first rows of the data as the trainer and its collator make them, and what a check
  finds, or that it could not look
- `labels`: checks of these rows
- `diagnose`: all checks, and what they found
"""
