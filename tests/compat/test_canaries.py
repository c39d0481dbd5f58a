"""What is recognised by its shape, in the installed libraries and in ones that have changed it without a word."""

import functools
import inspect
import logging
import operator
import textwrap
import types

import pytest
import torch
from transformers import GenerationMixin, LlamaForCausalLM, MixtralForCausalLM, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaAttention

from liger_trainer.attention import interface, masks
from liger_trainer.compat import features, private
from liger_trainer.compat import transformers as declared
from liger_trainer.compat.private import TESTED, Feature, Private, available, installed_version, require, tried
from liger_trainer.tools import canaries
from liger_trainer.tools.cli.doctor import private_names

FEATURES = [feature for feature in features() if feature.canary]
identifier = pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.canary.rpartition(":")[2])


@pytest.fixture(autouse=True)
def _forget():
    """Canaries run once in a process."""
    for cache in (private._tried, available, canaries._llama):
        cache.cache_clear()
    yield
    for cache in (private._tried, available, canaries._llama):
        cache.cache_clear()


def plain(function):
    """A decorator that does not say what it wraps."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def hiding(function):
    """A decorator that says what it wraps, and does not hold it in its closure."""
    held = [function]

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return held[0](*args, **kwargs)

    return wrapper


def other_cells(numbers):
    """The mask of packed rows, by a function that calls its numbers something else."""
    return lambda batch, head, query, key: numbers[batch, query] == numbers[batch, key]


def pairs(*functions):
    """The conjunction of mask functions, two at a time."""
    return functools.reduce(lambda one, other: lambda *indices: one(*indices) & other(*indices), functions)


def prepared(self, input_ids, next_sequence_length=None, given=None, **kwargs):
    return {"input_ids": input_ids, "state_of_layers": given}


def unwrapped(cls):
    """As if layers were checkpointed by the model that calls them."""
    cls.__call__ = torch.nn.Module.__call__


def shorter(size, overlay=masking_utils.sliding_window_overlay):
    return overlay(size - 1)


def longer(sliding_window):
    return lambda batch, head, query, key: key >= query - sliding_window


def later(chunk_size, left_padding):
    """Chunks that begin one token later."""

    def first(batch, index):
        return (index - left_padding[batch] + 1) // chunk_size

    return lambda batch, head, query, key: (first(batch, key) == first(batch, query)) & (chunk_size > 0)


def from_the_row(chunk_size, left_padding):
    """Chunks that begin with the row, and not with its first token."""
    return lambda batch, head, query, key: key // chunk_size == query // chunk_size


def earlier_documents_too(packed_sequence_mask):
    return lambda batch, head, query, key: packed_sequence_mask[batch, query] >= packed_sequence_mask[batch, key]


def any_of(*mask_functions):
    return lambda *indices: functools.reduce(operator.or_, [mask(*indices) for mask in mask_functions])


def doubled(mask_function, position_ids):
    """Positions of which every other one is left out."""
    return lambda batch, head, query, key: mask_function(
        batch, head, 2 * position_ids[batch, query], 2 * position_ids[batch, key]
    )


class Skipping:
    """Mask functions that are told of blocks that their mask may be left out."""

    def __init__(self):
        self._global_mapping = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping

    def __getitem__(self, name):
        def describe(**given):
            blocks = given["mask_function"].__name__ == "or_mask"
            given["allow_is_causal_skip"] = given["allow_is_causal_skip"] or blocks
            return ALL_MASK_ATTENTION_FUNCTIONS[name](**given)

        return describe


def inner_code(function):
    """The code of the lambda that `function` returns."""
    codes = [each for each in function.__code__.co_consts if isinstance(each, types.CodeType)]
    return next(code for code in codes if code.co_name == "<lambda>")


TAKES_BLOCKS = "block_sequence_ids" in inspect.signature(masking_utils.create_causal_mask).parameters
VALUES = {
    "a window of one token more": ("sliding_window_overlay", longer, "window mask of plain"),
    "chunks that begin one token later": ("chunked_overlay", later, "chunk mask of plain"),
    "chunks that begin with a padded row": ("chunked_overlay", from_the_row, "chunk mask of padded"),
    "earlier documents are seen": ("packed_sequence_mask_function", earlier_documents_too, "full mask of packed"),
    "parts of which one must hold": ("and_masks", any_of, "full mask of packed"),
    "positions that are not the tokens'": ("remap_positions_for_packed_sequence", doubled, "window mask of packed"),
    "blocks that may be left out": ("ALL_MASK_ATTENTION_FUNCTIONS", Skipping(), "full mask of illustrated"),
}

LLAMA, MIXTRAL = LlamaAttention.forward, MixtralForCausalLM.forward
CHANGES = {
    "masks composed otherwise": (masking_utils, "and_masks", pairs),
    "packing described otherwise": (masking_utils, "packed_sequence_mask_function", other_cells),
    "packing not looked for": (masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
    "a window of one token less": (masking_utils, "sliding_window_overlay", shorter),
    "a cache with another name": (GenerationMixin, "prepare_inputs_for_generation", prepared),
    "an attention behind a decorator": (LlamaAttention, "forward", plain(LLAMA)),
    "an attention that hides its call": (LlamaAttention, "forward", hiding(LLAMA)),
    "a loss behind a decorator": (MixtralForCausalLM, "forward", plain(MIXTRAL)),
    "a layer that checkpoints otherwise": (GradientCheckpointingLayer, "__init_subclass__", classmethod(unwrapped)),
    "offsets with another name": (FlashAttentionKwargs, "__annotations__", {"offsets": torch.Tensor}),
}
SEEN = {
    **dict.fromkeys(list(CHANGES)[:4], "masks"),
    "a cache with another name": "cache_of_a_step",
    "an attention behind a decorator": "rotary_function attention",
    "an attention that hides its call": "rotary_function attention",
    "a loss behind a decorator": "load_balancing_loss",
    "a layer that checkpoints otherwise": "checkpointed_layer",
    "offsets with another name": "attention",
}


@identifier
def test_recognised(feature):
    for name in feature.names:
        assert name.problem() is None
    before = torch.random.get_rng_state()
    assert tried(feature) is None
    assert torch.equal(torch.random.get_rng_state(), before), "the user's random numbers stay the same"


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change, monkeypatch):
    monkeypatch.setattr(*CHANGES[change])
    told = {feature.canary.rpartition(":")[2] for feature in FEATURES if tried(feature)}
    assert told == set(SEEN[change].split())


@pytest.mark.skipif(not declared.EXPERT_EXCHANGE.applies, reason="transformers splits experts in another way")
def test_an_exchange_of_tokens_that_holds_other_names_is_seen(monkeypatch):
    from transformers.distributed import expert_parallel

    source = textwrap.dedent(inspect.getsource(expert_parallel.EpDispatchExpertsParallel.install_forward))
    renamed = source.replace("implementation(hidden", "way(hidden").replace("    implementation =", "    way =")
    assert renamed.count("way") == 2
    exec(renamed, vars(expert_parallel), changed := {})
    monkeypatch.setattr(expert_parallel.EpDispatchExpertsParallel, "install_forward", changed["install_forward"])
    assert tried(declared.EXPERT_EXCHANGE) == "the forward of experts that are split holds other variables than we know"


@pytest.mark.parametrize("change", VALUES)
def test_a_mask_with_other_values_is_seen_though_it_looks_the_same(change, monkeypatch):
    name, other, mask = VALUES[change]
    if not hasattr(masking_utils, name) or (mask.endswith("illustrated") and not TAKES_BLOCKS):
        pytest.skip("this transformers has no such masks")
    before = getattr(masking_utils, name)
    monkeypatch.setattr(masking_utils, name, other)
    if inspect.isfunction(before):
        known = masks._inner_code(before)
        names = [each for each in ("_AND", "_REMAPPED") if getattr(masks, each) is known]
        for each in names:
            monkeypatch.setattr(masks, each, inner_code(other))
        if not names:
            monkeypatch.setattr(masks, "_PARTS", {**masks._PARTS, inner_code(other): masks._PARTS[known]})
    assert tried(declared.RECOGNISED_MASKS) == f"the {mask} rows lets tokens see others than we think"


def test_it_is_said_once_and_in_the_doctor(monkeypatch, caplog):
    monkeypatch.setattr(masking_utils, "and_masks", pairs)
    feature, version = declared.RECOGNISED_MASKS, installed_version("transformers")
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        for _ in range(2):
            window = masking_utils.sliding_window_causal_mask_function(4)
            assert interface._pattern(window) is None
            assert interface._pattern(masking_utils.causal_mask_function) is not None, "which needs no recognition"
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(
        f"transformers {version}: the full mask of packed rows is composed in a way we do not know"
    )
    assert f"needs for {feature.text}" in message
    assert f"`pip install transformers=={TESTED['transformers']}`" in message
    (finding,) = [each for each in private_names() if each.status != "ok" and "composed" in each.text]
    assert finding.subject == f"transformers {version}"
    assert finding.status == "warning"
    assert feature.text in finding.text


def test_what_raises_is_a_change_too(monkeypatch):
    monkeypatch.setattr(canaries, "masks", lambda: LlamaForCausalLM.no_such_name)
    problem = tried(declared.RECOGNISED_MASKS)
    assert problem.startswith("trying it raises AttributeError: ")
    with pytest.raises(ImportError, match=r"trying it raises AttributeError: .*, which liger_trainer needs for tests"):
        require(Feature("tests", Private("transformers:Trainer"), canary="liger_trainer.tools.canaries:masks"))


def test_a_canary_runs_in_the_middle_of_a_forward(monkeypatch):
    """Where the rows are known, and nothing is read back, the canary still looks for packing."""
    from liger_trainer.head.step import Rows
    from tests.steps import step_with

    with step_with(rows=Rows()), torch.inference_mode(), torch.device("meta"):
        assert {feature.canary: tried(feature) for feature in FEATURES} == {f.canary: None for f in FEATURES}


@pytest.mark.parametrize("named", [name for name, value in vars(declared).items() if isinstance(value, Feature)])
def test_a_canary_is_a_function_of_ours(named):
    canary = getattr(declared, named).canary
    assert canary is None or callable(getattr(canaries, canary.removeprefix("liger_trainer.tools.canaries:")))
