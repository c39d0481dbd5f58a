"""Plug-ins for other fine-tuning frameworks, one file a framework: `docs/guides/frameworks.md` says how to use each.

The framework imports its plug-in by name, and no other. A plug-in calls [`liger_trainer.apply_liger_kernel`] where the
framework has built its model. None imports TRL or a trainer of this package: frameworks pin other versions.
"""
