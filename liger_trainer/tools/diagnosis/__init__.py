"""Finds the silent traps of a model or a recipe before a run: mistakes with which training ends well and teaches wrong.

- `trap`: what a check finds, and how it says that it could not look
- `case`: what is checked: the keys of a recipe, and the configuration of its model
- `rates`, `adapters`, `packing`, `sampling`, `fp8`: checks of the keys and the configuration
- `sample`: the first rows of the data, as the trainer and its collator make them
- `labels`, `ends`: checks of these rows
- `diagnose`: all checks, and what they found
"""
