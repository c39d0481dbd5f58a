"""Relations between settings that hold for any constants."""

import dataclasses
import json

import pytest

from liger_trainer.plan.activations import Precision, attention_saved, layer_memory
from liger_trainer.plan.estimate import estimate, host_bytes, moments
from liger_trainer.plan.settings import Setting, candidates, splits
from liger_trainer.plan.work import HeadSettings, Work, head_memory
from liger_trainer.tools.planning.inputs import read_inputs
from tests.plan import cases
from tests.plan.cases import GIB, counted, run_of

RUN = run_of("llama3-8b", 4096)


def total(run=RUN, **setting):
    return estimate(run, Setting(**setting)).total


def moment(name, run=RUN, **setting):
    return cases.moment(name, run, Setting(**setting))


def test_a_total_is_the_sum_of_its_parts_and_the_fullest_moment():
    memory = estimate(RUN, Setting())
    assert memory.total == sum(dataclasses.astuple(memory)[1:])
    assert memory.total == max(other.total for other in moments(RUN, Setting()))


def test_each_way_to_save_saves():
    assert total(batch=4) < total(batch=8)
    assert total(batch=4) < total(batch=4, checkpointing=False)
    assert total(batch=16, tiled_mlp=True) < total(batch=16)
    adapters = run_of("llama3-8b", 4096, rank=16)  # without gradients of the whole model, checkpoints decide
    sizes = [total(adapters, batch=4, offloading=fraction) for fraction in (1.0, 0.5, 0.0)]
    assert sizes == sorted(set(sizes))
    assert total(strategy="fsdp2", gpus=8) < total(strategy="fsdp2", gpus=4) < total(strategy="ddp", gpus=4)
    assert total(strategy="zero2", gpus=8) < total(strategy="ddp", gpus=8)


def test_a_base_in_4_bits_has_room_for_one_weight():
    run = run_of("llama3-8b", 4096, rank=16)
    four_bits = dataclasses.replace(run.parameters, dequantised=4096 * 14336)
    for setting in ({}, *({"strategy": name, "gpus": 2} for name in ("ddp", "zero2", "fsdp2"))):
        larger = total(dataclasses.replace(run, parameters=four_bits), **setting)
        assert larger - total(run, **setting) == 2 * 4096 * 14336


def test_adapters_of_peft_save_copies_and_dropout_its_masks():
    ours = run_of("llama3-8b", 4096, rank=16)
    hidden, intermediate, tokens, layers = 4096, 14336, 4096, 32

    def more(**changes):
        run = dataclasses.replace(ours, shape=dataclasses.replace(ours.shape, **changes))
        after, before = (moment("loss", one, checkpointing=False).total for one in (run, ours))
        return (after - before) / tokens / layers

    # Ours save the input of q, k, v and that of gate, up once each; those of o and down are saved anyway or recomputed.
    assert more(fused_adapters=False) == 2 * (2 * hidden + hidden + hidden + intermediate)
    assert more(adapter_dropout=True) == 3 * hidden + hidden + 2 * hidden + intermediate


@pytest.mark.parametrize(
    ("options", "fused", "dropout"),
    [
        ([], True, False),
        (["--lora_dropout", "0.1"], True, True),
        (["--liger_kernel_config", '{"lora": false}'], False, False),
        (["--use_liger_kernel", "false"], False, False),
        (["--load_in_8bit", "true"], False, False),
        (["--load_in_4bit", "true"], True, False),
    ],
    ids=str,
)
def test_a_recipe_says_how_its_adapters_run(options, fused, dropout):
    adapters = ["--use_peft", "true", "--lora_target_modules", "all-linear", "--lora_dropout", "0.0"]
    shape = read_inputs("quickstart", [*adapters, *options]).run.shape
    assert shape.adapted_down
    assert (shape.fused_adapters, shape.adapter_dropout) == (fused, dropout)


@pytest.mark.parametrize(
    ("options", "rebuilt"),
    [
        ([], True),
        (["--liger_kernel_config", '{"recompute_mlp": false}'], False),
        (["--use_liger_kernel", "false"], False),
    ],
    ids=str,
)
def test_a_recipe_says_whether_mlps_rebuild_their_product(options, rebuilt):
    assert read_inputs("quickstart", options).run.recompute_mlp is rebuilt


