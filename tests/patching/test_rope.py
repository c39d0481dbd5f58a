"""The rotary function: found by name, proved, and called from a copy of the forward that nobody else sees."""

from __future__ import annotations

import functools
import inspect
import re

import pytest
import torch
from torch import nn

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.compat.rebound import called_global, forward_calling, rebound
from liger_trainer.patching import rotations
from liger_trainer.patching.probe import Probe
from tests.patching.comparisons import LAYERS, apply_unchanged
from tests.patching.rotary_toys import (
    Attention,
    Complex,
    ComplexColumn,
    InFloat,
    Interleaved,
    LastColumns,
    Narrow,
    OneByOne,
    OneByOneAt,
    OneByOneByPlace,
    OneByOneSwapped,
    OtherWayRound,
    Repeated,
    Sections,
    SeqFirst,
    Split,
    SwappedPairs,
    apply_rotary_complex,
    apply_rotary_pos_emb,
    calling,
)
from tests.tiny_models import TINY_MODELS, tiny_batch


def tensors(batch=2, length=5, width=8, seq_first=False, dtype=torch.float32, tables=None, shared=False):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(batch, heads, length, 8, generator=generator).to(dtype) for heads in (4, 2))
    if seq_first:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = (torch.randn(1 if shared else batch, length, width, generator=generator) for _ in range(2))
    return q, k, cos.to(tables or dtype), sin.to(tables or dtype)


@pytest.fixture
def calls(calls_of):
    """The calls of our rotation."""
    return calls_of(rotations, "rope")


def patched(module, calls):
    (row,) = apply_liger_kernel(module, LAYERS)
    assert row.kernel == "rope"
    calls.clear()
    return module


def assert_unchanged(module, arguments, calls, **options):
    """The patched module gives what the module gave, in one call of the kernel."""
    expected = module(*arguments, **options)
    torch.testing.assert_close(patched(module, calls)(*arguments, **options), expected)
    assert len(calls) == 1


@pytest.mark.parametrize(("module", "seq_first"), [(Attention(), False), (SeqFirst(), True), (InFloat(), True)])
@pytest.mark.parametrize("shared", [False, True])
def test_layouts(module, seq_first, shared, calls):
    assert_unchanged(module, tensors(seq_first=seq_first, shared=shared), calls)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("at", [{}, {"unsqueeze_dim": 1}, {"unsqueeze_dim": 2}], ids=str)
def test_one_tensor_whose_heads_are_anywhere(at, shared, calls):
    """As in Gemma 4."""
    module, (q, k, cos, sin) = OneByOneAt(), tensors(seq_first=at.get("unsqueeze_dim") == 2, shared=shared)
    q.requires_grad_(), k.requires_grad_()
    expected = module(q, k, cos, sin, **at)
    gradients = torch.autograd.grad([each.square().sum() for each in expected], (q, k))
    found = patched(module, calls)(q, k, cos, sin, **at)
    assert len(calls) == 2
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad([each.square().sum() for each in found], (q, k)), gradients)


def test_one_tensor_with_its_dimension_by_place(calls):
    assert_unchanged(OneByOneByPlace(), tensors(seq_first=True), calls)


