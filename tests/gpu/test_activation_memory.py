"""`activation_memory` on a GPU: the same bits, and `auto` by the memory of the device."""

import pytest
import torch

from liger_trainer.trainers.cuda_graphs import CudaGraphsMixin
from tests.device import one_gpu
from tests.tiny_models import TINY_MODELS
from tests.trainers.builders import causal, losses_and_norms
from tests.trainers.tiny import token_rows

pytestmark = [pytest.mark.gpu, one_gpu, pytest.mark.filterwarnings("ignore")]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def deterministic(monkeypatch):
    """The backward of flash attention adds with atomics otherwise. The probes, in fp32, need the way of plain math."""
    backends = [torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.MATH]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.nn.attention.sdpa_kernel(backends):
        yield
    torch.use_deterministic_algorithms(False)


def trained(folder, family, budget, **further):
    options = {"use_cpu": False, "bf16": True, "gradient_checkpointing": True, "max_steps": 5, "kernel_report": False}
    options |= further
    model = TINY_MODELS[family](**SIZES).to(torch.bfloat16)
    trainer = causal(folder, model, rows=token_rows(n=32, length=100), activation_memory=budget, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("budget", ["2MiB", "auto"])
def test_no_bit_changes(family, budget, tmp_path, deterministic):
    without, kept = trained(tmp_path, family, None), trained(tmp_path, family, budget)
    assert kept._kept.kept > 0
    assert losses_and_norms(kept) == losses_and_norms(without)
    assert all(map(torch.equal, kept.model.parameters(), without.model.parameters()))


def test_auto_keeps_everything_where_there_is_room_and_knows_the_peak(tmp_path):
    trainer = trained(tmp_path, "llama", "auto")
    kept = trainer._kept
    assert set(kept.plan().calls) == {layer.name for layer in kept.phase.record.layers}
    assert (
        kept.phase.record.start
        < kept.phase.record.peak
        < kept.phase.limit
        < torch.cuda.get_device_properties(0).total_memory
    )
    assert all(layer.peak > kept.phase.record.start for layer in kept.phase.record.layers)
    logged = [log["peak_memory_gib"] for log in trainer.state.log_history if "loss" in log]
    assert logged == sorted(logged)  # although the allocator's counter is reset in the second step


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("budget", ["1MiB", "1GiB", "auto"])
def test_layers_keep_in_graphs(family, budget, tmp_path, deterministic, monkeypatch):
    monkeypatch.setattr(CudaGraphsMixin, "_free_graphs", lambda self: None)  # at the end of a training
    options = {"max_steps": 12, "train_sampling_strategy": "sequential"}
    without = trained(tmp_path, family, None, **options, cuda_graphs=False)
    both = trained(tmp_path, family, budget, **options, cuda_graphs=True)
    assert losses_and_norms(both) == losses_and_norms(without)
    assert all(map(torch.equal, both.model.parameters(), without.model.parameters()))
    graphs, in_graphs = both._graphs, both._kept._in_graphs
    layers = both.model.config.num_hidden_layers
    assert graphs.captured == layers, graphs.reasons
    keeping = sum(known.keeping is not None for known in graphs._of.values())
    assert keeping == (0 if budget == "1MiB" else layers)
    assert in_graphs.kept <= graphs._captures.taken <= in_graphs.taken
    assert both._kept.kept == in_graphs.kept
