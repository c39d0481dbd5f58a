"""ORPO, CPO and reward trainers on an accelerator: parity with TRL, no waiting for the device, memory."""

import pytest
import torch

from tests.device import no_host_sync, one_gpu, peak_memory_of_one_run
from tests.tiny_models import TINY_MODELS
from tests.trainers.test_parity_orpo_cpo import ARGUMENTS, CPO, ORPO, REWARD, build, pairs, without_padding
from tests.trainers.tiny import logged, tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), one_gpu]

KINDS = pytest.mark.parametrize("kind", [ORPO, CPO], ids=["orpo", "cpo"])


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", [ORPO, CPO, REWARD], ids=["orpo", "cpo", "reward"])
def test_losses_are_those_of_stock(kind, bf16, tmp_path):
    case = {"use_cpu": False, "bf16": bf16, "model": "score" if kind is REWARD else "llama"}
    stock, ours = build(*kind[:2], tmp_path / "stock", **case), build(*kind[2:], tmp_path / "ours", **case)
    if kind is not REWARD:
        without_padding(stock)
    stock.train()
    ours.train()
    tolerance = 3e-2 if bf16 else 1e-3
    for left, right in zip(logged(stock), logged(ours), strict=True):
        assert left.keys() == right.keys()
        for key in left:
            assert right[key] == pytest.approx(left[key], abs=tolerance, rel=tolerance), key


def long_pairs(rows=4, length=512):
    """A batch as the collator gives it, and our trainer and TRL's of a model with many tokens."""
    vocab = 65536
    ids = torch.randint(3, vocab, (2, rows, length), generator=torch.Generator().manual_seed(0)).cuda()
    labels = ids.clone()
    labels[..., : length // 2] = -100
    batch = {"prompt_input_ids": ids[0, :, : length // 2], "prompt_attention_mask": torch.ones_like(ids[0])}
    for side, its_ids, its_labels in zip(("chosen", "rejected"), ids, labels):
        batch[f"{side}_input_ids"], batch[f"{side}_labels"] = its_ids, its_labels
        batch[f"{side}_attention_mask"] = torch.ones_like(its_ids)

    def trainer(trainer_class, config_class, folder, **more):
        args = config_class(output_dir=str(folder), **{**ARGUMENTS, "use_cpu": False, "bf16": False, **more})
        model = TINY_MODELS["llama"](vocab_size=vocab, max_position_embeddings=length)
        return trainer_class(model, args=args, train_dataset=pairs(), processing_class=tokenizer())

    return batch, trainer


@KINDS
def test_the_forward_does_not_wait_for_the_device(kind, tmp_path):
    batch, make = long_pairs(length=64)
    trainer = make(*kind[2:], tmp_path, padding_free=False)  # packing reads the batch
    original = trainer.model
    # Without the mask: transformers reads it back to choose its attention kernel.
    unmasked = lambda input_ids, attention_mask, **kwargs: original(input_ids, **kwargs)  # noqa: E731

    def step():
        chosen, rejected, chosen_logits, rejected_logits, nll = trainer.concatenated_forward(unmasked, batch)
        (nll + (rejected - chosen).mean()).backward()
        return chosen_logits.detach().mean() + rejected_logits.detach().mean()

    step()  # kernels are compiled here
    with no_host_sync():
        step()


@KINDS
def test_memory_of_a_step(kind, tmp_path):
    batch, make = long_pairs()

    def peak(trainer):
        trainer.model.train()
        return peak_memory_of_one_run(lambda: trainer.compute_loss(trainer.model, batch).backward())

    stock = peak(make(*kind[:2], tmp_path / "stock"))
    ours = peak(make(*kind[2:], tmp_path / "ours", logits_memory="64MiB"))
    logits = 8 * 512 * 65536 * 4
    assert stock > 2 * logits
    assert ours < logits / 2
