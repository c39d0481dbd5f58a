"""The `plan` command: reads a recipe, chooses settings that fit, and reports them.

Keys are checked as for training, but the training arguments are not built, as those of a bf16 recipe ask for a GPU.
"""
