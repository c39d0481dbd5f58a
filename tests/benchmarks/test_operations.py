"""Every operation runs in tiny sizes, and what its providers compute is what float64 says."""

import dataclasses
import functools
import sys
from types import SimpleNamespace

import pytest
import torch

from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.measure import Settings, run_operation
from liger_trainer.benchmarks.models import MODELS
from liger_trainer.benchmarks.operations import attention
from liger_trainer.benchmarks.records import Machine
from liger_trainer.benchmarks.registry import OPERATIONS, Data, load_operations
from liger_trainer.functional import delta_rule, short_conv
from liger_trainer.kernels.documents import documents_of
from liger_trainer.kernels.recurrence.chunked import Arguments
from liger_trainer.kernels.recurrence.chunked import chunked_recurrence as recurrence

load_operations()
CPU = Device(torch.device("cpu"))


MODEL_OF = {  # where not "tiny"
    **dict.fromkeys(("moe_experts", "moe_load_balancing"), "tiny-moe"),
    **dict.fromkeys(("delta_rule", "delta_inputs", "short_conv"), "tiny-qwen3.5"),
    "state_space": "tiny-nemotron",
    "gated_short_conv": "tiny-lfm2",
}


def run(name, providers, **changes):
    model = changes.pop("model", MODELS[MODEL_OF.get(name, "tiny")])
    tokens = changes.pop("tokens", (8,))
    settings = Settings((model,), tokens, providers, **{"dtype": torch.float32, "rounds": 1, **changes})
    complaints = []
    records = list(run_operation(OPERATIONS[name], settings, CPU, Machine("CPU", 1e10, 1e10), complaints.append))
    assert complaints == []
    return [record for group in records for record in group]


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_providers_compute_the_same(name):
    records = run(name, ("torch", "trl", "liger_trainer"))
    assert any(record.provider == "torch" for record in records)
    assert any(record.provider == "liger_trainer" for record in records)
    for record in records:
        assert record.failure == "", record
        gradients = [error for key, error in record.errors.items() if key.startswith("d")]
        assert gradients
        assert max(record.errors.values()) < 2e-5, record
        assert min(record.forward, record.backward) > 0
        assert record.both == pytest.approx(record.forward + record.backward)
        assert record.fraction_of_floor() > 0


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_operation_compares_with_torch_and_its_compiler(name):
    operation = OPERATIONS[name]
    assert {"torch", "torch.compile", "liger_trainer"} <= set(operation.providers)
    assert operation.title
    assert operation.description != operation.title


def test_torch_compile_runs():
    (record, *_) = run("swiglu", ("torch.compile",))
    assert record.failure == ""
    assert max(record.errors.values()) < 1e-6


def test_accuracy_can_be_left_out():
    (record, _) = run("rms_norm", ("torch",), accuracy=False)
    assert record.errors == {}
    assert record.both > 0


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_log_probs", "dpo_loss", "fused_grpo_loss"])
def test_a_frozen_head_gets_no_gradient(name):
    records = run(name, ("torch",))
    assert [record.variant for record in records] == ["", "frozen"]
    assert [set(record.errors) for record in records] == [{"output", "dhidden", "dweight"}, {"output", "dhidden"}]


@pytest.mark.parametrize(
    ("family", "chosen"),
    [("mixtral", 2), ("gpt-oss", 2), ("llama4", 1), ("llama4", 2), ("deepseek", 2), ("glm4.5", 2), ("qwen2", 2)],
)
def test_experts_of_other_families(family, chosen):
    """GPT-OSS has biases, transposed weights, gate and up in turns, and clamps; Llama 4's scores scale the inputs."""
    model = dataclasses.replace(
        MODELS["tiny-moe"], name=family, experts_per_token=chosen, dense_layers=1, shared_intermediate=8
    )
    model = dataclasses.replace(model, intermediate=model.expert_intermediate) if family == "llama4" else model
    records = run("moe_experts", ("torch", "transformers", "liger_trainer"), model=model)
    assert [record.variant for record in records[::3]] == ["", "frozen", "skewed"]
    for record in records:
        assert max(record.errors.values()) < 2e-5, record
        assert ("ddown_proj_bias" in record.errors) is (family == "gpt-oss" and record.variant != "frozen")


def test_experts_without_a_gate():
    """Nemotron-H: the squared ReLU of one projection."""
    records = run("moe_experts", ("torch", "transformers", "liger_trainer"), model=MODELS["tiny-nemotron"])
    for record in records:
        assert record.failure == "", record
        assert max(record.errors.values()) < 2e-5, record
        assert ("dup_proj" in record.errors) is (record.variant != "frozen")


