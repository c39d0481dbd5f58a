"""Liger's modules and losses; `liger_trainer.nn` has their names."""
