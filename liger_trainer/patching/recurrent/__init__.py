"""Layers that mix tokens by a recurrence or a short convolution: recognising, proving and replacing them."""
