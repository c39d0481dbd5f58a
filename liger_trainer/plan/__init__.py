"""Plans the memory of a training run from a model's configuration alone: no weights are read and none allocated.

`parameters` and `work` read a model on the meta device. `activations`, `work` and `splitting` have the formulas of a
layer, of the head, and of what one GPU holds; `estimate` puts them together for each moment of
a step. `settings` lists the ways to run, and `running` reads a trainer. Recipes are read in `tools/planning`.
"""
