"""Our attention in transformers' registries: plans in place of masks (`masks.py`), and their use (`interface.py`)."""
