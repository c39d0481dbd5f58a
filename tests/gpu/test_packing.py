"""Packed rows on an accelerator, with heads that its kernels take: as near to fp32 as the padded batch is."""

import copy

import pytest
import torch

from liger_trainer.attention.interface import NAME
from liger_trainer.packing.packed_row import Padded, packed_rows, rows_of
from tests.tiny_models import TINY_MODELS

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
MODELS = {
    "llama": {},
    "gemma2": {"sliding_window": 100},
    "gemma3_text": {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_oss": {"sliding_window": 100, "num_local_experts": 1, "num_experts_per_tok": 1},  # no routing to round
}
PROMPT, COMPLETION, GROUP = 200, 160, 4


def uneven_batch():
    """Two groups of rows that begin alike; the windows end in the prompts, in between, and in the completions."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (2 * GROUP, PROMPT + COMPLETION), generator=random)
    ids[:, :PROMPT] = ids[::GROUP, :PROMPT].repeat_interleave(GROUP, 0)
    prompts = torch.randint(0, PROMPT - 1, (2,), generator=random).repeat_interleave(GROUP)
    ends = PROMPT + torch.randint(1, COMPLETION, (2 * GROUP,), generator=random)
    columns = torch.arange(ids.shape[1])
    mask = (columns >= prompts[:, None]) & (columns < ends[:, None])
    labels = ids.roll(-1, 1).masked_fill(~mask | (columns < PROMPT - 1), -100)
    return Padded(*(each.cuda() for each in (ids * mask, mask.long())), None, labels.cuda())


def gradients(model, batch, weights, share=None):
    """Of all parameters, as one vector; of the padded batch if `share` is None."""
    scored = batch.labels != -100
    if share is None:
        values = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits[scored]
    else:
        (row,) = packed_rows(batch, share)
        with row.attended():
            logits = model(**row.inputs, use_cache=False).logits
        values = rows_of(logits, row.scored.tokens)[row.scored.copies.index.long()]
    model.zero_grad()
    (values.float() * weights).sum().backward()
    return torch.cat([each.grad.double().flatten() for each in model.parameters() if each.grad is not None])


@pytest.mark.parametrize("share", [False, True], ids=["packed", "shared"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_near_to_those_of_fp32_as_the_padded_batchs(name, share):
    batch = uneven_batch()
    torch.manual_seed(0)
    model = TINY_MODELS[name](**SIZES, max_position_embeddings=512, **MODELS[name]).bfloat16().cuda()
    weights = torch.randn(int((batch.labels != -100).sum()), model.config.vocab_size, device="cuda")

    def measured(dtype, attention, share):
        each = copy.deepcopy(model).to(dtype)
        each.set_attn_implementation(attention)
        return gradients(each, batch, weights, share)

    exact = measured(torch.float32, "eager", None)
    assert (measured(torch.float32, NAME, share) - exact).norm() < 1e-5 * exact.norm()
    padded = (measured(torch.bfloat16, "eager", None) - exact).norm()
    assert (measured(torch.bfloat16, NAME, share) - exact).norm() < 1.1 * padded
