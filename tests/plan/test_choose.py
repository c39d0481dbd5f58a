"""The recommended setting is the fastest that fits, and its command sets the recipe so."""

import dataclasses

import pytest

from liger_trainer.plan.estimate import estimate
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.speed import step_time
from liger_trainer.recipe.file import RecipeError, find_recipe
from liger_trainer.tools.planning.inputs import read_inputs
from liger_trainer.tools.planning.report import (
    changed_keys,
    command,
    gpus_that_fit,
    least,
    make_plan,
    memory_table,
    written_setting,
)
from tests.plan.cases import cluster

GB = 10**9


def plan_of(recipe, gpus=1, memory=80 * GB, *options):
    inputs = read_inputs(recipe, options, gpus)
    return inputs, make_plan(inputs, cluster(gpus), memory)


@pytest.mark.parametrize(
    ("recipe", "gpus"),
    [
        ("llama3_8b_sft", 1),
        ("llama3_8b_sft", 4),
        ("llama3_8b_dpo_lora", 1),
        ("llama3_8b_grpo", 8),
        ("gemma3_4b_kto", 2),
    ],
)
def test_the_command_sets_the_recipe_as_recommended(recipe, gpus):
    inputs, plan = plan_of(recipe, gpus, 100 * GB)
    assert plan.best.memory.total <= plan.room
    assert plan.best.cost == min(row.cost for row in plan.rows if row.fits)
    line = command(inputs, plan.best.setting, recipe)
    start = line.index("--num_processes") + 2 if gpus > 1 else line.index("--accelerate_config") + 2
    changed = read_inputs(recipe, line[start:], gpus)
    strategy = plan.best.setting.strategy
    assert written_setting(changed, gpus).__dict__ | {"strategy": strategy} == plan.best.setting.__dict__


def test_layers_that_every_n_layers_leaves_out_save_their_activations():
    options = ["--per_device_train_batch_size", "4"]
    totals = []
    for more in (
        ["--gradient_checkpointing", "true"],
        ["--gradient_checkpointing", "true", "--gradient_checkpointing_kwargs", '{"every_n_layers": 3}'],
        ["--activation_checkpointing", "true", "--activation_checkpointing_kwargs", '{"every_n_layers": 2}'],
        ["--gradient_checkpointing", "false"],
    ):
        inputs = read_inputs("llama3_8b_sft", [*options, *more])
        totals.append(estimate(inputs.run, written_setting(inputs, 1)).total)
        assert any("every_n_layers" in note for note in inputs.notes) == (len(more) > 2)
    every, third, half, none = totals
    layer = (none - every) / 32
    assert 15 * layer < half - every < 17 * layer
    assert 20 * layer < third - every < 22 * layer  # 11 of 32 are checkpointed


@pytest.mark.parametrize("value", ["0", "-1", "1.5", '"two"', "true"])
def test_every_n_layers_that_is_not_a_count(value):
    settings = f'{{"every_n_layers": {value}}}'
    with pytest.raises(RecipeError, match=r"`gradient_checkpointing_kwargs` has `every_n_layers: .*1 or more"):
        read_inputs("llama3_8b_sft", ["--gradient_checkpointing_kwargs", settings])


@pytest.mark.parametrize("as_file", [False, True])
def test_gradients_that_are_reduced_after_every_micro_batch(tmp_path, as_file):
    config = '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
    if as_file:
        (tmp_path / "accelerator.json").write_text(config)
        config = str(tmp_path / "accelerator.json")
    setting = Setting("fsdp2", 8, 1, 2)
    last, each = (
        estimate(read_inputs("llama3_8b_sft", more).run, setting).total
        for more in ([], ["--accelerator_config", config])
    )
    assert last - each > 10 * GB  # 16 GB in bf16, less the shards that exist anyway


@pytest.mark.parametrize("value", ["[1]", "nowhere.json"])
def test_an_accelerator_config_that_cannot_be_read(value):
    with pytest.raises(RecipeError, match="`accelerator_config`"):
        read_inputs("llama3_8b_sft", ["--accelerator_config", value])


