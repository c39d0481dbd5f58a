"""Sparse attention: an indexer selects keys, of rows that are longer than its selection and of rows that are not."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForImageTextToText

from liger_trainer import LigerTrainer, LigerTrainingArguments, apply_liger_kernel, revert_liger_kernel
from liger_trainer.attention import interface
from liger_trainer.attention.masks import sliced
from liger_trainer.kernels.attention import attention_launch, selection
from liger_trainer.kernels.attention.plan import AttentionPlan, SharedKeys, bits_of, dense
from liger_trainer.kernels.copied_rows import copies_of
from liger_trainer.packing.proof import small_config
from liger_trainer.patching import indexer
from liger_trainer.patching.attention_call import capture
from liger_trainer.patching.indexer import find_indexer
from tests.attention.families import BATCHES, build
from tests.attention.test_families import ONLY, attention_rows, eager, masks_received, patched
from tests.calls import created_sizes
from tests.patching.comparisons import assert_same, loss_and_gradients, total_error

INDEXED = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text")
families = pytest.mark.parametrize("name", INDEXED)
SMALLEST = 3  # fewer keys than most documents have; 8 are more than all but one, 9 as many as the longest has


def _indexers(model):
    return [found for module in model.modules() if (found := find_indexer(module)) is not None]


def _assert_equal(theirs, ours, batch):
    assert_same(loss_and_gradients(ours, batch), loss_and_gradients(theirs, batch), floor=1e-6)


@families
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("selected", [SMALLEST, 8, 9, 12])
def test_loss_and_gradients_equal_those_of_eager(name, kind, selected):
    model = build(name, index_topk=selected).train()
    _assert_equal(eager(model), patched(model), BATCHES[kind]())


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("selected", [SMALLEST, 12])
def test_latents_of_an_earlier_layer(kind, selected):
    """Mistral Large 4, whose queries are scaled by their positions too."""
    config = small_config(AutoConfig.for_model("mistral_large4"))
    config.get_text_config().index_topk = selected
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).train()
    batch = {**BATCHES[kind](), "use_cache": False}
    batch["input_ids"] = batch["input_ids"] % 50
    batch["labels"] = batch["labels"].where(batch["labels"] < 0, batch["labels"] % 50)
    _assert_equal(eager(model), patched(model), batch)


@families
@pytest.mark.parametrize("kind", BATCHES)
def test_by_blocks_of_queries(name, kind, monkeypatch):
    monkeypatch.setattr(selection, "BLOCK", 5)
    model = build(name, index_topk=SMALLEST).train()
    _assert_equal(eager(model), patched(model), {**BATCHES[kind](), "use_cache": False})


@families
def test_scores_are_what_every_class_computes(name, monkeypatch):
    """Otherwise its own code makes the scores of all pairs."""
    model, batch = patched(build(name, index_topk=SMALLEST).train()), {**BATCHES["full"](), "use_cache": False}
    given = []
    monkeypatch.setattr(indexer, "select", lambda *args: given.append(args[-2:]) or selection.select(*args))
    model(**batch)
    scale = 1.0 if name == "hy_v4" else _indexers(model)[0].head_dim ** -0.5
    assert given == [(pytest.approx(scale), SMALLEST)] * len(_indexers(model))


FORMS = {
    "sigmoid": lambda scores, weights: torch.matmul(weights, torch.sigmoid(scores)),
    "no ReLU": lambda scores, weights: torch.matmul(weights, scores),
    "a bias": lambda scores, weights: torch.matmul(weights, F.relu(scores + 1)),
    "a scale for each head": lambda scores, weights: torch.matmul(weights, F.relu(scores * weights.mT)),
    "absolute values": lambda scores, weights: torch.matmul(weights, scores.abs()),
    "a scale after the ReLU": lambda scores, weights: torch.matmul(weights, F.relu(scores) * 2.0),
}


@pytest.mark.parametrize("form", FORMS)
def test_scores_of_another_form_are_left_to_the_class(form):
    q, k, weights = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 8), torch.randn(1, 6, 1, 2)

    def original(cache, form=FORMS[form]):
        keys = cache.update_indexer(k, 0)
        scores = torch.matmul(q, keys.transpose(-1, -2).float().unsqueeze(1)) * 0.5
        return form(scores, weights)

    given, plan = {"cache": indexer._Cache()}, AttentionPlan(0, None, 6)
    assert indexer._selected(original, given, plan, 3) is None
    known = functools.partial(original, form=lambda scores, weights: torch.matmul(weights, F.relu(scores)))
    assert torch.equal(
        indexer._selected(known, given, plan, 3), selection.select(plan, q, k, weights.squeeze(-2), 0.5, 3)
    )


def test_an_indexer_of_another_form_says_so_once(monkeypatch, caplog):
    model, batch = (
        patched(build("deepseek_v32", index_topk=SMALLEST).train()),
        {**BATCHES["full"](), "use_cache": False},
    )
    expected = model(**batch).logits
    monkeypatch.setattr(indexer, "_selected", lambda *args: None)
    monkeypatch.setattr("liger_trainer.head.warn_once._said", set())
    torch.testing.assert_close(model(**batch).logits, expected)
    assert caplog.text.count("DeepseekV32Indexer computes its scores in another form") == 1


@families
def test_the_indexer_runs_only_where_it_selects(name, monkeypatch):
    model = patched(build(name, index_topk=9).train())
    calls = []
    kind = type(_indexers(model)[0])
    native = kind.forward
    monkeypatch.setattr(kind, "forward", functools.wraps(native)(lambda *a, **k: calls.append(1) or native(*a, **k)))
    revert_liger_kernel(model)
    patched(model)
    calls.clear()  # of the proof
    with masks_received(model) as received:
        model(**BATCHES["packed"]())  # at most 9 tokens a document
    assert not calls
    assert all(isinstance(mask, interface.AttentionPlan) for mask in received)
    model(**BATCHES["full"]())
    assert calls


def test_keys_of_a_shared_prompt_count():
    """Two completions of 2 tokens see a prompt of 3: each document is short, and its keys are not."""
    model = patched(build("deepseek_v32", index_topk=4).train())
    places = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6], dtype=torch.int32)
    offsets = torch.tensor([0, 3, 8, 13], dtype=torch.int32)
    keys = SharedKeys(copies_of(places, 7), offsets, 5)
    plan = AttentionPlan(0, torch.tensor([0, 3, 5, 7], dtype=torch.int32), 3, keys=keys)
    table = torch.ones(1, 7, 8)
    its = _indexers(model)[0]
    selected = its(
        torch.randn(1, 7, 32),
        torch.randn(1, 7, 32),
        (table, table),
        sliced(plan, 1, 7, "cpu")[:, 0],
        torch.arange(7)[None],
    )
    assert selected.shape == (1, 7)  # a word for the keys of a document, and tokens
    seen = dense(plan._replace(bits=selected), 1, 7, selected.device)[0, 0]
    assert seen.sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4]
    # The last token sees the prompt and its own completion, and none of the other.
    assert not seen[6, 3:5].any()


@pytest.mark.parametrize("name", ["glm_moe_dsa", "hy_v4"])
@pytest.mark.parametrize("kind", BATCHES)
def test_layers_that_share_a_selection_are_handed_its_bits(name, kind, monkeypatch):
    model = patched(build(name, index_topk=SMALLEST).train())
    selections, native = [], interface._selecting
    monkeypatch.setattr(interface, "_selecting", lambda *args: selections.append(args[2]) or native(*args))
    batch = {**BATCHES[kind](), "use_cache": False}
    model(**batch)
    tokens = batch["input_ids"].numel()
    assert [(each.dtype, each.shape) for each in selections] == [(torch.int32, (1, tokens))] * len(selections)
    makers = sum(1 for _ in _indexers(model))
    assert len({id(each) for each in selections}) == makers
    assert len(selections) == model.config.num_hidden_layers


def test_an_indexer_makes_nothing_of_all_pairs(monkeypatch):
    monkeypatch.setattr(selection, "BLOCK", 8)
    its = _indexers(patched(build("deepseek_v32", index_topk=4).train()))[0]
    length, heads = 128, 4
    table = torch.ones(1, length, 8)
    given = (torch.randn(1, length, 32), torch.randn(1, length, 32), (table, table))
    plan = sliced(AttentionPlan(0, None, length), 1, length, "cpu")
    sizes = created_sizes(lambda: its(*given, plan[:, 0], torch.arange(length)[None]))
    assert max(sizes) <= max(8 * length * heads, length * heads * 16)  # the scores of a block, and queries
    assert max(sizes) < length**2


def test_documents_that_an_indexer_did_not_know():
    """Packing that only the attention is told of: selected in the row, and seen in documents."""
    attention = patched(build("deepseek_v32", index_topk=4).train()).model.layers[0].self_attn
    plan = sliced(AttentionPlan(0, None, 12), 1, 12, "cpu")
    generator = torch.Generator().manual_seed(0)
    indices = torch.rand(1, 12, 12, generator=generator).argsort(-1)[..., :4]
    indices[..., 0] = torch.arange(12)
    bits = bits_of(plan, indices, 12).flatten(1)
    q, k, v = torch.randn(3, 1, 4, 12, 16, generator=generator)
    positions = torch.tensor([[*range(5), *range(7)]])
    got, _ = interface.attention_forward(attention, q, k, v, plan, scaling=0.3, indices=bits, position_ids=positions)
    document = torch.arange(12) >= 5
    mask = torch.zeros(12, 12, dtype=torch.bool).scatter(-1, indices[0], True).tril()
    mask &= document[:, None] == document
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3)
    torch.testing.assert_close(got, expected.transpose(1, 2))


@pytest.mark.kernel
@pytest.mark.parametrize("kind", ["left-padded", "packed"])
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_our_kernels_read_the_bits(name, kind, device, monkeypatch):
    model = build(name, index_topk=SMALLEST).to(device).train()
    theirs, ours = eager(model), patched(model)
    batch = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in BATCHES[kind]().items()
    }
    calls, native = [], attention_launch.forward
    monkeypatch.setattr(attention_launch, "forward", lambda *args: calls.append(args[3].bits) or native(*args))
    results = loss_and_gradients(ours, {**batch, "use_cache": False})
    assert len(calls) == model.config.num_hidden_layers
    assert not any(bits is None for bits in calls)
    assert_same(results, loss_and_gradients(theirs, batch), floor=1e-6)


@families
def test_fewer_keys_give_other_gradients(name):
    """Otherwise the comparisons above would not see a selection that is ignored."""
    few, all_keys = (
        loss_and_gradients(patched(build(name, index_topk=count).train()), BATCHES["full"]()) for count in (2, 12)
    )
    assert total_error(all_keys, few) > 1e-3


@families
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("selected", [SMALLEST, 12])
def test_checkpoints(name, reentrant, selected):
    model = build(name, index_topk=selected).train()
    theirs, ours = eager(model), patched(model)
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ours.enable_input_require_grads()
    _assert_equal(theirs, ours, BATCHES["left-padded"]())


@families
@pytest.mark.parametrize("selected", [SMALLEST, 12])
@pytest.mark.parametrize("other", ["its object", "a copy", "the model"])
def test_a_model_with_the_config_of_a_patched_one(name, selected, other):
    """Which has indexers of its own, and is given the mask of a plan; a copy of the model has ours."""
    model = patched(build(name, index_topk=selected).train())
    config = copy.deepcopy(model.config) if other == "a copy" else model.config
    found = copy.deepcopy(model) if other == "the model" else type(model)(config).train()
    found.load_state_dict(model.state_dict())
    _assert_equal(eager(model), found, {**BATCHES["packed"](), "use_cache": False})


@pytest.mark.parametrize("selected", [SMALLEST, 12])
def test_compiled(selected):
    model = build("deepseek_v32", index_topk=selected).train()
    theirs, ours = eager(model), patched(model)
    batch = {**BATCHES["left-padded"](), "use_cache": False}
    expected = loss_and_gradients(theirs, batch)
    ours.compile(backend="aot_eager")
    assert_same(loss_and_gradients(ours, batch), expected, floor=1e-6)


@families
def test_revert(name):
    model = build(name, index_topk=SMALLEST)
    before = copy.deepcopy(model)
    apply_liger_kernel(model, ONLY)
    assert revert_liger_kernel(model)
    assert all("forward" not in module.__dict__ for module in model.modules())
    batch = BATCHES["full"]()
    assert torch.equal(before(**batch).logits, model(**batch).logits)


@families
def test_generation_with_a_cache(name):
    model = build(name, index_topk=SMALLEST).eval()
    theirs, ours = eager(model), patched(model)
    ids = torch.randint(3, 110, (2, 7), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


def test_an_indexer_with_a_forward_of_its_own_is_left_alone():
    model = build("deepseek_v32")
    its = _indexers(model)[0]
    its.forward = lambda *args, **kwargs: type(its).forward(its, *args, **kwargs)
    (row,) = attention_rows(apply_liger_kernel(model, ONLY))
    assert "forward of its DeepseekV32Indexer" in row.reason


def test_an_indexer_that_selects_other_keys_than_it_masks_is_found(monkeypatch):
    """The proof compares what an indexer hands on with the mask that the model makes of it itself."""
    from transformers.models.deepseek_v32 import modeling_deepseek_v32

    model = build("deepseek_v32")
    native = modeling_deepseek_v32.DeepseekV32Indexer.forward
    attention = model.model.layers[0].self_attn
    monkeypatch.setattr(
        modeling_deepseek_v32.DeepseekV32Indexer,
        "forward",
        lambda self, *args, **kwargs: native(self, *args, **kwargs)[..., :-1],  # one key fewer than it says
    )
    found = capture(attention, {}, "eager", [8, 4])
    assert isinstance(found, str)


@pytest.mark.parametrize("given", ["model", "model_init"])
def test_trainers_freeze_indexers(given, tmp_path):
    def made():
        return build("glm_moe_dsa", index_topk=SMALLEST)

    rows = [{"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9]}] * 2
    args = LigerTrainingArguments(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to="none", bf16=False)
    source = {"model": made()} if given == "model" else {"model_init": made}
    trainer = LigerTrainer(args=args, train_dataset=rows, **source)
    trainer.model = trainer.call_model_init() if given == "model_init" else trainer.model  # as before each trial
    trainer.train()
    named = dict(trainer.model.named_parameters())
    frozen = {name for name, parameter in named.items() if not parameter.requires_grad}
    assert frozen == {name for name in named if ".indexer." in name}
