"""Experts: autograd saves as much as planned, in our operator and in transformers' grouped matmul."""

import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from liger_trainer import apply_liger_kernel
from liger_trainer.benchmarks.models import MODELS, model_config
from liger_trainer.benchmarks.operations.moe import cases, grouped_mm, ours
from liger_trainer.benchmarks.registry import Data
from liger_trainer.benchmarks.training import Task
from liger_trainer.benchmarks.training_providers import Setup
from liger_trainer.plan.activations import Precision, layer_memory, mlp_saved
from liger_trainer.plan.estimate import estimate, moments
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.work import read_layer_shape
from liger_trainer.tools.planning.inputs import read_inputs
from tests.calls import saved_tensors
from tests.plan.cases import counted, run_of

QWEN = "qwen3-30b-a3b"
HIDDEN, INTERMEDIATE, CHOSEN, EXPERTS = 2048, 768, 8, 128
ELEMENTS = 3 * EXPERTS * HIDDEN * INTERMEDIATE  # of the experts of a layer


def saved_bytes(function, arguments, model=None):
    """Bytes that autograd saves for `function`, without parameters, ids and the routing weights of two choices."""
    parameters = model.parameters() if model else (arguments["gate_up_proj"], arguments["down_proj"])
    weights = {parameter.data_ptr() for parameter in parameters}
    with saved_tensors() as saved:
        output = function(**arguments)
    assert output.requires_grad
    counted = (each.untyped_storage() for each in saved if each.is_floating_point() and each.shape[-1] > 2)
    storages = {storage.data_ptr(): storage.nbytes() for storage in counted}
    return sum(size for pointer, size in storages.items() if pointer not in weights)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("fused", [True, False], ids=["ours", "stock"])
def test_autograd_saves_as_much_as_planned(fused, frozen):
    tokens, model = 64, MODELS["tiny-moe"]
    trained_case, frozen_case, _ = cases(Data(torch.device("cpu"), torch.bfloat16), model, tokens)
    arguments = (frozen_case if frozen else trained_case).arguments
    _, shape = counted("tiny-moe", fused_experts=fused)
    planned = tokens * mlp_saved(dataclasses.replace(shape, trained=not frozen), Precision())
    if not fused and not frozen:
        planned -= 2 * tokens * model.hidden  # the input of a router; there is none here
    assert saved_bytes(ours if fused else grouped_mm, arguments) == planned


def test_bytes_a_token_of_qwen():
    ours, stock = (mlp_saved(counted(QWEN, fused_experts=fused)[1], Precision()) for fused in (True, False))
    assert ours == 2 * HIDDEN + 4 * CHOSEN * INTERMEDIATE == 28_672
    assert stock == 2 * HIDDEN + 2 * CHOSEN * (2 * HIDDEN + 4 * INTERMEDIATE) == 118_784


def test_the_end_of_the_backward():
    """Every gradient of the experts, that of gate and up in their place, and k rows of the input's."""
    _, shape = counted(QWEN)
    tokens = 16384
    memory = layer_memory(shape, Precision(), tokens, 4096, expert_elements=ELEMENTS)
    assert memory.gradients == ELEMENTS
    more = layer_memory(shape, Precision(), tokens + 1, 4096, expert_elements=ELEMENTS).working - memory.working
    experts = 2 * (2 * HIDDEN + 2 * CHOSEN * INTERMEDIATE + CHOSEN * HIDDEN)
    queries, keys = 32 * 128, 4 * 128
    attention = 2 * (2 * queries + 2 * keys + queries + keys + HIDDEN + HIDDEN + HIDDEN) + 4 * 32  # log-sum-exp
    assert more == experts + attention


