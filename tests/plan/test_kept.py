"""What checkpointed layers keep under `activation_memory`: which results, of which layers, and what a step takes."""

import dataclasses

import pytest

from liger_trainer.plan.estimate import (
    Result,
    attended_tokens,
    estimate,
    keep,
    kept,
    largest_activation_memory,
    layer_results,
    moments,
    most,
)
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.speed import step_time
from liger_trainer.recipe.file import RecipeError
from liger_trainer.tools.planning.inputs import read_inputs
from liger_trainer.tools.planning.report import (
    activation_memory_rows,
    activation_memory_table,
    changed_keys,
    make_plan,
    written_setting,
)
from tests.plan.cases import GIB, cluster, counted, moment, run_of

RUN = run_of("llama3-8b", 4096)
FOUR = Setting(batch=4)
GB = 10**9


def with_budget(size, setting=FOUR, **changes):
    return dataclasses.replace(setting, activation_memory=size, **changes)


def bytes_a_token(name, length=4096, rank=0, **changes):
    shape = dataclasses.replace(counted(name, rank=rank)[1], **changes)
    return {result.name: result.bytes for result in layer_results(shape, 2, length) if result.can_be_kept}


@pytest.mark.parametrize("rank", [0, 16])
def test_bytes_of_llama(rank):
    """As the results of the matmuls and of attention in a recomputed layer, with and without adapters."""
    expected = {"residual": 8192, "attention": 8320, "q, k, v": 12288, "gate, up": 57344}
    assert bytes_a_token("llama3-8b", rank=rank) == expected


def test_bytes_of_a_mixture_of_experts():
    shape = counted("qwen3-30b-a3b", 12)[1]
    sizes = bytes_a_token("qwen3-30b-a3b")
    assert sizes["experts"] == 4 * shape.experts_per_token * shape.expert_intermediate
    assert "gate, up" not in sizes
    assert bytes_a_token("qwen3-30b-a3b", intermediate=512)["gate, up"] == 4 * 512  # of an expert for all tokens
    assert "experts" not in bytes_a_token("qwen3-30b-a3b", fused_experts=False)


@pytest.mark.parametrize(
    ("implementation", "tiled", "names"),
    [
        ("liger_trainer", False, {"residual", "attention", "q, k, v", "gate, up"}),
        ("sdpa", False, {"residual", "attention", "q, k, v", "gate, up"}),
        ("eager", False, {"residual", "q, k, v", "gate, up"}),
        ("liger_trainer", True, {"residual", "attention", "q, k, v"}),
    ],
)
def test_what_can_be_kept(implementation, tiled, names):
    found = layer_results(RUN.shape, 2, 4096, implementation, tiled)
    assert {result.name for result in found if result.can_be_kept} == names
    assert len(found) == 4  # all of them take time


@pytest.mark.parametrize(
    ("window", "full", "length", "attended"),
    [
        (None, 1.0, 4096, 2048),
        (4096, 0.0, 4096, 2048),
        (8192, 0.0, 4096, 2048),
        (2, 0.0, 1000, 1.998),  # the first token sees half as much
        (1024, 0.5, 4096, (2048 + 896) / 2),
    ],
)
def test_tokens_that_a_token_attends_to(window, full, length, attended):
    shape = dataclasses.replace(RUN.shape, sliding_window=window, full_layers=full)
    assert attended_tokens(shape, length) == pytest.approx(attended)


def test_the_time_of_attention_grows_with_the_length():
    short, long = ({r.name: r.time for r in layer_results(RUN.shape, 2, length)} for length in (4096, 65536))
    assert long["attention"] == 16 * short["attention"]
    assert all(long[name] == short[name] for name in short if name != "attention")
    assert short["residual"] == 2 * 4096**2


SLOW, FAST, SMALL = Result("slow", 10, 10), Result("fast", 10, 50), Result("small", 4, 4)