def test_experts_are_those_of_the_model_and_in_balance():
    case, frozen, skewed = OPERATIONS["moe_experts"].cases(Data(CPU.device, torch.float32), MODELS["tiny-moe"], 512)
    index, weights = case.arguments["top_k_index"], case.arguments["top_k_weights"]
    assert (index[:, 0] != index[:, 1]).all()
    assert index.flatten().bincount(minlength=4).min() > 0.8 * 512 * 2 / 4
    torch.testing.assert_close(weights.sum(-1), torch.ones(512))
    assert skewed.arguments["top_k_index"].flatten().bincount(minlength=4).tolist() == [512, 512, 0, 0]
    needs = {name for name, value in frozen.arguments.items() if getattr(value, "requires_grad", False) is True}
    assert needs == {"hidden", "top_k_weights"}


ATTENTIONS = {
    "packed": {},
    "windows": {"sliding_window": 3},
    "soft-cap": {"sliding_window": 3, "attention_softcap": 2.0},
    "sinks": {"sliding_window": 3, "sinks": True},
}


def attention_cases(monkeypatch, more, tokens=48):
    """Three rows of 16 tokens, and one of 48."""
    monkeypatch.setattr(attention, "_ROW", 16)
    model = dataclasses.replace(MODELS["tiny"], **more)
    return list(OPERATIONS["attention"].cases(Data(CPU.device, torch.float32), model, tokens))


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention_of_every_kind(kind, monkeypatch):
    monkeypatch.setattr(attention, "_ROW", 16)
    model = dataclasses.replace(MODELS["tiny"], **ATTENTIONS[kind])
    records = run("attention", ("torch", "sdpa", "liger_trainer"), model=model, tokens=(48,))
    variants = ["", "window", "long window"] if "sliding_window" in ATTENTIONS[kind] else ["", "packed"]
    assert [record.variant for record in records if record.provider == "torch"] == variants
    for record in records:
        if record.provider == "sdpa" and (kind in ("soft-cap", "sinks") or "window" in record.variant):
            assert record.failure.startswith("ValueError: ")
            continue
        assert record.failure == "", record
        assert set(record.errors) == {"output", "dq", "dk", "dv"} | ({"dsinks"} if kind == "sinks" else set())
        assert max(record.errors.values()) < 2e-5, record


def test_attention_counts_the_pairs_that_meet(monkeypatch):
    """The floor's FLOPs are those of the mask; its offsets are where the documents begin."""
    pairs = []
    for more in ({}, {"sliding_window": 3}):
        for case in attention_cases(monkeypatch, more):
            layout = case.arguments["layout"]
            pairs.append(layout.pairs)
            assert layout.pairs == layout.batch * layout.mask.sum()
            assert case.floor.forward_flops == 4 * layout.pairs * 4 * 16
            assert case.floor.backward_flops == 2.5 * case.floor.forward_flops
            assert layout.offsets.diff().eq(layout.document).all()
            assert layout.offsets[-1] == layout.batch * layout.length
    assert pairs == [3 * 136, 16 * 6, 3 * 136, 3 * 45, 141]
    uneven = attention.Layout(2, 10, 4, 3, CPU.device, torch.float32)
    assert uneven.offsets.tolist() == [0, 4, 8, 10, 14, 18, 20]
    assert uneven.pairs == 2 * uneven.mask.sum() == 2 * (9 + 9 + 3)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_flex_attention_is_given_the_same_work(kind, monkeypatch):
    """Forward alone, and not compiled: on the CPU there is no backward."""
    for case in attention_cases(monkeypatch, ATTENTIONS[kind]):
        arguments = {
            name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in case.arguments.items()
        }
        truth = attention.exact_attention(**arguments)
        layout = arguments.pop("layout")
        found = attention.flex(**arguments, blocks=layout.blocks, softcap=layout.softcap)
        torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-5)


def test_flash_attention_is_given_the_same_work(monkeypatch):
    """By the documented meaning of its arguments: its kernel needs a GPU."""

    def one_by_one(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa):
        left, right = window_size
        assert torch.equal(cu_seq_q, cu_seq_k)
        assert max_q == max_k == cu_seq_q.diff().max()
        assert enable_gqa
        results = []
        for first, last in zip(cu_seq_q.tolist(), cu_seq_q[1:].tolist()):
            place = torch.arange(last - first)
            ahead = place - place[:, None]
            seen = (ahead <= right) & (ahead >= -left if left >= 0 else True)
            q, k, v = (tensor[first:last].transpose(0, 1) for tensor in (query, key, value))
            found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
            results.append(found.transpose(0, 1))
        return torch.cat(results)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", one_by_one)
    for more in ({}, {"sliding_window": 3}):
        for case in attention_cases(monkeypatch, more):
            truth = attention.exact_attention(**case.arguments)
            torch.testing.assert_close(attention.torch_flash(**case.arguments), truth, atol=1e-5, rtol=1e-5)


def test_a_model_without_experts_is_reported():
    complaints = []
    settings = Settings((MODELS["tiny"],), (8,), rounds=1)
    machine = Machine("CPU", 1e10, 1e10)
    assert list(run_operation(OPERATIONS["moe_experts"], settings, CPU, machine, complaints.append)) == []
    assert complaints == ["moe_experts, tiny: the model has no such layer"]


