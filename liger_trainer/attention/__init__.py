"""Our attention in transformers' registries: what runs (`interface.py`), by plans in place of masks (`masks.py`)."""
