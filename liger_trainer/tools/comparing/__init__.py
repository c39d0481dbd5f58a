"""``liger-trainer compare``: the stock trainer against ours, on the same weights and data.

`request` says what is compared, `results` runs each `side` in a process of its own, compares what they measured, and
writes it down.
"""
