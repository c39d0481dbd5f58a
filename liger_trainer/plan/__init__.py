"""Plans the memory of a training run from a model's configuration alone: no weights are read and none allocated."""