@pytest.mark.parametrize(
    ("budget", "layers"),
    [
        (0, {"slow": 0, "fast": 0, "small": 0}),
        (19, {"slow": 0, "fast": 0, "small": 2}),  # what is left takes what is small enough
        (20, {"slow": 0, "fast": 1, "small": 0}),
        (60, {"slow": 0, "fast": 3, "small": 0}),  # the best of all layers
        (99, {"slow": 1, "fast": 3, "small": 2}),  # of two equal ones the first
        (10**6, {"slow": 3, "fast": 3, "small": 3}),
    ],
)
def test_the_most_time_a_byte_comes_first(budget, layers):
    found = keep([SLOW, FAST, SMALL], layers=3, tokens=2, budget=budget)
    sizes = {"slow": 20, "fast": 20, "small": 8}
    assert found.layers == layers
    assert found.bytes == sum(sizes[name] * count for name, count in layers.items()) <= max(budget, 0)
    assert found.in_last == sum(sizes[name] for name, count in layers.items() if count)
    times = {"slow": 10, "fast": 50, "small": 4}
    assert found.saved == pytest.approx(sum(times[name] * count for name, count in layers.items()) / (3 * 64))


def test_what_cannot_be_kept_is_computed_again():
    found = keep([FAST, dataclasses.replace(SLOW, can_be_kept=False)], 2, 1, 10**6)
    assert found.layers == {"fast": 2, "slow": 0}
    assert found.saved == 50 / 60
    assert found.bytes == 20 == most([FAST, dataclasses.replace(SLOW, can_be_kept=False)], 2, 1)


def test_more_memory_never_saves_less():
    found = [keep(layer_results(RUN.shape, 2, 4096), 32, 16384, size * GIB) for size in range(50)]
    assert [one.saved for one in found] == sorted(one.saved for one in found)
    assert found[0].saved == 0
    assert found[-1].saved == 1
    assert found[-1].bytes == 32 * 16384 * (8192 + 8320 + 12288 + 57344)


def test_kept_bytes_are_all_there_at_the_loss_and_none_at_the_end():
    budget = with_budget(20 * GIB)
    results = kept(RUN, budget)
    assert 19 * GIB < results.bytes <= 20 * GIB
    more = {
        with_.moment: with_.total - without.total
        for with_, without in zip(moments(RUN, budget), moments(RUN, FOUR), strict=True)
    }
    assert more["loss"] == results.bytes
    assert more["last layer"] == results.bytes - results.in_last  # its own are in the memory of a layer at work
    assert {more[name] for name in ("first layer", "embedding", "optimizer")} == {0}


def test_with_one_micro_batch_some_bytes_are_free_and_with_accumulation_none_are():
    peak = estimate(RUN, FOUR)
    assert peak.moment == "first layer"
    assert estimate(RUN, with_budget(8 * GIB)).total == peak.total
    accumulated = Setting(batch=4, accumulation=2)
    assert estimate(RUN, accumulated).moment != "first layer"
    more = estimate(RUN, with_budget(8 * GIB, accumulated)).total - estimate(RUN, accumulated).total
    assert more > 6 * GIB


def test_layers_that_are_not_checkpointed_keep_nothing():
    whole = Setting(batch=4, checkpointing=False)
    assert kept(RUN, with_budget(20 * GIB, whole)).bytes == 0
    assert largest_activation_memory(RUN, whole, 1000 * GIB) == 0
    third = dataclasses.replace(RUN, checkpoint_every=3)
    assert set(kept(third, with_budget(1000 * GIB)).layers.values()) == {11}
    more = moment("last layer", third, with_budget(GIB)).total - moment("last layer", third, FOUR).total
    assert more == kept(third, with_budget(GIB)).bytes  # the last layer saves everything by itself


@pytest.mark.parametrize("room", [62, 64, 80, 90])
def test_auto_takes_what_is_left(room):
    size = largest_activation_memory(RUN, FOUR, room * GIB)
    assert estimate(RUN, with_budget(size)).total <= room * GIB
    assert estimate(RUN, with_budget(size + 3 * 10**8)).total > room * GIB  # the smallest result, in one layer: 0.13


def test_auto_takes_at_most_all_and_nothing_where_nothing_fits():
    everything = 32 * 16384 * (8192 + 8320 + 12288 + 57344)
    assert largest_activation_memory(RUN, FOUR, 141 * GIB) == everything
    assert largest_activation_memory(RUN, FOUR, 60 * GIB) == 0


