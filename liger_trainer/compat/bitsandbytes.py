"""Names of bitsandbytes, which is optional: they are checked where weights in 4 bits are read."""

from __future__ import annotations

from liger_trainer.compat.private import Feature, Private

_STATE = Private(
    "bitsandbytes.functional:QuantState.__init__",
    uses="absmax, code, shape, dtype, blocksize, quant_type, offset, state2, nested",
)

QUANTISED_EXPERTS = Feature(
    "experts in 4 bits",
    _STATE,
    Private("bitsandbytes.functional:quantize_4bit", "A, absmax, out, blocksize, compress_statistics, quant_type, ..."),
)

FOUR_BIT_LAYERS = Feature(
    "LoRA layers on a base layer in 4 bits",
    _STATE,
    Private("bitsandbytes.nn.modules:Linear4bit.__init__", uses="Params4bit, compute_dtype, quant_state"),
    Private("bitsandbytes.nn.modules:Linear4bit.forward", uses="packing_format_for_cpu"),
    Private(
        "bitsandbytes.nn.modules:Params4bit.__new__", uses="quant_state, quant_type, blocksize, compress_statistics"
    ),
    Private("bitsandbytes.functional:dequantize_4bit", "A, quant_state, ..."),
)
