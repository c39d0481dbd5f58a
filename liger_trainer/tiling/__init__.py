"""Linear layers and MLPs that run on a part of the tokens at a time."""