def test_floor_counts_bytes_at_the_copy_rate():
    (record, _) = run("rms_norm", ("torch",), dtype=torch.bfloat16)
    numbers = 8 * 64
    assert record.forward_floor == pytest.approx(2 * numbers * 2 / 1e10 * 1e3)
    assert record.backward_floor == pytest.approx(3 * numbers * 2 / 1e10 * 1e3)
    assert record.floor == pytest.approx(record.forward_floor + record.backward_floor)


def test_floor_counts_flops_at_the_rate_of_matmuls_where_they_take_longer():
    (record, _) = run("attention", ("torch",), dtype=torch.bfloat16)
    flops = 4 * (8 * 9 / 2) * 4 * 16
    assert record.forward_floor == pytest.approx(flops / 1e10 * 1e3)
    assert record.backward_floor == pytest.approx(2.5 * flops / 1e10 * 1e3)


def test_half_precision_is_compared_with_eager():
    records = run("linear_cross_entropy", ("torch", "liger_trainer"), dtype=torch.bfloat16)
    for record in records:
        assert 1e-4 < record.gradient_error() < 2e-2
        assert 0.5 < record.worse_than_eager < 2


@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_model_has_every_case(model, monkeypatch):
    """Shapes alone: the numbers are made on the meta device."""
    monkeypatch.setattr(torch, "Generator", FakeGenerator)
    monkeypatch.setattr(torch, "randn", lambda shape, generator=None, **others: torch.empty(shape, **others))
    monkeypatch.setattr(
        torch, "randint", lambda high, shape, generator=None, **others: torch.empty(shape, dtype=torch.long, **others)
    )
    for operation in OPERATIONS.values():
        cases = operation.cases(Data(torch.device("meta"), torch.bfloat16), MODELS[model], operation.tokens)
        for case in cases:
            assert case.shape
            assert case.floor.matmuls is not None or case.floor.forward > 0 < case.floor.backward


class FakeGenerator:
    def __init__(self, device):
        pass

    def manual_seed(self, seed):
        return self


def test_packages_for_recurrences_are_given_the_same_work(monkeypatch):
    """By the documented meaning of their arguments, from our references: their kernels need a GPU."""

    def fla(function, *tensors, cu_seqlens=None, **options):
        if cu_seqlens is None:
            return function(*tensors, **options), None
        assert all(len(tensor) == 1 for tensor in tensors)
        places = list(zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist()))
        assert places[-1][1] == tensors[0].shape[1]
        found = [function(*(tensor[:, a:b] for tensor in tensors), **options) for a, b in places]
        return torch.cat(found, dim=1), None

    def simple_gla(q, k, v, g=None, g_gamma=None, *, scale):
        g = g_gamma.expand(v.shape[:3]) if g is None else g
        return recurrence(Arguments(q, k, v, g.float()), scale, False, documents_of_rows(v))[0]

    def documents_of_rows(x):
        return documents_of([x.shape[1]] * x.shape[0])

    def conv(x, weight, bias=None, *, activation=None, cu_seqlens=None):
        def one(x):
            return short_conv(x, weight, bias, activation=activation)

        return fla(one, x, cu_seqlens=cu_seqlens)

    def modules(**functions):
        for path, values in functions.items():
            monkeypatch.setitem(sys.modules, path.replace("__", "."), SimpleNamespace(**values))

    modules(
        fla={},
        fla__ops={},
        fla__ops__gated_delta_rule={"chunk_gated_delta_rule": functools.partial(fla, delta_rule)},
        fla__ops__simple_gla={"chunk_simple_gla": functools.partial(fla, simple_gla)},
        fla__modules={},
        fla__modules__causal_conv1d={"causal_conv1d": conv},
        fla__modules__norm={},
        fla__modules__norm__l2norm={"l2norm": lambda x, eps=1e-6: x * torch.rsqrt(x.square().sum(-1, True) + eps)},
    )
    for name in ("delta_rule", "state_space", "decayed_attention", "short_conv", "gated_short_conv", "delta_inputs"):
        records = run(name, ("flash-linear-attention",), tokens=(24,))
        assert [record.variant for record in records] == ["", "packed"]
        for record in records:
            assert record.failure == "", record
            assert max(record.errors.values()) < 2e-5, record


def test_packed_documents_do_not_see_each_other():
    """In the case itself: with rows of 24 tokens a document has 6."""
    cases = OPERATIONS["delta_rule"].cases(Data(CPU.device, torch.float32), MODELS["tiny-qwen3.5"], 24)
    row, packed = cases
    assert packed.shape.endswith("documents of 6")
    assert packed.arguments["documents"].spans[:, :2].tolist() == [[0, 6], [6, 6], [12, 6], [18, 6]]
    with torch.no_grad():
        rows, documents = (OPERATIONS["delta_rule"].exact()(**case.arguments) for case in (row, packed))
        alone = OPERATIONS["delta_rule"].exact()(**{**packed.arguments, "documents": row.arguments["documents"]})
    torch.testing.assert_close(documents[:, :6], alone[:, :6])
    assert not torch.allclose(documents[:, 6:], alone[:, 6:])
    assert rows.shape == documents.shape
