"""Layers that run from graphs have the results of those that do not, bit for bit, and no graph is stale."""

import collections
import contextlib
import copy
import functools
import gc
import itertools
import types
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_trainer.graphs.captured import CapturedLayers
from liger_trainer.graphs.layers import LayerGraphs
from liger_trainer.graphs.memory import Buffers
from liger_trainer.kernels.attention.attention import attention
from liger_trainer.kernels.attention.plan import AttentionPlan
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.recompute.keeping import Replaced, is_reentrant
from tests.graphs.recorded import RecordedCaptures, Recorder


def tiny(lora=False, checkpointed=False, dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).train()
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_liger_kernel(model)
    return model


def ids(seed, rows=2, length=7):
    return torch.randint(0, 32, (rows, length), generator=torch.Generator().manual_seed(seed))


def step(model, batch, captured=None):
    if captured is None:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    else:
        with captured.attached(model):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    return loss.detach()


def gradients(model):
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_same(model, other):
    one, two = gradients(model), gradients(other)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def assert_same_steps(model, other, captured, batches):
    """The same losses with graphs and without, and the same gradients, which are summed up over the steps."""
    for batch in batches:
        assert torch.equal(step(model, batch, captured), step(other, batch))
        assert_same(model, other)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_have_the_same_bits(checkpointed, lora, dtype):
    model = tiny(lora, checkpointed, dtype)
    other = copy.deepcopy(model)
    captured = CapturedLayers(RecordedCaptures())
    assert_same_steps(model, other, captured, map(ids, range(6)))
    assert captured.captured == 3
    assert not captured.reasons


def test_nothing_as_large_as_a_result_waits_for_the_backward_of_a_checkpoint(monkeypatch):
    """All layers are captured in the forward: the memory of the graphs would have a result of each."""
    sizes, native = [], LayerGraphs._write_results

    def watched(graphs):
        native(graphs)
        sizes.extend(each.untyped_storage().nbytes() for each in graphs._recorded[1])

    monkeypatch.setattr(LayerGraphs, "_write_results", watched)
    model, captured = tiny(lora=True, checkpointed=True), CapturedLayers(RecordedCaptures())
    for number in range(3):
        step(model, ids(number), captured)
    assert captured.captured == 3
    assert len(sizes) == 3
    assert {*sizes} == {4}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("of", ["adapters", "attention"])
def test_dropout_draws_the_numbers_that_it_draws_without_graphs(of, checkpointed):
    model = tiny(False, checkpointed)
    if of == "adapters":
        config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.3)
        model = get_peft_model(model, config).train()
    else:
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
    other = copy.deepcopy(model)
    captured = CapturedLayers(RecordedCaptures())
    losses = []
    for number in range(8):
        results = []
        for each, graphs in ((model, captured), (other, None)):
            torch.manual_seed(number)
            results.append((step(each, ids(1), graphs), torch.rand(3)))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert_same(model, other)
        losses.append(float(results[0][0]))
    assert captured.captured == 3, captured.reasons
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_of_several_forwards_before_a_backward(checkpointed):
    model = tiny(False, checkpointed)
    model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, lora_dropout=0.3)).train()
    other = copy.deepcopy(model)
    captured = CapturedLayers(RecordedCaptures())
    for number in range(6):
        for each, graphs in ((model, captured), (other, None)):
            torch.manual_seed(number)
            losses = []
            for part in range(2):
                with graphs.attached(each) if graphs else contextlib.nullcontext():
                    losses.append(each(input_ids=ids(part), labels=ids(part), use_cache=False).loss)
            (losses[0] - 0.3 * losses[1]).backward()
        assert_same(model, other)
    assert captured.captured == 3, captured.reasons


def swap_storage(model):
    weight = model.get_submodule("model.layers.1.mlp.down_proj").weight
    weight.data = weight.data.clone() * 2


def replace_module(model):
    torch.manual_seed(5)
    old = model.model.layers[1].mlp.down_proj
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(old.in_features, old.out_features, bias=False)


