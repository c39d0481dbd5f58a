"""What is recognised by its shape, in the installed libraries and in ones that have changed it without a word."""

import functools
import logging

import pytest
import torch
from transformers import GenerationMixin, LlamaForCausalLM, MixtralForCausalLM, masking_utils
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaAttention

from liger_trainer import canaries
from liger_trainer.attention import masks
from liger_trainer.cli.doctor import private_names
from liger_trainer.compat import features, private
from liger_trainer.compat import transformers as declared
from liger_trainer.compat.private import TESTED, Feature, Private, available, installed_version, require, tried

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


def test_it_is_said_once_and_in_the_doctor(monkeypatch, caplog):
    monkeypatch.setattr(masking_utils, "and_masks", pairs)
    feature, version = declared.RECOGNISED_MASKS, installed_version("transformers")
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        for _ in range(2):
            window = masking_utils.sliding_window_causal_mask_function(4)
            assert masks._pattern(window) is None
            assert masks._pattern(masking_utils.causal_mask_function) is not None, "which needs no recognition"
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
        require(Feature("tests", Private("transformers:Trainer"), canary="liger_trainer.canaries:masks"))


def test_a_canary_runs_in_the_middle_of_a_forward(monkeypatch):
    """Where the rows are known, and nothing is read back, the canary still looks for packing."""
    from liger_trainer.attention.known_rows import KnownRows, _rows
    from liger_trainer.context_variables import set_to

    with set_to(_rows, KnownRows()), torch.inference_mode(), torch.device("meta"):
        assert {feature.canary: tried(feature) for feature in FEATURES} == {f.canary: None for f in FEATURES}


@pytest.mark.parametrize("named", [name for name, value in vars(declared).items() if isinstance(value, Feature)])
def test_a_canary_is_a_function_of_ours(named):
    canary = getattr(declared, named).canary
    assert canary is None or callable(getattr(canaries, canary.removeprefix("liger_trainer.canaries:")))
