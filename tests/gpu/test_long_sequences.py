"""Long sequences on an accelerator: activations offloaded and MLPs in tiles train the same, in less memory."""

import contextlib

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from liger_trainer import apply_liger_kernel
from liger_trainer.configs.flags import LigerTrainingArguments
from liger_trainer.configs.trl_configs import LigerDPOConfig, LigerSFTConfig
from liger_trainer.trainers.activation_memory import PartialOffload
from liger_trainer.trainers.reference_trainers import LigerDPOTrainer
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.device import one_gpu, peak_memory
from tests.trainers.tiny import COMMON, SIZES, WORDS, llama, text_dataset, token_rows, tokenizer

pytestmark = [pytest.mark.gpu, one_gpu]

ON_DEVICE = {**COMMON, "use_cpu": False, "bf16": False, "gradient_checkpointing": True}
LONG = {"activation_offloading": True, "liger_kernel_config": {"tiled_mlp": True}}


def lora():
    return get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def plain(model, tmp_path, **options):
    args = LigerTrainingArguments(output_dir=str(tmp_path), **ON_DEVICE, **options)
    return LigerTrainer(model, args, train_dataset=token_rows())


def sft(model, tmp_path, **options):
    args = LigerSFTConfig(output_dir=str(tmp_path), **ON_DEVICE, **options)
    return LigerSFTTrainer(model, args, train_dataset=text_dataset(), processing_class=tokenizer())


def dpo(model, tmp_path, **options):
    args = LigerDPOConfig(output_dir=str(tmp_path), **ON_DEVICE, **options)
    pairs = Dataset.from_list(
        [{"prompt": WORDS[i % 4], "chosen": WORDS[(i + 1) % 4], "rejected": WORDS[(i + 2) % 4]} for i in range(16)]
    )
    reference = None if hasattr(model, "peft_config") else llama()
    return LigerDPOTrainer(model, reference, args, train_dataset=pairs, processing_class=tokenizer())


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", [plain, sft, dpo])
@pytest.mark.parametrize("make", [llama, lora])
def test_losses_are_the_same(build, make, tmp_path):
    expected = losses(build(make(), tmp_path))
    assert losses(build(make(), tmp_path, **LONG)) == pytest.approx(expected, rel=1e-3)
    assert losses(build(make(), tmp_path, activation_offloading=True)) == pytest.approx(expected, rel=1e-3)
    half = {"activation_offloading_fraction": 0.5}
    assert losses(build(make(), tmp_path, **LONG, **half)) == pytest.approx(expected, rel=1e-3)


def peak(tokens, offload=0.0, **kernels):
    """Bytes above the weights of a step on one sequence: a Llama with layers worth offloading and wide MLPs."""
    from trl.models import get_act_offloading_ctx_manager

    def offloading():
        if not offload:
            return contextlib.nullcontext()
        context = get_act_offloading_ctx_manager(model)
        return context if offload == 1 else PartialOffload(context, offload)

    sizes = {**SIZES, "hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 12}
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, "max_position_embeddings": tokens})).to(torch.bfloat16)
    apply_liger_kernel(model, kernels)
    model.train().activation_checkpointing_enable()
    ids = torch.randint(3, 120, (1, tokens), device="cuda")

    def step():
        with offloading():
            model(input_ids=ids, labels=ids).loss.backward()
            torch.cuda.synchronize()

    return peak_memory(step)  # gradients exist after the first step


def test_memory_of_a_long_sequence():
    """32768 tokens: an MLP's gate, up and product are 0.5 GiB each, a layer's input 32 MiB."""
    kept, rebuilt = peak(32768, recompute_mlp=False), peak(32768)
    tiled, both = peak(32768, tiled_mlp=True), peak(32768, tiled_mlp=True, offload=1.0)
    part = peak(32768, tiled_mlp=True, offload=0.5)
    assert kept - rebuilt > 0.45 * 2**30
    assert kept - tiled > 0.75 * 2**30
    assert rebuilt > tiled
    assert tiled - both > 3 * 32 * 2**20  # of the inputs of 12 layers all but those on their way
    assert both < part < tiled


def test_tiles_on_the_device_are_the_mlp():
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 8192, "max_position_embeddings": 16384}
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
        ids = torch.randint(3, 120, (1, 16384))

    def gradients(config):
        apply_liger_kernel(model, config)
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected, ours = gradients({}), gradients({"tiled_mlp": True})  # four tiles and more
    for name, value in expected.items():
        assert (ours[name] - value).norm() <= 1e-4 * value.norm(), name
