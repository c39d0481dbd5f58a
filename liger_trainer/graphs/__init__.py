"""Decoder layers that run from CUDA graphs in training: one graph launch per layer and pass instead of hundreds.

1. Recognise a call (`calls`): its arguments besides the hidden states, and the layer's state when it was captured.
2. Choose calls (`known_calls`): kinds that come often, and for which the host takes longer than the device.
3. Capture (`capture`): the launches of a layer's forward and of its backward, in pools of memory for all layers.
4. Prove and replay (`layers`): a graph runs in training once its results have matched those of the layer itself.

`captured` does this for the layers of a model. A graph reads and writes fixed memory (`memory`), so each call copies
its inputs there, and its results from there.
"""
