"""``liger-trainer compare``: the stock trainer against ours, on the same weights and data.

`request` says what is compared, `processes` runs each `side` in a process of its own, `verdict` compares what they
measured, and `results` writes it down.
"""
