"""What follows a training run: its model loaded again, and its adapters merged into their base.

`saved_run` finds the model or the adapters in a folder and loads them with their base; every tensor of the adapters
must find its place. `merging` lets PEFT merge in fp32 and says how far logits may be apart, `fp8_blocks` quantises what
was merged again and measures what is lost, `expert_adapters` takes adapters on stacked experts apart, `conversation`
is the chat without its terminal. A folder is written beside its place, and gets its name at the end (`folders`).
"""
