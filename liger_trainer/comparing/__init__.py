"""``liger-trainer compare``: the stock trainer against ours, on the same weights and data."""
