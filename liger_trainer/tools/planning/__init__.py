"""The `plan` command: reads a recipe, chooses settings that fit, and reports them."""
