"""What mixtures of experts need from a trainer."""
