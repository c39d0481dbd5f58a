"""Decoder layers in training that run from CUDA graphs: two launches a layer and pass in place of hundreds.

1. Recognise (`calls`): what a layer is called with besides its hidden states, and what it was when it was captured.
2. Capture (`capture`): the launches of its forward and of its backward, in one pool of memory.
3. Prove and replay (`layers`): a graph runs in training once its results were those of the layer itself.

A graph reads and writes fixed memory. So each call copies what it is given to there, and the results from there.
"""
