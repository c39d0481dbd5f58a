"""What mixtures of experts ask of a trainer."""
