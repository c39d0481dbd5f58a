"""Finds the silent traps of a model or a recipe before a run: mistakes with which training ends well and teaches wrong.

- `case`: what is checked, and what a check finds, or that it could not look
- `settings`: checks of the keys and the configuration
- `sample`: the first rows of the data, as the trainer and its collator make them
- `labels`: checks of these rows
- `diagnose`: all checks, and what they found
"""