@pytest.mark.parametrize(
    ("rank", "size", "faster"), [(0, 7.938, 1.046), (0, 27.875, 1.138), (0, 59.066, 1.225), (16, 100, 1.301)]
)
def test_how_much_faster(rank, size, faster):
    """Relative to full checkpointing, as in `activation-memory-llama.json` and `alone/keep-lora.json`."""
    run = dataclasses.replace(run_of("llama3-8b", 4096, rank=rank), implementation="liger_trainer")
    times = [step_time(run, setting, cluster()).token for setting in (FOUR, with_budget(int(size * GIB)))]
    assert times[0] / times[1] == pytest.approx(faster, abs=0.025)


def test_everything_kept_is_as_fast_as_no_checkpointing():
    everything = with_budget(largest_activation_memory(RUN, FOUR, 141 * GIB))
    assert kept(RUN, everything).saved == 1
    whole = dataclasses.replace(FOUR, checkpointing=False)
    assert step_time(RUN, everything, cluster()).token == pytest.approx(step_time(RUN, whole, cluster()).token)


def plan_of(recipe, memory, *options):
    inputs = read_inputs(recipe, options)
    return inputs, make_plan(inputs, cluster(1), memory)


def test_a_recipe_s_budget_is_that_of_its_checkpointed_rows():
    _, without = plan_of("llama3_8b_sft", 100 * GB)
    inputs, plan = plan_of("llama3_8b_sft", 100 * GB, "--activation_memory", "4GiB")
    assert inputs.activation_memory == 4 * GIB
    assert {row.setting.activation_memory for row in plan.rows if row.setting.checkpointing} == {4 * GIB}
    assert {row.setting.activation_memory for row in plan.rows if not row.setting.checkpointing} == {0}
    assert plan.written.memory.total - without.written.memory.total == kept(inputs.run, plan.written.setting).bytes
    assert plan.written.cost < without.written.cost


def test_a_budget_is_switched_off_with_checkpointing():
    inputs, plan = plan_of("llama3_8b_sft", 1000 * GB, "--activation_memory", "auto")
    assert not plan.best.setting.checkpointing
    assert changed_keys(inputs, plan.best.setting)["activation_memory"] == 0
    checkpointed = next(row.setting for row in plan.rows if row.setting.checkpointing)
    assert "activation_memory" not in changed_keys(inputs, checkpointed)


def test_auto_fits_wherever_no_budget_does():
    for memory in (70 * GB, 80 * GB, 100 * GB):
        _, without = plan_of("llama3_8b_sft", memory)
        inputs, plan = plan_of("llama3_8b_sft", memory, "--activation_memory", "auto")
        assert plan.written.fits == without.written.fits
        assert bool(plan.written.setting.activation_memory) == plan.written.fits
        assert written_setting(inputs, 1).activation_memory == 0  # a plan decides, not the recipe


@pytest.mark.parametrize("value", ["-1", "20 lots"])
def test_a_budget_that_is_none(value):
    with pytest.raises(RecipeError, match="`activation_memory` is"):
        read_inputs("llama3_8b_sft", [f"--activation_memory={value}"])


def test_the_table_of_budgets():
    inputs, plan = plan_of("llama3_8b_sft", 100 * GB)
    rows = activation_memory_rows(inputs.run, plan)
    sizes = [row.setting.activation_memory for row in rows]
    assert sizes == [0, 4 * GIB, 8 * GIB, largest_activation_memory(inputs.run, plan.written.setting, plan.room)]
    assert rows[0] == plan.written
    assert all(row.fits for row in rows)
    assert [row.cost for row in rows] == sorted((row.cost for row in rows), reverse=True)
    names, peaks, _, speeds, _ = ([*column.cells] for column in activation_memory_table(inputs.run, rows).columns)
    assert names == ["0", "4GiB", "8GiB", f"auto, {sizes[-1] / GIB:.1f}GiB"]
    assert peaks[0] == f"{plan.written.memory.total / GIB:.1f}"
    assert speeds[0] == "1.00 ×"
    assert speeds[-1] == f"{rows[0].cost / rows[-1].cost:.2f} ×"


def test_the_table_is_for_a_setting_that_is_checkpointed_and_fits():
    inputs, plan = plan_of("llama3_8b_sft", 100 * GB, "--gradient_checkpointing", "false")
    rows = activation_memory_rows(inputs.run, plan)
    assert rows[0].setting.checkpointing
    assert rows[0].cost == min(row.cost for row in plan.rows if row.fits and row.setting.checkpointing)
    inputs, plan = plan_of("llama3_8b_sft", 20 * GB)
    assert activation_memory_rows(inputs.run, plan) == []
