"""What follows a training run: its model loaded again, and its adapters merged into their base.

`saved_run` finds the model or the adapters in a folder and loads them with their base; every tensor of the adapters
must find its place. `merging` lets PEFT merge in fp32 and says how far logits may be apart, `gguf` converts, and
`conversation` is the chat without its terminal. A model is written beside its folder, and gets its name after the
proof.
"""
