"""``liger-trainer compare``: the stock trainer against ours, on the same weights and data.

`request` says what is compared, `results` runs each `side` in a process of its own and writes down what `verdict` says
of their measures.
"""