LLAMA2, GEMMA2, FALCON = (  # a class with SDPA, one without, and one that ours cannot replace
    json.dumps({"model_type": name, **{"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}})
    for name in ("llama", "gemma2", "falcon")
)


@pytest.mark.parametrize(
    ("options", "assumed"),
    [
        (["--model_config", LLAMA2], "liger_trainer"),
        (["--model_config", LLAMA2, "--attn_implementation", "auto"], "liger_trainer"),
        (["--model_config", LLAMA2, "--attn_implementation", "sdpa"], "liger_trainer"),
        (["--model_config", LLAMA2, "--attn_implementation", "eager"], "eager"),
        (["--model_config", LLAMA2, "--attn_implementation", "flash_attention_2"], "flash_attention_2"),
        (["--model_config", LLAMA2, "--liger_kernel_config", '{"attention": false}'], "sdpa"),
        (["--model_config", LLAMA2, "--use_liger_kernel", "false"], "sdpa"),
        (["--model_config", FALCON], "sdpa"),
        (["--model_config", GEMMA2], "liger_trainer"),
        (["--model_config", GEMMA2, "--attn_implementation", "eager"], "liger_trainer"),
        (["--model_config", GEMMA2, "--liger_kernel_config", '{"attention": false}'], "eager"),
    ],
    ids=str,
)
def test_a_recipe_says_which_attention_runs(options, assumed):
    assert read_inputs("quickstart", options).run.implementation == assumed


def saved_by_attention(implementation, length, **changes):
    """Bytes a token."""
    shape = dataclasses.replace(counted("gemma3-4b")[1], **changes)
    return attention_saved(shape, Precision(), length, implementation)


def test_our_attention_saves_what_flash_attention_does():
    """Queries and output, keys and values once, and a log-sum-exp: at any length, with and without a window."""
    shape = counted("gemma3-4b")[1]
    for length in (512, 4096):
        assert saved_by_attention("liger_trainer", length) == saved_by_attention("flash_attention_2", length)
        assert saved_by_attention("liger_trainer", length) == saved_by_attention("liger_trainer", 64)
    bare = {"qk_norm": False, "post_norms": False, "trained": False}
    numbers = 2 * shape.query + 2 * shape.key_value + 2 * shape.hidden  # with the inputs of both norms
    assert saved_by_attention("liger_trainer", 4096, **bare) == 2 * numbers + 4 * shape.heads


def test_our_attention_has_neither_the_mask_of_a_window_nor_the_matrix_of_eager_attention():
    shape, length = counted("gemma3-4b")[1], 4096
    assert shape.sliding_window < length
    ours, masked, eager = (
        layer_memory(shape, Precision(), length, length, implementation)
        for implementation in ("liger_trainer", "sdpa", "eager")
    )
    repeated = 2 * 2 * (shape.query - shape.key_value)
    assert masked.saved - ours.saved == length * repeated
    assert masked.working - ours.working >= length**2 * 3
    assert eager.saved - ours.saved == length * (repeated + shape.heads * (6 * length - 4))


def test_ddp_adds_its_buckets():
    one, many = moment("optimizer"), moment("optimizer", strategy="ddp", gpus=4)
    assert many.total - one.total == RUN.parameters.total.trained_bytes


def test_fsdp2_splits_fp32_weights_and_states():
    memory = moment("optimizer", strategy="fsdp2", gpus=4)
    assert memory.total == 16 * RUN.parameters.total.elements / 4


def test_fsdp2_leaves_bf16_weights_without_mixed_precision():
    run = dataclasses.replace(RUN, mixed=False, optim="liger_adamw")
    memory = moment("optimizer", run, strategy="fsdp2", gpus=4)
    assert memory.total * 4 / RUN.parameters.total.elements == pytest.approx(8.03, abs=0.01)


def test_accumulated_gradients_exist_from_the_start():
    assert moment("loss").gradients == 0
    assert moment("loss", accumulation=2).gradients == RUN.parameters.total.trained_bytes


def test_fp32_weights_under_autocast():
    run = dataclasses.replace(RUN, weight_bytes=4)
    assert moment("loss", run).buffers == 2 * RUN.parameters.total.trained  # autocast's copies
    assert moment("loss", run).activations == 2 * moment("loss").activations  # an fp32 residual stream
    assert moment("last layer", run).buffers == 0


def test_reference_and_generation():
    weights = RUN.parameters.total.bytes
    work = Work(length=4096, loss_length=4096, head=HeadSettings("log_probs"), reference_bytes=weights, generated=1)
    run = dataclasses.replace(RUN, work=work)
    assert moment("loss", run).reference == weights
    assert moment("loss", run, strategy="fsdp2", gpus=4).reference == weights / 4
    cache = 32 * 2 * 1024 * 2 * 4096 * 8  # layers, keys and values of 1024, bf16, tokens, sequences
    generated = moment("generation", run, batch=2, accumulation=4).generation
    assert cache < generated < 1.1 * cache
    assert not any(memory.moment == "generation" for memory in moments(RUN, Setting()))


def test_head():
    sizes = {"tokens": 8192, "hidden": 4096, "vocab": 128256, "compute": 2, "weight": 2}
    fused = head_memory(HeadSettings(), **sizes, trained=True)
    assert fused.peak == 512 * 2**20 + 2 * 8192 * 4096 * 2 + 128256 * 4096 * 2
    frozen = head_memory(HeadSettings("log_probs"), **sizes, trained=False)
    assert frozen.peak == 512 * 2**20 + 2 * 8192 * 4096 * 2 + 8192 * 4096 * 4
    assert head_memory(HeadSettings(fused=False, cross_entropy=False), **sizes, trained=True).peak > 11 * GIB
    assert head_memory(HeadSettings("none"), **sizes, trained=True).peak == 0
    retained = head_memory(HeadSettings("log_probs", retained=2**30), **sizes, trained=True)
    assert retained.peak == fused.peak + 2**30


def test_offloaded_inputs_wait_in_pinned_memory():
    assert host_bytes(RUN, Setting("ddp", 4, 2, offloading=0.5)) == 4 * 0.5 * 32 * 2 * 4096 * 4096 * 2
    assert host_bytes(RUN, Setting("ddp", 4, 2)) == 0
    assert host_bytes(RUN, Setting("ddp", 4, offloading=1.0), hosts=2) == 2 * 32 * 4096 * 4096 * 2, "of each host"


@pytest.mark.parametrize(("fraction", "inputs"), [(0.0, 32), (0.05, 30.4 + 1.6), (0.5, 16 + 5), (1.0, 5)])
def test_the_inputs_offloaded_last_are_still_on_the_gpu_at_the_loss(fraction, inputs):
    """Five layers' inputs, whatever the fraction, or as many as are offloaded."""
    one = moment("loss").activations / 32
    assert moment("loss", offloading=fraction).activations == pytest.approx(inputs * one)


def test_candidates_keep_the_samples_of_a_step():
    found = list(candidates(splits(4), batch=2, accumulation=6, tiles=True))
    assert {one.batch * one.accumulation for one in found} == {12}
    assert {one.strategy for one in found} == {"ddp", "zero2", "fsdp2"}
    assert {one.strategy for one in candidates(splits(1), 2, 6, True)} == {"single"}
    assert "fsdp2" not in {one.strategy for one in splits(4, quantised=True)}
    assert "zero2" not in {one.strategy for one in splits(4, zero2=False)}
    assert not any(one.tiled_mlp for one in candidates(splits(4), 2, 6, tiles=False))
    assert {one.batch for one in candidates(splits(4), 2, 6, True, fixed_batch=True)} == {2}


def test_gpus_that_share_sequences_or_matrices_take_each_other_s_samples():
    ways = splits(8, parts=(2, 4), matrices=(2, 8))
    found = list(candidates(ways, batch=2, accumulation=3, tiles=False))
    assert {(one.sequence_parts, one.tensor_parallel_size) for one in found} == {(1, 1), (2, 1), (4, 1), (1, 2), (1, 8)}
    assert {one.batch * one.accumulation / one.sharing for one in found} == {6}


def test_copies_of_a_split_model_are_whole_hosts_or_whole_parts_of_one():
    assert not any(one.replicas > 1 for one in splits(16))
    assert {one.shards for one in splits(24, 3) if one.strategy == "fsdp2"} == {2, 4, 8, 24}
    assert {one.shards for one in splits(32, 4) if one.strategy == "fsdp2"} == {2, 4, 8, 16, 32}
    assert {one.tensor_parallel_size for one in splits(32, 4, matrices=(2, 4, 8, 16))} == {1, 2, 4, 8}, "within a host"