def test_the_middle_of_the_backward():
    """Rows of the output's gradient, the product's gradient, and the product where weights or adapters need it."""
    _, shape = counted(QWEN)
    tokens, inner = 2**17, CHOSEN * INTERMEDIATE  # so many that the gradients of the experts matter less
    sizes = {}
    for trained, adapted in ((True, False), (False, True), (False, False)):
        one = dataclasses.replace(shape, trained=trained, adapted_experts=adapted)
        memory = layer_memory(one, Precision(), tokens, 4096, expert_elements=ELEMENTS if trained else 0)
        assert memory.gradients == (ELEMENTS // 3 if trained else 0)
        sizes[trained, adapted] = memory.working / tokens
    assert sizes[False, True] - sizes[False, False] == 2 * inner + 2 * HIDDEN  # the experts' input
    assert sizes[True, False] - sizes[False, True] == 2 * HIDDEN  # the attention's input


def test_our_experts_take_less():
    for checkpointing in (True, False):
        sizes = []
        for fused in (True, False):
            run = run_of(QWEN, 4096, 12, fused_experts=fused)
            sizes.append(estimate(run, Setting(batch=4, checkpointing=checkpointing)).total)
        assert sizes[0] < sizes[1]


def test_the_backward_of_frozen_experts_ends_without_their_input():
    _, shape = counted(QWEN)
    sizes = []
    for adapted in (True, False):
        # With so few gates and queries it is the fullest moment.
        one = dataclasses.replace(shape, trained=False, adapted_experts=adapted, expert_intermediate=8, query=128)
        sizes.append(layer_memory(one, Precision(), 64, 64).working)
    assert sizes[0] - sizes[1] == 2 * HIDDEN * 64


def test_adapters_of_a_shared_expert_read_the_input_of_the_routed_ones():
    config = Qwen2MoeConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, vocab_size=64,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48,
    )  # fmt: skip
    (case, *_) = cases(Data(torch.device("cpu"), torch.bfloat16), MODELS["tiny-moe"], 64)
    inputs = {name: case.arguments[name] for name in ("hidden", "top_k_index", "top_k_weights")}

    def sizes(modules, parameters):
        """Bytes of the routed experts and the shared one, saved by autograd and planned."""
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        lora = LoraConfig(r=4, target_modules=modules, target_parameters=parameters)
        adapted = get_peft_model(model, lora)
        shape = read_layer_shape(adapted)
        apply_liger_kernel(adapted)
        block = adapted.base_model.model.model.layers[0].mlp

        def both(hidden, **routing):
            return block.experts(hidden, *routing.values()) + block.shared_expert(hidden)

        return torch.tensor([saved_bytes(both, inputs, adapted), 64 * mlp_saved(shape, Precision())])

    experts, shared = ["mlp.experts.gate_up_proj"], ["gate_proj", "up_proj"]
    one_input = 2 * 64 * 64
    assert (sizes(["o_proj"], experts) - sizes(["o_proj"], None)).tolist() == [one_input, one_input]
    assert (sizes(shared, experts) - sizes(shared, None)).tolist() == [0, 0]


def test_adapters_on_experts():
    parameters, shape = counted(QWEN, layers=2, rank=16)
    widths = EXPERTS * (HIDDEN + 2 * INTERMEDIATE + INTERMEDIATE + HIDDEN)
    attention = 2 * (HIDDEN + 32 * 128) + 2 * (HIDDEN + 4 * 128)
    assert parameters.groups["adapters"].trained == 2 * 16 * (widths + attention)
    assert shape.adapted_experts
    assert shape.adapted_mlp == shape.adapted_down == 0
    assert not counted("llama3-8b", rank=16)[1].adapted_experts


def test_our_adapters_save_nothing_more_and_peft_a_copy_of_all_experts():
    task, tokens, elements = Task("tiny-moe", lora=4), 64, 3 * 4 * 64 * 32
    model = AutoModelForCausalLM.from_config(model_config(MODELS[task.model], 1), dtype=torch.bfloat16)
    adapted = get_peft_model(model, Setup(task, model, {}, []).lora)
    experts = adapted.base_model.model.model.layers[0].mlp.experts
    adapters = sum(p.numel() for name, p in experts.named_parameters() if "lora_" in name)
    (case, *_) = cases(Data(torch.device("cpu"), torch.bfloat16), MODELS[task.model], tokens)
    inputs = {name: case.arguments[name] for name in ("hidden", "top_k_index", "top_k_weights")}

    def of_adapted(**inputs):
        return experts(*inputs.values())

    def planned(**changes):
        _, shape = counted(task.model, rank=4)
        return tokens * mlp_saved(dataclasses.replace(shape, **changes), Precision())

    stock = planned(fused_experts=False) + 2 * elements
    assert stock <= saved_bytes(of_adapted, inputs, adapted) <= stock + 2 * adapters  # which PEFT casts
    apply_liger_kernel(adapted)
    assert saved_bytes(of_adapted, inputs, adapted) == planned()


def test_a_copy_of_all_experts_is_planned_where_peft_runs():
    _, shape = counted("tiny-moe", rank=4, fused_experts=False)

    def saved(**changes):
        return layer_memory(dataclasses.replace(shape, **changes), Precision(), 64, 64).saved

    elements, rows = 3 * 4 * 64 * 32, 2 * (64 + 32)
    assert saved() - saved(adapted_experts=False) == 2 * elements + 2 * rows * 64
    assert saved(fused_experts=True, fused_adapters=False) - saved(fused_experts=True) > 2 * elements
    experts_input = 2 * 64 * 64
    assert saved(fused_experts=True) == saved(fused_experts=True, adapted_experts=False) + experts_input


@pytest.mark.parametrize(
    ("options", "fused"),
    [([], True), (["--liger_kernel_config", '{"experts": false}'], False), (["--use_liger_kernel", "false"], False)],
    ids=str,
)
def test_a_recipe_says_how_its_experts_run(options, fused):
    inputs = read_inputs("qwen3_30b_a3b_sft_lora", options)
    assert inputs.run.shape.fused_experts is fused
    assert inputs.run.shape.adapted_experts
    assert all(memory.total > 0 for memory in moments(inputs.run, Setting()))