def freeze(model):
    model.model.layers[1].mlp.down_proj.weight.requires_grad_(False)


def other_attribute(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 2)


def gradient_hook(model):
    model.model.layers[1].mlp.down_proj.weight.register_hook(lambda gradient: gradient * 3)


def other_scaling(model):
    model.base_model.model.model.layers[1].mlp.down_proj.scaling["default"] *= 3


def merged_adapter(model):
    model.base_model.model.model.layers[1].mlp.down_proj.merge()


def own_forward(model):
    layer = model.model.layers[1]
    layer.forward = types.MethodType(lambda self, hidden, *args, **kwargs: hidden * 2, layer)


def other_class(model):
    mlp = model.model.layers[1].mlp
    mlp.__class__ = type("Doubling", (type(mlp),), {"forward": lambda self, hidden: hidden * 2})


def transpose(model):
    weight = model.model.layers[1].self_attn.q_proj.weight
    weight.data = weight.data.t()


def other_adapter(model):
    torch.manual_seed(6)
    model.add_adapter("second", LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    model.set_adapter("second")


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        *(swap_storage, replace_module, freeze, other_attribute, hook, gradient_hook, other_scaling, other_adapter),
        *(merged_adapter, own_forward, other_class, transpose),
    ],
)
def test_what_changes_is_seen(change, checkpointed):
    model = tiny("scaling" in change.__name__ or "adapter" in change.__name__, checkpointed)
    other = copy.deepcopy(model)
    captured = CapturedLayers(RecordedCaptures())
    assert_same_steps(model, other, captured, map(ids, range(5)))
    assert captured.captured == 3
    change(model)
    change(other)
    assert_same_steps(model, other, captured, map(ids, range(5, 13)))
    assert captured.captured == (2 if change is hook else 3)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_batches_of_several_lengths(checkpointed):
    model = tiny(True, checkpointed)
    other = copy.deepcopy(model)
    captured = CapturedLayers(RecordedCaptures())
    batches = (ids(number, rows=1 + number % 2, length=5 + number % 3) for number in range(16))
    assert_same_steps(model, other, captured, batches)
    assert captured.captured == 3


@pytest.mark.parametrize("checkpointed", [False, True])
def test_several_forwards_before_a_backward(checkpointed):
    model = tiny(False, checkpointed)
    other = copy.deepcopy(model)
    captured = CapturedLayers(RecordedCaptures())
    for number in range(6):
        for each, graphs in ((model, captured), (other, None)):
            with graphs.attached(each) if graphs else contextlib.nullcontext():
                first = each(input_ids=ids(number), labels=ids(number), use_cache=False).loss
                second = each(input_ids=ids(number + 20), labels=ids(number), use_cache=False).loss
            with graphs.attached(each) if graphs else contextlib.nullcontext():
                third = each(input_ids=ids(number + 40), labels=ids(number), use_cache=False).loss
            (first - second * 0.3 + third * 0.2).backward()
        assert_same(model, other)
    assert captured.captured == 3


def test_a_loss_without_a_backward_blocks_nothing():
    model = tiny()
    other = copy.deepcopy(model)
    captures = RecordedCaptures()
    captured = CapturedLayers(captures)
    for number in range(8):
        with captured.attached(model):
            model(input_ids=ids(number + 50), use_cache=False)
        gc.collect()  # outputs of models are in cycles
        assert torch.equal(step(model, ids(number), captured), step(other, ids(number)))
        with torch.no_grad():
            one, two = (each(input_ids=ids(number + 9)).logits[:] for each in (model, other))
        assert torch.equal(one, two)
        assert_same(model, other)
    assert captures.count == 6  # a forward and a backward of each layer


def test_a_second_backward_is_refused():
    model = tiny()
    captured = CapturedLayers(RecordedCaptures())
    for number in range(4):
        step(model, ids(number), captured)
    with captured.attached(model):
        loss = model(input_ids=ids(0), labels=ids(0), use_cache=False).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="cuda_graphs"):
        loss.backward()


