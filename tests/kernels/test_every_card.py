"""Every Triton kernel, compiled ahead of time for NVIDIA's cards from Turing on, with the sizes of real models.

A card compiles what it is launched with: its own tiles, in fp16 and in bf16, which Turing has not.
"""

import importlib
import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from triton.runtime.jit import JITFunction

import liger_trainer
from liger_trainer import functional as ops
from liger_trainer.kernels.attention.attention import attention
from liger_trainer.kernels.attention.plan import AttentionPlan
from liger_trainer.kernels.attention.selection import select
from liger_trainer.optim import LigerAdamW
from tests.aot import CARDS, compile_launch, launches_on
from tests.operators import OPERATORS, VARIANTS, Operator, ids, labels, leaf, table

TOKENS, WIDTH, INNER, VOCAB, EXPERTS, RANK = 4, 4096, 6144, 32000, 4, 64
BEFORE_FP8 = ("sm_75", "sm_80", "sm_86")
OF_FP8 = "_cast_"  # the casts to e4m3, which run from sm_90 on
ROOT = Path(liger_trainer.__file__).parent
ELSEWHERE = {
    "_weight_gradient_kernel": "runs on Hopper and Blackwell alone: tests/kernels/head/test_weight_gradient.py",
    "_cast_kernel": "writes operands in fp8, from Hopper on: tests/kernels/fp8/test_producers.py",
    "_cast_groups_kernel": "writes operands in fp8, from Hopper on: tests/kernels/fp8/test_blocks.py",
    "_repeat_kernel": "runs beside torch's grouped matmul, on Hopper and Blackwell alone",
    "_add_kernel": "runs beside torch's grouped matmul, on Hopper and Blackwell alone",
}


def _attention(heads, kv_heads, dim, window=16, softcap=None, bits=None):
    arguments = (leaf(1, 64, heads, dim), leaf(1, 64, kv_heads, dim), leaf(1, 64, kv_heads, dim))
    offsets = torch.tensor([0, 40, 64], dtype=torch.int32)
    return Operator(partial(attention, plan=AttentionPlan(window, offsets, 40, bits=bits), softcap=softcap), arguments)


def _delta_rule(key_heads, heads, rows, columns, *by_channel):
    gates = leaf(1, 64, heads, *by_channel), leaf(1, 64, heads)
    keys = leaf(1, 64, key_heads, rows)
    return _real("delta_rule", keys, keys, leaf(1, 64, heads, columns), *gates)


def _selection(q, k, weights):
    """An indexer's keys; its operator has no gradient."""
    select(AttentionPlan(0, None, 64), q, k, weights.float(), 0.1, 16)
    return (q * k[:, :, None]).sum(-1) * weights


def _step(*weights):
    """A step of the optimizer on weights of bf16 and fp32, as an operator that has no gradient."""
    parameters = [torch.nn.Parameter(weight.detach().to(dtype)) for weight in weights for dtype in _TRAINED]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    LigerAdamW(parameters).step()
    return weights[0] * 1.0


def _experts(hidden, weights, *parameters, **options):
    index = torch.arange(2 * len(hidden)).view(-1, 2) % EXPERTS
    named = {}
    if len(parameters) > 2:
        named = {"gate_up_adapters": [ops.ExpertLoRA(*parameters[2:4], 0.5)]}
        named["down_adapters"] = [ops.ExpertLoRA(*parameters[4:6], 0.5)]
    return ops.moe_experts(hidden, index, weights, *parameters[:2], **named, **options)


def _routed(tokens):
    return leaf(tokens, 1024), leaf(tokens, 2), leaf(EXPERTS, 1536, 1024), leaf(EXPERTS, 1024, 768)


_BITS = torch.zeros(2, 64, dtype=torch.int32)
_TRAINED = (torch.bfloat16, torch.float32)
_HEAD = (leaf(TOKENS, 1024), leaf(VOCAB, 1024), labels(VOCAB, TOKENS))
_WIDE = (table(INNER, WIDTH), leaf(RANK, WIDTH), leaf(INNER, RANK))
_NARROW = (table(WIDTH, INNER), leaf(RANK, INNER), leaf(WIDTH, RANK))
_ADAPTERS = (leaf(EXPERTS, 64, 1024), leaf(EXPERTS, 1536, 64), leaf(EXPERTS, 64, 768), leaf(EXPERTS, 1024, 64))