def test_a_dimension_from_the_end_runs_the_function_itself(calls):
    module, arguments = OneByOneAt(), tensors()
    expected = module(*arguments, unsqueeze_dim=-3)
    torch.testing.assert_close(patched(module, calls)(*arguments, unsqueeze_dim=-3), expected)
    assert not calls
    with pytest.raises(TypeError, match="unsqueeze"):
        module(*arguments, unsqueeze=1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tables", [torch.float32, torch.bfloat16])
def test_one_tensor_at_a_time(shared, tables, calls):
    module, (q, k, cos, sin) = OneByOne(), tensors(shared=shared, dtype=torch.bfloat16, tables=tables)
    q.requires_grad_(), k.requires_grad_()

    def results():
        rotated = module(q, k, cos, sin)
        upstream = [tensor.detach().cos() for tensor in rotated]
        return *rotated, *torch.autograd.grad(rotated, (q, k), upstream)

    expected = results()
    patched(module, calls)
    torch.testing.assert_close(results(), expected)
    assert len(calls) == 2


def test_unsqueeze_dim_of_the_call(calls):
    assert_unchanged(Attention(), tensors(seq_first=True), calls, unsqueeze_dim=2)


def test_packed_tokens_without_a_batch(calls):
    q, k, cos, sin = tensors(batch=1, seq_first=True)
    assert_unchanged(InFloat(), (q[0], k[0], cos[0], sin[0]), calls)


def test_what_was_not_proved_runs_as_it_did(calls):
    module = patched(Attention(), calls)
    q, k, cos, sin = tensors()
    tables_of_four_dimensions = (q, k, cos.unsqueeze(1), sin.unsqueeze(1))
    keys_of_another_dtype = (q, k.double(), cos, sin)
    for arguments in (tables_of_four_dimensions, keys_of_another_dtype):
        torch.testing.assert_close(module(*arguments), apply_rotary_pos_emb(*arguments))
    assert not calls


@pytest.mark.parametrize("module", [Attention(), InFloat()])
def test_tables_of_another_dtype(module, calls):
    arguments = tensors(dtype=torch.bfloat16, tables=torch.float32, seq_first=isinstance(module, InFloat))
    assert_unchanged(module, arguments, calls)


@pytest.mark.parametrize(
    ("module", "kernel", "width"),
    [
        (Interleaved(), "rope (neighbours)", 8),
        (Repeated(), "rope (neighbours)", 8),
        (Split(), "rope (neighbours to halves)", 8),
        (Narrow(), "rope (half-width tables)", 4),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_rotations(module, kernel, width, dtype, calls):
    arguments = tensors(width=width, dtype=dtype)
    expected = module(*arguments)
    (row,) = apply_liger_kernel(module, LAYERS)
    assert row.kernel == kernel
    calls.clear()
    got = module(*arguments)
    revert_liger_kernel(module)
    assert len(calls) == 1
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("module", "shape"), [(Complex(), (2, 5, 4)), (Complex(), (1, 5, 4)), (ComplexColumn(), (5, 1, 4))]
)
def test_complex_factors(module, shape, calls_of):
    q, k, *_ = tensors(seq_first=True)
    factors = torch.randn(shape, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    expected = module(q, k, factors)
    (row,) = apply_liger_kernel(module, LAYERS)
    assert row.kernel == "rope (complex)"
    calls = calls_of(rotations, "rope_complex")
    got = module(q, k, factors)
    assert len(calls) == 1
    torch.testing.assert_close(got, expected)
    wide = factors.to(torch.complex128)  # not what was proved
    torch.testing.assert_close(module(q, k, wide), type(module)()(q, k, wide))
    assert len(calls) == 1
    revert_liger_kernel(module)


def test_real_factors_run_as_they_did():
    """Casting Llama 4's vision tower drops the imaginary part of its buffer."""
    q, k, *_ = tensors(seq_first=True)
    module, cast = ComplexColumn(), torch.randn(5, 1, 4).bfloat16()
    expected = module(q, k, cast)
    apply_liger_kernel(module, LAYERS)
    assert all(map(torch.equal, module(q, k, cast), expected))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (SwappedPairs(), "another rotation"),
        (OtherWayRound(), "another rotation"),
        (Sections(), "it also takes sections"),
        (OneByOneSwapped(), "another rotation"),
        (LastColumns(), "another rotation"),
    ],
)
def test_left_alone(module, reason):
    (row,) = apply_liger_kernel(module, LAYERS)
    assert not row.applied
    assert reason in row.reason
    assert "forward" not in module.__dict__


def test_nothing_outside_of_the_instance_changes():
    from transformers.models.llama import modeling_llama

    function, forward = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    model, other = TINY_MODELS["llama"](), TINY_MODELS["llama"]()
    apply_liger_kernel(model, LAYERS)
    attention = model.model.layers[0].self_attn
    assert modeling_llama.apply_rotary_pos_emb is function
    assert modeling_llama.LlamaAttention.forward is forward
    assert called_global(forward, "apply_rotary_pos_emb") is function
    assert "forward" not in other.model.layers[0].self_attn.__dict__
    assert called_global(attention.forward.__func__, "apply_rotary_pos_emb") is not function
    assert inspect.signature(attention.forward) == inspect.signature(other.model.layers[0].self_attn.forward)
    assert attention.forward.__func__ is model.model.layers[1].self_attn.forward.__func__


def test_later_changes_of_the_modelling_module_are_seen(calls_of):
    from transformers.models.llama import modeling_llama

    model = TINY_MODELS["llama"]()
    model.config._attn_implementation = "eager"
    apply_liger_kernel(model, LAYERS)
    called = calls_of(modeling_llama, "eager_attention_forward")
    model(input_ids=torch.tensor([[1, 2, 3]]))
    assert len(called) == len(model.model.layers)


def test_a_copy_leaves_no_name_behind():
    names = set(globals())
    copy = rebound(inspect.unwrap(Decorated.forward), {"apply_rotary_pos_emb": max})
    assert len(globals()) == len(names) + 1
    again = rebound(copy, {"apply_rotary_pos_emb": min, "Decorated": None})
    assert called_global(again, "apply_rotary_pos_emb") is min
    assert called_global(copy, "apply_rotary_pos_emb") is max
    del copy, again
    assert set(globals()) == names


def decorated(note):
    def decorate(forward):
        @functools.wraps(forward)
        def wrapper(self, *args, **kwargs):
            self.notes.append(note)
            return forward(self, *args, **kwargs)

        return wrapper

    return decorate


class Decorated(Attention):
    def __init__(self):
        super().__init__()
        self.notes = []

    @decorated("outer")
    @decorated("inner")
    @torch.no_grad()
    def forward(self, q, k, cos, sin, *, unsqueeze_dim=1):
        assert __class__ is Decorated  # a closure of its own
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def test_decorated_forward_is_rebuilt(calls):
    module = Decorated()
    arguments = tensors()
    expected = module(*arguments)
    module.notes.clear()
    got = patched(module, calls)(*arguments, unsqueeze_dim=1)
    assert len(calls) == 1
    assert module.notes == ["outer", "inner"]
    assert not got[0].requires_grad
    torch.testing.assert_close(got, expected)
    assert inspect.signature(type(module).forward) == inspect.signature(module.forward.__func__)
    revert_liger_kernel(module)
    module(*arguments)
    assert len(calls) == 1


def test_decorator_that_hides_the_call():
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)

    @functools.wraps(forward)
    def wrapper(self, *args):
        return wrapper.__wrapped__(self, *args)  # through an attribute, not through a closure over it

    assert forward_calling(wrapper, "apply_rotary_pos_emb", lambda *args: args) is None
    module_class = type("Hidden", (nn.Module,), {"forward": wrapper})
    (row,) = apply_liger_kernel(module_class(), LAYERS)
    assert "decorated in a way that hides the call" in row.reason


