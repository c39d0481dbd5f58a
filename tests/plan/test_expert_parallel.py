"""Expert parallelism: its plan, and that a recipe runs as the plan proposes."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig

from liger_trainer.benchmarks.models import MODELS
from liger_trainer.benchmarks.operations.moe import cases
from liger_trainer.benchmarks.registry import Data
from liger_trainer.kernels.moe.experts import moe_experts
from liger_trainer.patching.moe.expert_parallel import run_exchanged
from liger_trainer.plan.activations import Precision, layer_memory, mlp_saved
from liger_trainer.plan.estimate import _head, estimate
from liger_trainer.plan.running import _copies, _strategy
from liger_trainer.plan.settings import Setting, splits
from liger_trainer.plan.speed import step_time
from liger_trainer.plan.splitting import held
from liger_trainer.plan.traffic import traffic
from liger_trainer.recipe import load_recipe
from liger_trainer.recipe.file import RecipeError, find_recipe, read_recipe
from liger_trainer.recipe.known_models import PUBLISHED
from liger_trainer.recipe.model import check_model, make_config, model_kwargs
from liger_trainer.tools.planning.inputs import read_inputs
from liger_trainer.tools.planning.report import command, make_plan, recommendation, way, written_setting
from tests.plan.cases import cluster, counted, moment, run_of
from tests.plan.test_experts import CHOSEN, ELEMENTS, HIDDEN, INTERMEDIATE, QWEN, saved_bytes

LAYERS = 48
RECIPE = "qwen3_30b_a3b_sft_ep"
EIGHT = Setting("expert_parallel", 8, 2, expert_parallel_size=8)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_autograd_saves_as_much_of_an_exchange_as_planned(frozen, one_process):
    """A group of one: every row comes back to the process that sent it, as many as from even choices."""
    tokens, model = 64, MODELS["tiny-moe"]
    trained_case, frozen_case, _ = cases(Data(torch.device("cpu"), torch.bfloat16), model, tokens)
    arguments = (frozen_case if frozen else trained_case).arguments

    def exchanged(hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, **_):
        experts = functools.partial(moe_experts, gate_up_weight=gate_up_proj, down_weight=down_proj)
        return run_exchanged(experts, hidden, top_k_index, top_k_weights, len(down_proj), one_process)

    _, shape = counted("tiny-moe")
    shape = dataclasses.replace(shape, trained=not frozen, exchanged_experts=True)
    planned = tokens * mlp_saved(shape, Precision())
    if not frozen:
        planned -= 2 * tokens * model.hidden  # the input of a router; there is none here
    assert saved_bytes(exchanged, arguments) == planned


def test_bytes_a_token_of_qwen():
    _, shape = counted(QWEN)
    exchanged = dataclasses.replace(shape, exchanged_experts=True)
    rows = 2 * CHOSEN * HIDDEN
    assert mlp_saved(exchanged, Precision()) == 2 * HIDDEN + rows + 4 * CHOSEN * INTERMEDIATE
    stock, exchanged_stock = (dataclasses.replace(one, fused_experts=False) for one in (shape, exchanged))
    assert mlp_saved(exchanged_stock, Precision()) - mlp_saved(stock, Precision()) == rows


def test_the_backward_holds_arrived_and_sorted_rows():
    _, shape = counted(QWEN)
    rows = 2 * CHOSEN * HIDDEN

    def a_token(elements, **changes):
        one = dataclasses.replace(shape, **changes)
        sizes = [layer_memory(one, Precision(), 2**17 + more, 4096, expert_elements=elements) for more in (0, 1)]
        return sizes[1].working - sizes[0].working

    begin = a_token(ELEMENTS, exchanged_experts=True) - a_token(ELEMENTS)
    assert begin == 2 * rows  # what arrived in the forward, and what arrives in the backward
    end = a_token(10**12, exchanged_experts=True) - a_token(10**12)
    assert end == 2 * rows - 2 * HIDDEN  # input and its gradient, in place of one of them a token


def test_everything_is_split_over_all_gpus_in_its_dtype():
    run = run_of(QWEN, 4096)
    for sharing in (2, 4, 8):
        memory = moment("optimizer", run, dataclasses.replace(EIGHT, expert_parallel_size=sharing))
        assert memory.total == pytest.approx(8 * run.parameters.total.elements / 8)


def test_only_the_experts_of_this_gpu_are_whole():
    run = run_of(QWEN, 4096)
    buffers = {
        sharing: moment("last layer", run, dataclasses.replace(EIGHT, expert_parallel_size=sharing)).buffers
        for sharing in (4, 8)
    }
    assert buffers[4] - buffers[8] == pytest.approx(2 * 2 * ELEMENTS * (1 / 4 - 1 / 8))  # weights, gradients
    assert estimate(run, EIGHT).total < estimate(run, Setting("fsdp2", 8, 2)).total / 1.5  # which upcasts to fp32


def test_adapters_are_whole_on_every_gpu():
    run = run_of(QWEN, 4096, rank=16)
    total = run.parameters.total
    memory = moment("optimizer", run, EIGHT)
    assert memory.total == pytest.approx(total.frozen_bytes / 8 + 4 * total.trained_bytes)


def test_copies_of_autocast():
    """Linear layers' stay for the forward, those of experts for their layer."""
    run = dataclasses.replace(run_of(QWEN, 4096), weight_bytes=4)
    memory, without = moment("loss", run, EIGHT), held(run, EIGHT, _head(run, EIGHT).weight_gradient).loss_buffers
    total, experts = run.parameters.total.trained, run.parameters.groups["experts"].trained
    assert experts == LAYERS * ELEMENTS
    assert memory.buffers - without == 2 * (total - experts + ELEMENTS // 8)
    unchecked = dataclasses.replace(EIGHT, checkpointing=False)
    copies = 2 * (total - experts + experts // 8)
    assert moment("loss", run, unchecked).buffers - moment("optimizer", run, EIGHT).buffers > copies


def test_rows_are_sent_for_each_token_and_weights_once_a_step():
    hosts, run = cluster(8), run_of(QWEN, 4096)

    def rows(setting):
        return traffic(run, setting, hosts).activations.within

    assert rows(EIGHT) == EIGHT.batch * 4096 * 5 * CHOSEN * 2 * HIDDEN * LAYERS * 7 / 8
    assert rows(dataclasses.replace(EIGHT, checkpointing=False)) == rows(EIGHT) * 4 / 5
    assert rows(Setting("fsdp2", 8)) == 0

    def cost(setting, batch):
        return step_time(run_of(QWEN, 1024), dataclasses.replace(setting, batch=batch), hosts).token

    split, fewer = Setting("fsdp2", 8), dataclasses.replace(EIGHT, expert_parallel_size=2)
    assert cost(EIGHT, 1) < cost(fewer, 1) < cost(split, 1)  # copies of experts are gathered and reduced
    assert cost(EIGHT, 64) > cost(fewer, 64) > cost(split, 64)


@pytest.mark.parametrize(
    ("gpus", "experts", "quantised", "sizes"),
    [
        (8, 128, False, {2, 4, 8}),
        (6, 128, False, {2}),
        (8, 0, False, set()),
        (8, 128, True, set()),
        (1, 128, False, set()),
    ],
)
def test_sizes_divide_gpus_and_experts(gpus, experts, quantised, sizes):
    found = splits(gpus, quantised=quantised, experts=experts)
    assert {one.expert_parallel_size for one in found if one.strategy == "expert_parallel"} == sizes


@pytest.mark.parametrize(
    ("recipe", "options", "proposed"),
    [
        (RECIPE, [], True),
        ("qwen3_30b_a3b_sft_fsdp2", [], True),
        ("qwen3_30b_a3b_sft", [], True),
        ("qwen3_30b_a3b_sft_lora", [], False),
        ("qwen3_30b_a3b_sft", ["--load_in_4bit", "true"], False),
        ("qwen3_30b_a3b_grpo", ["--use_vllm", "true", "--expert_parallel_size", "1"], False),
        ("llama3_8b_sft", [], False),
    ],
)
def test_a_recipe_runs_as_proposed(tmp_path, monkeypatch, recipe, options, proposed):
    make_config(PUBLISHED[read_recipe(find_recipe(recipe))["model_name_or_path"]], recipe).save_pretrained(tmp_path)
    options = ["--model_name_or_path", str(tmp_path), "--use_cpu", "true", *options]
    inputs = read_inputs(recipe, options, 8)
    rows = [row for row in make_plan(inputs, cluster(8), 141 * 10**9).rows if row.setting.strategy == "expert_parallel"]
    assert bool(rows) == proposed
    for row in (row for row in rows if not row.setting.offloading):  # which takes a GPU
        line = command(inputs, row.setting, recipe, options)
        assert line[3:7] == ["--accelerate_config", "ddp", "--num_processes", "8"]
        changed = load_recipe(recipe, line[7:])
        size = row.setting.expert_parallel_size
        with monkeypatch.context() as launched:
            launched.setenv("WORLD_SIZE", "8")
            check_model(changed)
            assert model_kwargs(changed)["distributed_config"] == {"fsdp_size": 8, "ep_size": size}
        assert written_setting(read_inputs(recipe, line[7:], 8), 8) == row.setting


def test_another_split_gathers_the_experts_again():
    inputs = read_inputs(RECIPE, [], 8)
    assert written_setting(inputs, 8).expert_parallel_size == 8
    found = make_plan(inputs, cluster(8), 80 * 10**9)
    assert found.written.fits, "as its comment says"
    line = command(inputs, next(row.setting for row in found.rows if row.setting.strategy == "fsdp2"), RECIPE)
    assert line[line.index("--expert_parallel_size") + 1] == "1"
    assert line[line.index("--accelerate_config") + 1] == "fsdp2"
    assert way(EIGHT) == "EP of 8, checkpointing"
    text = recommendation(inputs, found, found.written)
    assert "experts are chosen evenly; a GPU" in text
    assert "--dtype float32" not in text, "it is that"


def test_the_dtype_of_the_states_is_named():
    inputs = read_inputs("qwen3_30b_a3b_sft_fsdp2", ["--optim", "adamw_torch_fused"], 8)
    found = make_plan(inputs, cluster(8), 80 * 10**9)
    row = next(row for row in found.rows if row.fits and row.setting.strategy == "expert_parallel")
    assert "`--dtype float32` keeps them in fp32" in recommendation(inputs, found, row)


@pytest.mark.parametrize(
    ("recipe", "options", "gpus", "words"),
    [
        (RECIPE, [], 4, r"`expert_parallel_size` is 8, but `--gpus` is 4; plan for a multiple of 8, or"),
        (RECIPE, ["--expert_parallel_size", "3"], 3, "the model has 128 experts a layer; it must be a divisor of 128"),
        ("llama3_8b_sft", ["--expert_parallel_size", "2"], 2, r"\(llama\) names no experts; leave it out"),
    ],
)
def test_mistakes_have_the_messages_of_a_run(recipe, options, gpus, words):
    with pytest.raises(RecipeError, match=words):
        read_inputs(recipe, options, gpus)


def test_the_split_of_a_running_trainer():
    def of(**sizes):
        sizes = {"tp_size": 1, "dp_replicate_size": 1, "pp_size": 1, "ep_size": 2, **sizes}
        model = SimpleNamespace(config=SimpleNamespace(distributed_config=SimpleNamespace(**sizes)))
        return _strategy(SimpleNamespace(is_distributed_loading_by_transformers=True), model)

    assert of() == ("expert_parallel", 2)
    for other in ({"tp_size": 2}, {"dp_replicate_size": 2}, {"ep_size": 1}):
        with pytest.raises(ValueError, match="is not planned"):
            of(**other)


def test_the_copies_of_a_running_trainer():
    for mesh, copies in ((None, 1), (ParallelismConfig(dp_replicate_size=2, dp_shard_size=4), 2)):
        assert _copies(SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=mesh))) == copies