def _real(name, *sizes):
    """The row of `OPERATORS` with other sizes."""
    row = OPERATORS[name]
    return Operator(row.function, sizes)


_ROWS, _COLUMN = leaf(TOKENS, WIDTH), leaf(WIDTH)
_Q_K = (leaf(1, 64, 8, 128), leaf(1, 64, 2, 128))
CASES = {
    "rms_norm": _real("rms_norm", _ROWS, _COLUMN),
    "rms_norm, longest": _real("rms_norm", leaf(2, 65536), leaf(65536)),
    "fused_add_rms_norm": _real("fused_add_rms_norm", _ROWS, _ROWS, _COLUMN),
    "layer_norm": _real("layer_norm", _ROWS, _COLUMN, _COLUMN),
    "gated_rms_norm": _real("gated_rms_norm", _ROWS, _ROWS, _COLUMN),
    "modulated_rms_norm": _real("modulated_rms_norm", leaf(2, TOKENS, WIDTH), _COLUMN, leaf(2, WIDTH), leaf(2, WIDTH)),
    "group_norm": _real("group_norm", leaf(2, 128, 4096), leaf(128), leaf(128)),
    "poly_norm": _real("poly_norm", _ROWS, leaf(3), leaf(1)),
    "dyt": _real("dyt", _ROWS, leaf(1), _COLUMN, _COLUMN),
    "short_conv": _real("short_conv", leaf(1, TOKENS, 8192), leaf(8192, 4), leaf(8192)),
    "short_conv, documents": VARIANTS["short_conv, documents"],
    "gated_short_conv": _real("gated_short_conv", leaf(1, TOKENS, 6144), leaf(2048, 3)),
    "delta_inputs": Operator(
        partial(ops.delta_inputs, key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        (leaf(1, TOKENS, 8192), leaf(8192, 4)),
    ),
    "delta_gates": _real("delta_gates", leaf(1, TOKENS, 32), leaf(1, TOKENS, 32), leaf(32), leaf(32)),
    "rope": Operator(ops.rope, (leaf(1, 8, 64, 128), leaf(1, 2, 64, 128), table(1, 64, 128), table(1, 64, 128))),
    "rope, last columns": Operator(
        partial(ops.rope, first=128), (leaf(1, 128, 64, 192), leaf(1, 0, 64, 192), table(1, 64, 64), table(1, 64, 64))
    ),
    "expand_keys": Operator(partial(ops.expand_keys, nope=192), (leaf(1, 64, 20, 448), leaf(1, 64, 64))),
    "qk_norm_rope": _real("qk_norm_rope", *_Q_K, leaf(128), leaf(128), table(1, 64, 128), table(1, 64, 128)),
    "rope_complex": _real("rope_complex", *_Q_K, lambda generator, dtype: torch.rand(1, 64, 64, generator=generator)),
    "swiglu": _real("swiglu", leaf(TOKENS, INNER), leaf(TOKENS, INNER)),
    "clamped_swiglu": _real("clamped_swiglu", leaf(TOKENS, 2 * INNER)),
    "relu_squared": _real("relu_squared", leaf(TOKENS, INNER)),
    "softmax": _real("softmax", leaf(TOKENS, 8192)),
    "softmax, long rows": _real("softmax", leaf(2, 131072)),
    "sparsemax": _real("sparsemax", leaf(TOKENS, 8192)),
    "cross_entropy": _real("cross_entropy, none", leaf(TOKENS, VOCAB), labels(VOCAB, TOKENS)),
    "linear_cross_entropy": _real("linear_cross_entropy", *_HEAD),
    "linear_log_probs": _real("linear_log_probs, chunks", *_HEAD),
    "linear_jsd": _real("linear_jsd", *_HEAD[:2], table(TOKENS, 1024), table(VOCAB, 1024), _HEAD[2]),
    "kl_div": _real("kl_div", leaf(TOKENS, VOCAB), table(TOKENS, VOCAB)),
    "jsd": _real("jsd", leaf(TOKENS, VOCAB), table(TOKENS, VOCAB)),
    "tvd": _real("tvd", leaf(TOKENS, VOCAB), table(TOKENS, VOCAB)),
    "fused_ce_tvd": _real("fused_ce_tvd", leaf(TOKENS, VOCAB), table(TOKENS, VOCAB), labels(VOCAB, TOKENS)),
    "embedding": _real("embedding", ids(VOCAB, TOKENS), leaf(VOCAB, 1024)),
    "copied_rows": VARIANTS["copied_rows"],
    "causal_softmax": VARIANTS["causal_softmax"],
    "lora_mlp": _real("lora_mlp", leaf(TOKENS, WIDTH), *_WIDE, *_WIDE, *_NARROW),
    "nf4_dequantize": OPERATORS["nf4_dequantize"],
    "decode": VARIANTS["decode"],
    "fp8_linear": VARIANTS["fp8_linear, rowwise_gw_hp"],
    "fp8_linear, tensorwise": VARIANTS["fp8_linear, tensorwise"],
    "lora_mlp, fp8": OPERATORS["lora_mlp, fp8"],
    "topk_softmax_routing": _real("topk_softmax_routing", leaf(TOKENS, 128)),
    "grouped_topk_sigmoid_routing": _real("grouped_topk_sigmoid_routing", leaf(TOKENS, 256), table(256)),
    "sort_by_expert": OPERATORS["sort_by_expert"],
    "tile_table": OPERATORS["tile_table"],
    "moe_experts": Operator(_experts, _routed(8)),
    "moe_experts, many rows": Operator(_experts, _routed(512)),
    "moe_experts, adapters": Operator(_experts, (*_routed(512), *_ADAPTERS)),
    "router_losses": _real("router_losses", leaf(TOKENS, 128), table(2, TOKENS // 2)),
    "attention, 64": _attention(8, 2, 64),
    "attention, 128": _attention(8, 2, 128, softcap=30.0),
    "attention, 256": _attention(8, 2, 256, softcap=30.0),
    "attention, 512": _attention(8, 2, 512, softcap=30.0),
    "attention, selected keys, 64": _attention(4, 4, 64, window=0, bits=_BITS),
    "attention, selected keys, 256": _attention(4, 4, 256, window=0, bits=_BITS),
    "select": Operator(_selection, (leaf(1, 64, 32, 128), leaf(1, 64, 128), leaf(1, 64, 32))),
    "delta_rule": _delta_rule(2, 4, 128, 128),
    "delta_rule, 96 and 192": _delta_rule(2, 2, 96, 192),
    "delta_rule, 256": _delta_rule(1, 1, 256, 256),
    "delta_rule, by channel": _delta_rule(2, 2, 128, 128, 128),
    "state_space": Operator(
        lambda x, dt, A, B, C, D: ops.state_space(x, dt, -A.square(), B, C, D=D),
        (leaf(1, 64, 32, 64), leaf(1, 64, 32), leaf(32), leaf(1, 64, 1, 128), leaf(1, 64, 1, 128), leaf(32)),
    ),
    "decayed_attention": _real(
        "decayed_attention", leaf(1, 64, 2, 128), leaf(1, 64, 2, 128), leaf(1, 64, 2, 128), table(2)
    ),
    "LigerAdamW": Operator(_step, (leaf(512, 512),)),
}


ALIKE = {"sm_86": "sm_80", "sm_89": "sm_80"}
"""Cards for which Triton makes of a launch what it makes for another, but for casts to e4m3."""
COMPILED = [*dict.fromkeys(ALIKE.get(card, card) for card in CARDS)]
CELLS = [
    (name, card, "float16" if card == "sm_75" or (row + COMPILED.index(ALIKE.get(card, card))) % 2 else "bfloat16")
    for row, name in enumerate(CASES)
    for card in CARDS
]
"""Every case on every card, in fp16 and bf16 by turns. Each dtype meets every card that has it, and every case: tiles
and shared memory are those of 16 bits, whichever they are, and a compilation takes seconds."""


def launches_of(name, card, dtype):
    """The launches of a case on a card, one of each kind."""
    operator = CASES[name]
    with launches_on(card) as launches:
        operator(*operator.tensors("cpu", dtype))
    return [launch for launch in launches if not (card in BEFORE_FP8 and launch.kernel.__name__.startswith(OF_FP8))]


def test_every_kernel_has_a_case():
    """Of those that an operator launches; the others are functions of kernels."""
    folders = ROOT / "kernels", ROOT / "liger" / "operators"
    files = [file.relative_to(ROOT).with_suffix("") for folder in folders for file in folder.rglob("*.py")]
    names = [".".join(("liger_trainer", *file.parts)) for file in files if "gluon" not in file.name]
    modules = [importlib.import_module(name.removesuffix(".__init__")) for name in names]
    kernels = {
        value.__name__
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel") and value.module == module.__name__
    }
    launched = {launch.kernel.__name__ for name in CASES for launch in launches_of(name, "sm_90", torch.bfloat16)}
    assert kernels - launched == ELSEWHERE.keys()


def test_every_pair_is_compiled():
    pairs = {pair for cell in CELLS for pair in itertools.combinations(cell, 2)}
    assert pairs >= {*itertools.product(CASES, CARDS), *itertools.product(CASES, ("float16", "bfloat16"))}
    assert pairs >= {*itertools.product(CARDS, ("float16", "bfloat16"))} - {("sm_75", "bfloat16")}


def test_both_halves_take_the_same_shared_memory():
    sizes = [
        [compile_launch(launch, "sm_80").metadata.shared for launch in launches_of("attention, 64", "sm_80", dtype)]
        for dtype in (torch.float16, torch.bfloat16)
    ]
    assert sizes[0] == sizes[1]
    assert all(sizes[0])


@pytest.mark.parametrize(("card", "other"), ALIKE.items())
def test_cards_of_a_generation_are_compiled_for_alike(card, other):
    launch = launches_of("attention, 64", card, torch.float16)[0]
    one, two = (compile_launch(launch, each) for each in (card, other))
    assert one.metadata.shared == two.metadata.shared > 0
    assert _without_places(one).replace(f"cuda:{card[3:]}", f"cuda:{other[3:]}") == _without_places(two)


def _without_places(compiled):
    """The code without the lines of the source, which another checkout with the same cache has at another place."""
    return "\n".join(line for line in compiled.asm["ttgir"].splitlines() if not line.startswith("#loc"))


def _by_turns(name, card, dtype):
    """A cell; those of most cards take long, so that all are compiled before a release, and one of a case always."""
    turn = [*CARDS][[*CASES].index(name) % len(CARDS)]
    marks = [] if card == turn else [pytest.mark.long]
    return pytest.param(name, card, dtype, marks=marks)


@pytest.mark.parametrize(("name", "card", "dtype"), [_by_turns(*cell) for cell in CELLS])
def test_compiles_within_the_shared_memory(name, card, dtype):
    limit = CARDS[card][1] * 1024
    for launch in launches_of(name, card, getattr(torch, dtype)):
        target = card if launch.kernel.__name__.startswith(OF_FP8) else ALIKE.get(card, card)
        assert compile_launch(launch, target).metadata.shared <= limit, launch.kernel.__name__


@pytest.mark.parametrize("card", CARDS)
def test_wide_heads_are_ours_where_they_fit(card):
    names = {launch.kernel.__name__ for launch in launches_of("attention, 512", card, torch.float16)}
    assert ("query_gradients_kernel" in names) == (CARDS[card][1] >= 99)


@pytest.mark.long
@pytest.mark.parametrize("name", [*OPERATORS, *VARIANTS])
def test_every_operator_compiles_for_turing(name):
    """With small arguments, but every option; bf16, which some of them ask for, is emulated."""
    operator = {**OPERATORS, **VARIANTS}[name]
    with launches_on("sm_75") as launches:
        operator(*operator.tensors("cpu", torch.float16))
    for launch in launches:
        if not launch.kernel.__name__.startswith(OF_FP8):
            assert compile_launch(launch, "sm_75")