def test_halves_of_the_tables_may_differ():
    """The probe does not assume what a particular rotary embedding happens to make equal."""
    with Probe(torch.device("cpu")).isolated():
        _q, _k, cos, sin = rotations._tensors((4, 1, True, True), Probe(torch.device("cpu")))
    half = cos.shape[-1] // 2
    assert not torch.equal(cos[..., :half], cos[..., half:])
    assert not torch.equal(sin[..., :half], sin[..., half:])


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text", "qwen2_vl"])
def test_packed_rows_equal_separate_ones(family):
    """Positions that restart inside a row, with flash-attention's metadata among the keyword arguments."""
    model = TINY_MODELS[family]().eval()
    first, second = (tiny_batch(family, model)["input_ids"][0, a:b] for a, b in ((0, 5), (5, 12)))
    packed = torch.cat((first, second))[None]
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    # Without flash attention on this machine the blocks are kept apart by a mask; the metadata only passes through.
    mask = torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).tril().bool()
    mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
    mask = {"full_attention": mask, "sliding_attention": mask} if family == "gemma3_text" else mask
    lengths = torch.tensor([0, 5, 12], dtype=torch.int32)
    metadata = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 7, "max_length_k": 7}
    options = {"position_ids": positions, "attention_mask": mask, "use_cache": False, **metadata}
    plain = model(packed, **options).logits
    apply_liger_kernel(model, LAYERS)
    seen = []
    model.get_decoder().layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    ours = model(packed, **options).logits
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    assert all(seen[0][name] is value for name, value in metadata.items())
    separate = torch.cat([model(row[None], use_cache=False).logits for row in (first, second)], dim=1)
    torch.testing.assert_close(ours, separate, rtol=1e-4, atol=1e-4)


def test_compiled_equals_and_holds_our_operators(calls):
    torch.compiler.reset()
    model = TINY_MODELS["llama"]()
    batch = tiny_batch("llama", model)
    batch.pop("labels")
    expected = model(**batch, use_cache=False).logits
    expected.sum().backward()
    gradient = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    apply_liger_kernel(model, LAYERS)
    calls.clear()
    compiled = torch.compile(model, backend="aot_eager")
    got = compiled(**batch, use_cache=False).logits
    got.sum().backward()
    assert calls  # what was traced is ours
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.get_input_embeddings().weight.grad, gradient, rtol=1e-3, atol=1e-3)