def test_the_newer_name_of_checkpointing_is_read_and_written():
    inputs, plan = plan_of("llama3_8b_sft", 1, 1000 * GB, "--activation_checkpointing", "true")
    assert written_setting(inputs, 1).checkpointing
    assert not plan.best.setting.checkpointing
    assert changed_keys(inputs, plan.best.setting)["activation_checkpointing"] is False


def test_options_of_the_kernels_stay():
    options = ["--liger_kernel_config", '{"rope": false}', "--activation_offloading", "true"]
    inputs, plan = plan_of("llama3_8b_sft", 1, 80 * GB, *options)
    tiled = next(row.setting for row in plan.rows if row.setting.tiled_mlp and not row.setting.offloading)
    keys = changed_keys(inputs, tiled)
    assert keys["liger_kernel_config"] == {"rope": False, "tiled_mlp": True}
    assert keys["activation_offloading"] is False


def test_the_command_repeats_the_given_options():
    options = ["--max_length", "2048", "--activation_offloading=true", "--accelerate_config", "ddp", "--seed", "3"]
    inputs, plan = plan_of("llama3_8b_sft", 1, 80 * GB, *options[:3])
    stays = next(row.setting for row in plan.rows if not row.setting.offloading)
    line = command(inputs, stays, "llama3_8b_sft", options)
    assert line[3:5] == ["--accelerate_config", "single_gpu"], "planned for one GPU"
    assert line[5:9] == ["--max_length", "2048", "--seed", "3"]
    assert line.count("--accelerate_config") == 1
    assert "--activation_offloading=true" not in line
    assert line[line.index("--activation_offloading") + 1] == "false"


def test_more_memory_is_never_slower():
    costs = []
    for memory in (70, 80, 100, 141):
        best = plan_of("llama3_8b_sft", 1, memory * GB)[1].best
        costs.append(best.cost if best else float("inf"))
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) > 1


