"""The operators as plain functions, the way `torch.nn.functional` offers its own."""