class AsModule(nn.Module):
    """What Hugging Face's `kernels` package makes of a decorated function."""

    def forward(self, *args, **kwargs):
        return apply_rotary_pos_emb(*args, **kwargs)

    forward.__signature__ = inspect.signature(lambda self, q, k, cos, sin, unsqueeze_dim=1: None)


apply_rotary_as_module = AsModule()


def test_function_that_is_a_module(calls):
    module = calling(lambda self, q, k, cos, sin: apply_rotary_as_module(q, k, cos, sin))()
    arguments = tensors()
    expected = module(*arguments)
    torch.testing.assert_close(patched(module, calls)(*arguments), expected)
    assert len(calls) == 1


def rotate_queries_alone(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    """As Qwen4-Exp's: without keys, only the queries."""
    if k is None:
        return apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim)[0]
    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def rotation_of(function):
    """Our function for `function`."""
    probe = Probe(torch.device("cpu"))
    with probe.isolated():
        ours = rotations.prove_rotation(function, probe).forward
    assert ours is not None
    return ours


def test_our_function_has_the_signature_of_the_original(calls):
    ours = rotation_of(rotate_queries_alone)
    assert inspect.signature(ours) == inspect.signature(rotate_queries_alone)
    q, k, cos, sin = tensors()
    transposed = q.transpose(1, 2)
    for run in (
        lambda rotate: rotate(q, cos=cos, sin=sin),
        lambda rotate: rotate(q, None, cos, sin),
        lambda rotate: rotate(transposed, cos=cos, sin=sin, unsqueeze_dim=2),
        lambda rotate: rotate(q, k, cos, sin),
        lambda rotate: rotate(q, k, cos, sin, 1),
        lambda rotate: rotate(transposed, k.transpose(1, 2), cos, sin, unsqueeze_dim=2),
        lambda rotate: rotate(sin=sin, k=k, q=q, cos=cos),
    ):
        torch.testing.assert_close(run(ours), run(rotate_queries_alone))
    calls.clear()
    ours(q=q, k=k, cos=cos, sin=sin)
    assert len(calls) == 1, "by keywords too"
    for wrong in ({"q": q}, {"other": 1}):
        with pytest.raises(TypeError) as error:
            ours(q, k, cos, sin, **wrong)
        with pytest.raises(TypeError, match=re.escape(str(error.value))):
            rotate_queries_alone(q, k, cos, sin, **wrong)


def test_complex_and_single_functions_have_the_names_of_the_original():
    q, k, *_ = tensors()
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    factors = torch.polar(torch.ones(2, 5, 4), torch.arange(40.0).view(2, 5, 4))
    ours = rotation_of(apply_rotary_complex)
    assert inspect.signature(ours) == inspect.signature(apply_rotary_complex)
    expected = apply_rotary_complex(q, k, factors)
    torch.testing.assert_close(ours(freqs_cis=factors, xk=k, xq=q), expected)
    torch.testing.assert_close(ours(q, k, freqs_cis=factors), expected)

    def apply_one(x, cos, sin):
        return apply_rotary_pos_emb(x, x, cos, sin)[0]

    one = rotation_of(apply_one)
    q, _, cos, sin = tensors()
    torch.testing.assert_close(one(sin=sin, cos=cos, x=q), apply_one(q, cos, sin))


def test_qwen4_exp_trains():
    """Its indexer rotates queries without keys."""
    qwen4 = pytest.importorskip("transformers.models.qwen4_exp")
    layers = {"layer_types": ["linear_attention", "indexed_attention"], "num_hidden_layers": 2}
    linear = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
    linear |= {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
    indexer = {"n_heads": 2, "kv_heads": 1, "head_dim": 16, "budget": 4, "compress_ratio": 2}
    indexer = {f"indexer_{name}": value for name, value in indexer.items()}
    experts = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts_per_tok": 2}
    sizes = {"vocab_size": 64, "hidden_size": 32, "hc_count": 2, "hc_lowrank": 4}
    config = qwen4.Qwen4ExpTextConfig(**layers, **linear, **indexer, **experts, **heads, **sizes)
    torch.manual_seed(0)
    model = qwen4.Qwen4ExpForCausalLM(config).train()
    ids = torch.arange(3, 35).view(2, 16)
    report = apply_unchanged(model, {"input_ids": ids, "labels": ids}, tolerance=1e-4, floor=1e-10)
    assert sum(row.count for row in report.applied if row.component == "rope") == 2
