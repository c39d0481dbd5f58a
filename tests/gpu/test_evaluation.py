"""An evaluation with a metric of its own takes no more memory than training: the logits of a batch are never built."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from tests.device import one_gpu, peak_memory
from tests.trainers.builders import causal
from tests.trainers.tiny import token_rows

pytestmark = [pytest.mark.gpu, one_gpu]

VOCAB, BATCH, LENGTH = 262_208, 4, 4096
LOGITS = 2 * BATCH * LENGTH * VOCAB


def predicted(logits, labels):
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def accuracy(prediction):
    right = prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(right[prediction.label_ids[:, 1:] != -100].mean())}


@pytest.mark.filterwarnings("ignore")
def test_accuracy_in_the_memory_of_training(tmp_path):
    sizes = {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 2, "head_dim": 256}
    config = Gemma3TextConfig(vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=1, **sizes)
    rows = token_rows(n=2 * BATCH, length=LENGTH, vocab=VOCAB)
    batches = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "max_steps": 2}
    metrics = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": predicted, "eval_dataset": rows}
    options = {"use_cpu": False, "bf16": True, "gradient_checkpointing": True, **batches, **metrics}
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    trainer = causal(tmp_path, model, rows=rows, **options)
    training = peak_memory(trainer.train)
    found = []
    evaluation = peak_memory(lambda: found.append(trainer.evaluate()))
    assert evaluation <= training < LOGITS
    assert 0 <= found[0]["eval_accuracy"] <= 1
