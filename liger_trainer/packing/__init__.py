"""Rows without padding in place of a padded batch: `layout.py` says what they hold, `packed_row.py` makes them."""
