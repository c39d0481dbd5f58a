"""Losses of alignment over a head that is not applied before; `liger_trainer.losses` has their names."""