def test_layers_are_as_they_were_outside_of_a_loss():
    for checkpointed in (False, True):
        model = tiny(checkpointed=checkpointed)
        before = [{**vars(layer)} for layer in model.model.layers]
        captured = CapturedLayers(RecordedCaptures())
        for number in range(4):
            step(model, ids(number), captured)
        assert [{**vars(layer)} for layer in model.model.layers] == before


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_padded_batches_under_autocast(padding, checkpointed):
    model = tiny(True, checkpointed)
    other = copy.deepcopy(model)
    captured = CapturedLayers(RecordedCaptures())
    for number in range(6):
        mask = torch.ones(2, 7, dtype=torch.long)
        shown = slice(0, 1 + number % 3) if padding == "left" else slice(6 - number % 3, 7)
        mask[0, shown] = 0
        losses = []
        for each, graphs in ((model, captured), (other, None)):
            with torch.autocast("cpu", torch.bfloat16), graphs.attached(each) if graphs else contextlib.nullcontext():
                loss = each(input_ids=ids(number), attention_mask=mask, labels=ids(number), use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        assert_same(model, other)
    assert captured.captured == 3


def test_a_layer_that_cannot_be_captured_runs_without():
    class Refusing(RecordedCaptures):
        def __call__(self, run, keeps=False):
            if self.count in (2, 4):  # the forward of the third layer, and the backward of one of the others
                self.count += 1
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().__call__(run, keeps)

    model = tiny()
    other = copy.deepcopy(model)
    captured = CapturedLayers(Refusing())
    assert_same_steps(model, other, captured, map(ids, range(6)))
    assert captured.captured == 1
    assert sum(captured.reasons.values()) == 2
    assert all("stream is capturing" in reason for reason in captured.reasons)


def test_a_graph_with_other_results_is_not_used():
    class Wrong(RecordedCaptures):
        def __call__(self, run, keeps=False):
            replay = super().__call__(run, keeps)
            wrong = self.count in (1, 5)

            def instead():
                replay()
                if wrong:
                    run.__self__.buffers.result.add_(1e-3)
                    run.__self__.buffers.hidden_gradient.add_(1e-3)

            return instead

    model = tiny()
    other = copy.deepcopy(model)
    captured = CapturedLayers(Wrong())
    assert_same_steps(model, other, captured, map(ids, range(6)))
    assert captured.captured == 1
    assert sum(captured.reasons.values()) == 2


@pytest.mark.parametrize("of_backward", [False, True])
def test_a_graph_that_writes_nothing_is_not_used(of_backward):
    """As that of a layer on another device, whose launches a capture does not see."""

    class Empty(RecordedCaptures):
        def __call__(self, run, keeps=False):
            replay = super().__call__(run, keeps)
            return replay if (self.count > 3) != of_backward else lambda: None

    model = tiny()
    other = copy.deepcopy(model)
    captured = CapturedLayers(Empty())
    assert_same_steps(model, other, captured, map(ids, range(6)))
    assert captured.captured == 0
    assert sum(captured.reasons.values()) == 3


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_that_change_at_one_call_are_compared_again(checkpointed):
    class SeldomOther(RecordedCaptures):
        def __call__(self, run, keeps=False):
            replay, calls = super().__call__(run, keeps), itertools.count()

            def instead():
                replay()
                if run.__name__ == "_write_gradients" and next(calls) == 0:
                    run.__self__.buffers.hidden_gradient.add_(1e-6)

            return instead

    model = tiny(False, checkpointed)
    other = copy.deepcopy(model)
    captured = CapturedLayers(SeldomOther())
    assert_same_steps(model, other, captured, map(ids, range(6)))
    assert captured.captured == 3, captured.reasons


class Attending(GradientCheckpointingLayer):
    """A layer that is given the plan of a packed row, and what a collator says of its documents."""

    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(8, 24)

    def forward(self, hidden, plan, cu_seq_lens_q=None, max_length_q=None):
        if cu_seq_lens_q is not None:
            plan = AttentionPlan(0, cu_seq_lens_q, max_length_q)
        query, key, value = self.projection(hidden).unflatten(-1, (3, 2, 4)).unbind(2)
        return hidden + attention(query, key, value, plan=plan).flatten(-2)


def plan_of(*lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return AttentionPlan(0, offsets, max(lengths))


class Counting(Attending):
    """A layer whose result depends on the number of documents, empty ones too."""

    def forward(self, hidden, cu_seq_lens_q=None):
        return super().forward(hidden, None, cu_seq_lens_q, 12) * cu_seq_lens_q.numel()


def test_a_layer_that_counts_empty_documents_runs_without():
    torch.manual_seed(0)
    layer = Counting().train()
    captured = CapturedLayers(RecordedCaptures())
    starts = plan_of(3, 9).offsets
    for _ in range(4):
        with captured.attached(layer):
            layer(torch.ones(1, 12, 8), cu_seq_lens_q=starts).sum().backward()
    assert captured.captured == 0
    assert [*captured.reasons] == ["the result of its graph differs"]


@pytest.mark.parametrize("in_plan", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_rows_of_other_documents_share_a_graph(checkpointed, in_plan):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Attending(), Attending()).train()
    for layer in model:
        layer.gradient_checkpointing = checkpointed
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    other = copy.deepcopy(model)
    captured = CapturedLayers(RecordedCaptures())
    rows = [plan_of(3, 9), plan_of(12), plan_of(1, 2, 9), plan_of(10, 2), plan_of(1, 1, 1, 9), plan_of(4, 4, 4)]
    for number, plan in enumerate(rows):
        hidden = torch.randn(1, 12, 8, generator=torch.Generator().manual_seed(number))
        told = {} if in_plan else {"cu_seq_lens_q": plan.offsets, "max_length_q": plan.longest}
        given = plan if in_plan else None
        for each, graphs in ((model, captured), (other, None)):
            with graphs.attached(each) if graphs else contextlib.nullcontext():
                result = each[1](each[0](hidden, given, **told), given, **told)
            result.square().sum().backward()
        assert_same(model, other)
    kinds = [len(known.graphs) for known in captured._of.values()]
    assert kinds == [1, 1]  # the longest documents are 9 to 16 tokens, and 4 once


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_that_overflow_prove_nothing(checkpointed):
    """As with float16, whose scaler begins too high: the step is skipped, and layers are captured in the next."""
    model = tiny(False, checkpointed)
    other = copy.deepcopy(model)
    captured = CapturedLayers(RecordedCaptures())
    for number in range(6):
        for each, graphs in ((model, captured), (other, None)):
            each.zero_grad()
            with graphs.attached(each) if graphs else contextlib.nullcontext():
                loss = each(input_ids=ids(number), labels=ids(number), use_cache=False).loss
            (loss * (torch.inf if number in (2, 3) else 1)).backward()
            with torch.no_grad():
                torch._foreach_mul_([*each.parameters()], 0.99)  # a step of an optimizer
        if number not in (2, 3):
            assert_same(model, other)
    assert captured.captured == 3, captured.reasons


class Squaring(GradientCheckpointingLayer):
    """A layer with two products."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)

    def forward(self, hidden):
        return self.last(self.first(hidden).square())


def test_a_backward_computes_no_more_again_than_it_needs():
    """One product again and four of gradients; not the last one of the forward."""
    layer, captures = Squaring().train(), RecordedCaptures()
    captured = CapturedLayers(captures)
    for _ in range(3):
        with captured.attached(layer):
            layer(torch.ones(1, 3, 8, requires_grad=True)).sum().backward()
    assert [operators.count("mm") for operators in captures.operators] == [2, 5]


class Remembering(Squaring):
    """A layer that writes to what it is given."""

    def forward(self, hidden, states):
        self.written(states).append(hidden)
        return super().forward(hidden)

    @staticmethod
    def written(states):
        while not hasattr(states, "append"):
            (states,) = states.values() if isinstance(states, dict) else states
        return states


@pytest.mark.parametrize("make", [list, collections.deque, lambda: {"of": []}, lambda: ([],)])
def test_what_no_graph_can_hold_is_said(make):
    layer, captured = Remembering().train(), CapturedLayers(RecordedCaptures())
    for number in range(4):
        states = make()
        with captured.attached(layer):
            layer(torch.ones(1, 3, 8, requires_grad=True), states).sum().backward()
        assert len(layer.written(states)) == 2  # in the forward, and again in the backward
        assert bool(captured.news()) == (number == 2)
    assert [*captured.reasons] == ["it is given something that no graph can hold, such as a cache"]


class Scaling(GradientCheckpointingLayer):
    """A layer whose backward reads two tensors that it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8))

    def forward(self, hidden, scale, shift):
        return hidden * scale + (self.weight * hidden).sin() * shift