def test_where_nothing_fits():
    inputs, plan = plan_of("qwen3_30b_a3b_dpo", 2, 80 * GB, "--expert_parallel_size", "1")
    assert plan.best is None
    assert least(inputs, cluster(2)).memory.total == min(row.memory.total for row in plan.rows)
    gpus = gpus_that_fit(inputs, cluster(2), 80 * GB)
    assert make_plan(inputs, cluster(gpus), 80 * GB).best is not None
    assert make_plan(inputs, cluster(gpus // 2), 80 * GB).best is None


def test_deepspeed_is_not_proposed_for_liger_adamw():
    """Which it refuses: it has fp32 weights of its own."""
    found = {}
    for options in ([], ["--optim", "adamw_torch_fused", "--bf16", "true"]):
        inputs, plan = plan_of("llama3_8b_sft", 4, 80 * GB, *options)
        found[bool(options)] = {row.setting.strategy for row in plan.rows}
        assert not any("the weights fp32" in note for note in inputs.notes)
    always = {"ddp", "fsdp2", "tensor_parallel"}
    assert found == {False: always, True: always | {"zero2"}}
    inputs, _ = plan_of("llama3_8b_sft", 4, 80 * GB, "--bf16", "true")
    assert any("accelerate makes the weights fp32" in note for note in inputs.notes)


def test_fp8_is_faster_where_it_runs():
    """In the memory of bf16; not with adapters, nor on a GPU without it."""
    fp8 = ["--fp8", "rowwise"]
    plain, faster = (plan_of("llama3_8b_sft", 1, 141 * GB, *more)[1].written for more in ([], fp8))
    assert faster.memory == plain.memory
    assert 1.2 < plain.cost / faster.cost < 1.4
    assert plan_of("llama3_8b_sft_lora", 1, 80 * GB, *fp8)[0].run.fp8 is None
    run = plan_of("llama3_8b_sft", 1, 141 * GB, *fp8)[0].run
    older = cluster(card="A100")
    assert step_time(run, plain.setting, older) == step_time(dataclasses.replace(run, fp8=None), plain.setting, older)
    base = dataclasses.replace(run, fp8=None, fp8_base=True)
    assert step_time(base, plain.setting, older) == step_time(dataclasses.replace(run, fp8=None), plain.setting, older)


@pytest.mark.parametrize(
    ("recipe", "options", "scored"),
    [
        ("llama3_8b_sft", [], 0),
        ("llama3_8b_dpo_lora", [], 1),
        ("llama3_8b_dpo_lora", ["--precompute_ref_log_probs", "true"], 0),
        ("llama3_8b_kto", [], 3),
        ("llama3_8b_kto", ["--precompute_ref_log_probs", "true"], 1),
        ("llama3_8b_kto", ["--loss_type", "apo_zero_unpaired"], 1),
        ("llama3_8b_grpo", ["--use_vllm", "false", "--beta", "0"], 0),
        ("llama3_8b_grpo", ["--use_vllm", "false", "--beta", "0.1"], 1),
        ("llama3_8b_grpo", ["--use_vllm", "false", "--beta", "0", "--num_iterations", "2"], 0.5),
        ("llama3_8b_grpo", ["--use_vllm", "true", "--beta", "0"], 1),
    ],
)
def test_forwards_without_gradients(recipe, options, scored):
    assert plan_of(recipe, 1, 141 * GB, *options)[0].run.work.scored == scored


def test_batches_that_are_part_of_the_loss_stay():
    inputs, plan = plan_of("llama3_8b_grpo", 1)
    assert {row.setting.batch for row in plan.rows} == {inputs.values["per_device_train_batch_size"]}


def test_a_reference_is_a_second_model_unless_there_are_adapters():
    full, _ = plan_of("llama3_8b_dpo")
    lora, _ = plan_of("llama3_8b_dpo_lora")
    assert full.run.work.reference_bytes == full.run.parameters.total.bytes
    assert lora.run.work.reference_bytes == 0
    assert full.run.work.rows == lora.run.work.rows == 2


def test_vllm_takes_its_share():
    options = ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", "0.3"]
    _, alone = plan_of("llama3_8b_grpo", 1, 80 * GB)
    inputs, shared = plan_of("llama3_8b_grpo", 1, 80 * GB, *options)
    assert alone.room - shared.room == pytest.approx(0.3 * 80 * GB)
    assert inputs.run.work.generated == 0


@pytest.mark.parametrize(
    ("recipe", "options", "gpus", "words"),
    [
        ("qwen3_30b_a3b_sft_fsdp2", [], 8, "FSDP2"),
        ("qwen3_30b_a3b_sft_fsdp2", ["--expert_parallel_size", "4"], 8, "EP of 4"),
        ("qwen3_30b_a3b_sft_fsdp2", [], 1, "one GPU"),
        ("qwen3_30b_a3b_sft_zero3", [], 8, "DDP"),  # ZeRO-3 is not planned
        ("qwen3_30b_a3b_sft", ["--accelerate_config", "zero2"], 8, "ZeRO-2"),
        ("qwen3_30b_a3b_sft", [], 8, "DDP"),
    ],
)
def test_a_recipe_as_written_is_split_as_it_says(recipe, options, gpus, words):
    (names, *_) = memory_table(plan_of(recipe, gpus, 80 * GB, *options)[1], "").columns
    assert next(names.cells) == f"as written, {words}"


def test_experts_in_4_bits_are_proposed_whole():
    for room in (80 * GB, 24 * GB):
        _, plan = plan_of("qwen3_30b_a3b_sft_qlora", 4, room)
        assert {row.setting.strategy for row in plan.rows} == {"ddp"}


def test_a_base_in_fp8_is_proposed_whole():
    _, plan = plan_of("llama3_8b_sft_lora", 4, 24 * GB, "--fp8_base", "true")
    assert {row.setting.strategy for row in plan.rows} == {"ddp"}


def test_the_comment_of_the_quantised_mixture_says_what_is_planned():
    recipe = "qwen3_30b_a3b_sft_qlora"
    written = plan_of(recipe, 1, 32 * GB)[1].written
    memory, comment = written.memory, find_recipe(recipe).read_text().partition("if __import__")[0]
    assert written.fits
    assert f"weights and adapters are {memory.weights / 2**30:.0f} GiB" in comment
    assert f"gradients and states of the adapters {(memory.gradients + memory.optimizer) / 2**30:.0f};" in comment
    assert f"{memory.total / 2**30:.0f} GiB by liger-trainer plan" in comment
