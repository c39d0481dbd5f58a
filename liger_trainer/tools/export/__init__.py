"""What follows a training run: its model loaded again, and its adapters merged into their base."""
