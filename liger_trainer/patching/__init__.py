"""Kernels in a model: find what they fit, prove them equal, bind them to the instances, report.

- find: one module for each kind of layer (`norms`, `rope`, `mlps`, `attention`, `head`, `fp8`, `lora`, `moe`),
  whose `find_*` function gives a finding (`report`) on a module of the model;
- prove: the original forward and ours on small random tensors (`probe`);
- bind: our forward to the instance, so that it can be undone (`binding`);
- report: what was bound, and why the rest was left alone (`report`).

`apply` does all four for a model.
"""