@pytest.mark.parametrize("checkpointed", [False, True])
def test_tensors_that_were_the_same_and_are_others_later(checkpointed):
    """Two layers, or two arguments of one, had the same tensor when they were captured."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Scaling(), Scaling()).train()
    for layer in model:
        layer.gradient_checkpointing = checkpointed
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    other = copy.deepcopy(model)
    captured = CapturedLayers(RecordedCaptures())
    for number in range(16):
        hidden, *given = torch.randn(5, 2, 3, 8)
        scales = [given[0]] * 4 if number < 4 else ([given[0], given[1]] * 2 if number < 8 else given)
        for each, graphs in ((model, captured), (other, None)):
            with graphs.attached(each) if graphs else contextlib.nullcontext():
                result = each[1](each[0](hidden, *scales[:2]), *scales[2:])
            result.square().sum().backward()
        assert_same(model, other)
    assert captured.captured == 2


def test_forwards_without_gradients_have_graphs_of_their_own():
    """With adapters and without them, as KTO calls its policy and its reference."""
    model = tiny(True)
    other = copy.deepcopy(model)
    captured = CapturedLayers(RecordedCaptures())
    for number in range(5):
        batch = ids(number)
        for alone in (False, True):
            results = []
            for each, graphs in ((model, captured), (other, None)):
                with (
                    torch.no_grad(),
                    graphs.attached(each) if graphs else contextlib.nullcontext(),
                    each.disable_adapter() if alone else contextlib.nullcontext(),
                ):
                    results.append(each(input_ids=batch, use_cache=False).logits)
            assert torch.equal(*results)
        assert torch.equal(step(model, batch, captured), step(other, batch))
        assert_same(model, other)
    states = [[len(each) for each in known.graphs.values()] for known in captured._of.values()]
    assert states == [[2, 1]] * 3


MIB = 2**20


def lengths_in_turn(number):
    """Batches of one length, then of another one alone."""
    return ids(number, length=5 if number < 6 else 7)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_graphs_that_fill_their_memory_make_room_for_those_that_are_used(checkpointed, monkeypatch):
    monkeypatch.setattr("liger_trainer.graphs.captured._APART", 16)
    model = tiny(False, checkpointed)
    other = copy.deepcopy(model)
    captures = RecordedCaptures(limit=5 * MIB, each=MIB)
    captured = CapturedLayers(captures)
    assert_same_steps(model, other, captured, map(lengths_in_turn, range(6)))
    assert captured.news() == "cuda_graphs: 3 of 3 layers run from graphs."
    assert_same_steps(model, other, captured, map(lengths_in_turn, range(6, 15)))
    assert captures.count == 6
    full = "graphs fill the 0.0 GiB that they may take, and batches of other shapes run without"
    assert captured.news() == f"cuda_graphs: 3 of 3 layers run from graphs; {full}."
    kept = weakref.ref(next(iter(captured._of["model.layers.0"].graphs.values()))[0])
    assert_same_steps(model, other, captured, map(lengths_in_turn, range(15, 20)))
    gc.collect()
    assert kept() is None
    assert (captures.count, captures.renewals, captured.captured) == (12, 1, 3)
    assert captures.taken == 6 * MIB
    assert captured.news() == "cuda_graphs: 3 of 3 layers run from graphs."


def test_graphs_of_two_models_make_room_for_each_other(monkeypatch):
    """They share their memory: where a reference has no room, those of the policy go too."""
    monkeypatch.setattr("liger_trainer.graphs.captured._APART", 8)
    model, reference = tiny(), tiny()
    captures = RecordedCaptures(limit=8 * MIB, each=MIB)
    captured, of_reference = CapturedLayers(captures), CapturedLayers(captures)
    for number in range(16):
        step(model, ids(number), captured)
        with torch.no_grad(), of_reference.attached(reference):
            reference(input_ids=ids(number), use_cache=False)
        assert captures.taken <= 9 * MIB
        if captures.renewals:
            break
    with captured.attached(model):
        pass
    assert captures.renewals == 1
    assert (captured.captured, of_reference.captured) == (0, 0)


def test_graphs_count_what_they_read_and_write():
    model, captures = tiny(), RecordedCaptures(limit=2**12)
    captured = CapturedLayers(captures)
    for number in range(12):
        step(model, ids(number, length=5 + number % 2), captured)
    assert captures.count == 2  # of the first layer
    assert captured._is_full


def test_gradients_of_parameters_have_one_buffer_for_all_lengths():
    model, captured = tiny(), CapturedLayers(RecordedCaptures())
    for number in range(6):
        step(model, ids(number, length=5 + number % 2), captured)
    kinds = [graphs for known in captured._of.values() for (graphs,) in known.graphs.values()]
    assert len(kinds) == 6
    assert len({id(gradient) for graphs in kinds for gradient in graphs.buffers.parameter_gradients}) == 9


@pytest.mark.parametrize("only_if_faster", [False, True])
def test_calls_that_keep_the_device_busy_run_without(only_if_faster):
    model = tiny()
    other = copy.deepcopy(model)
    captures = RecordedCaptures()
    captured = CapturedLayers(captures, only_if_faster)
    assert_same_steps(model, other, captured, (ids(number) for number in range(4)))
    assert captured.captured == 3
    captures.is_busy = True  # with longer batches
    assert_same_steps(model, other, captured, (ids(number, length=9) for number in range(4)))
    kinds = {len(known.graphs) for known in captured._of.values()}
    assert kinds == ({1} if only_if_faster else {2})
    captures.is_busy = False
    assert_same_steps(model, other, captured, (ids(number, length=10) for number in range(4)))  # is longer still
    assert_same_steps(model, other, captured, (ids(number, length=8) for number in range(4)))
    kinds = {len(known.graphs) for known in captured._of.values()}
    assert kinds == ({2} if only_if_faster else {4})
    busy = "batches of 18 tokens or more keep the device busy without graphs"
    assert (busy in captured.news()) == only_if_faster


def test_lengths_share_memory_and_leave_it_with_their_graphs():
    model, captured = tiny(), CapturedLayers(RecordedCaptures())
    for number in range(8):
        step(model, ids(number, length=(5, 7)[number % 2]), captured)
    kinds = [graphs for known in captured._of.values() for (graphs,) in known.graphs.values()]
    places = {kind.buffers.hidden.data_ptr() for kind in kinds}
    assert (len({kind.buffers.hidden.shape for kind in kinds}), len(places)) == (2, 1)
    memory = captured._memory
    assert memory.nbytes >= 4 * kinds[0].buffers.hidden.nbytes
    del kinds, captured
    gc.collect()
    assert memory.nbytes == 0


def test_buffers_of_packed_weights_are_freed_before_a_capture(monkeypatch):
    """Graphs decode to memory of their own, and the buffers are as large as the experts of a layer."""
    freed = []
    monkeypatch.setattr("liger_trainer.graphs.captured.free_buffers", lambda: freed.append(captures.count))
    captures = RecordedCaptures()
    model, captured = tiny(), CapturedLayers(captures)
    for number in range(4):
        step(model, ids(number), captured)
    assert freed == [0, 1, 2]


class TimedCaptures(RecordedCaptures):
    """Says of the trials that are timed what it is told, in turn; keeps the operators of each."""

    def __init__(self, *busy):
        super().__init__()
        self.busy, self.trials = list(busy), []

    @contextlib.contextmanager
    def tried(self):
        recorder = Recorder()
        self.trials.append(recorder.calls)

        def was_busy():
            return self.busy.pop(0)

        with super().tried(), recorder:
            yield was_busy


@pytest.mark.parametrize(("busy", "captures"), [((True, True, False), False), ((False, True, False), True)])
def test_most_trials_decide_for_all_layers(busy, captures):
    """Another program may have the device once, and the host may be slow once."""
    model = tiny(lora=True)
    timed = TimedCaptures(*busy)
    captured = CapturedLayers(timed, only_if_faster=True)
    assert_same_steps(model, copy.deepcopy(model), captured, map(ids, range(4)))
    assert timed.busy == []
    assert (captured.captured, captured.gains.in_training) == ((3, None) if captures else (0, 14))


def test_what_is_timed_is_the_backward_too():
    """The host takes longer for it, and longest where it computes the forward again."""
    timed = TimedCaptures(False, False, False)
    step_of = CapturedLayers(timed, only_if_faster=True)
    model = tiny()
    for number in range(3):
        step(model, ids(number), step_of)
    backwards = [
        sum("backward" in operator.overloadpacket.__name__ for operator, *_ in trial) for trial in timed.trials[:5]
    ]
    assert backwards[0] == 0  # what is compared with the graph of the forward
    assert backwards[1] > 0
    assert len({*backwards[1:]}) == 1


def test_a_forward_alone_says_nothing_of_a_training():
    """With its adapters off, a policy is its own reference: the device is busy there with fewer tokens."""
    timed = TimedCaptures(True, True, True, False, False, False)
    captured = CapturedLayers(timed, only_if_faster=True)
    model = tiny(lora=True)
    for number in range(4):
        with torch.no_grad(), captured.attached(model):
            model(input_ids=ids(number), use_cache=False)
    assert (captured.captured, captured.gains.in_training) == (0, None)
    assert_same_steps(model, copy.deepcopy(model), captured, map(ids, range(4)))
    assert captured.captured == 3


def test_where_memory_is_short_layers_run_without(monkeypatch):
    def full(self, *args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Buffers, "__init__", full)
    model = tiny()
    captured = CapturedLayers(RecordedCaptures())
    assert_same_steps(model, copy.deepcopy(model), captured, map(ids, range(5)))
    assert captured.reasons == {"there was no memory for its graphs": 3}


class Living(TorchDispatchMode):
    """Bytes of what operators have made and something holds, beside what was there before."""

    def __init__(self):
        super().__init__()
        self._made = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        for each in tree_leaves(result):
            if torch.is_tensor(each) and each.untyped_storage()._cdata not in given:
                self._made.append((StorageWeakRef(each.untyped_storage()), each.untyped_storage().nbytes()))
        return result

    def bytes(self):
        return sum({reference.cdata: size for reference, size in self._made if not reference.expired()}.values())


@pytest.mark.parametrize("lora", [False, True])
def test_what_a_layer_would_keep_is_counted(lora):
    """Nothing but the results of operators: no weights, and no copies that all layers read."""
    found = []

    class Counting(RecordedCaptures):
        def __call__(self, run, keeps=False):
            graphs = run.__self__
            if not found:
                nbytes = graphs.bytes_to_keep()
                hidden = graphs.buffers.hidden.clone()
                gc.collect()
                with Living() as living:
                    recorded = graphs._recording(hidden)
                gc.collect()
                found.append((nbytes, living.bytes() + hidden.nbytes))
                del recorded
            return super().__call__(run, keeps)

    model = tiny(lora)
    captured = CapturedLayers(Counting())
    for number in range(3):
        step(model, ids(number), captured)
    ((nbytes, living),) = found
    assert nbytes == living > 0


def test_layers_of_reentrant_checkpoints_are_known_by_whoever_replaced_them():
    for reentrant in (False, True):
        own = functools.partial(checkpoint, use_reentrant=reentrant)
        assert is_reentrant(Replaced("layer", Replaced("layer", own, print), print)) == reentrant
