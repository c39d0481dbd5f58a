"""MLPs that run on one tile of the tokens at a time."""
