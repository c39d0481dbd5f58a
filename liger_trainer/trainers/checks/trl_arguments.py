"""Checks of what a TRL trainer is given, where TRL's own error would come late or be unclear."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Sized
from typing import Any

from torch import nn

logger = logging.getLogger("liger_trainer")


def check_rows(dataset: Any) -> None:
    """Checks that a training dataset still has rows after it was prepared."""
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise ValueError(
            "`train_dataset` has no rows to train on. It was empty, or all of its rows were dropped as too long: TRL "
            "leaves out rows without a completion after the cut at `max_length`. Increase `max_length`, or check the "
            "data."
        )


def check_reference(policy: nn.Module, reference: nn.Module, processing_class: Any) -> None:
    """Checks that a reference model has an embedding for every token the policy is trained on.

    Sizes that differ only by padding are fine: both embeddings have the tokenizer's ids.
    """
    sizes = [model.config.get_text_config().vocab_size for model in (policy, reference)]  # type: ignore[operator, union-attr]
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    needed = len(tokenizer) if isinstance(tokenizer, Sized) else sizes[0]
    if sizes[0] != sizes[1] and sizes[1] < needed:
        raise ValueError(
            f"The reference model has a vocabulary of {sizes[1]}, the model one of {sizes[0]} and the tokenizer "
            f"{needed} tokens: they do not share a vocabulary. Give a `ref_model` with the model's tokenizer; where "
            "none was given, the reference is loaded from the path the model came from "
            f"({policy.config.name_or_path!r}), so save a model with resized embeddings first and load that."  # type: ignore[union-attr]
        )


def check_completions(completion_ids: Sequence[Sequence[int]], source: str) -> None:
    """Checks that every completion of `source`, an engine, has a token, since TRL's statistics read the last one."""
    for position, ids in enumerate(completion_ids):
        if len(ids) == 0:
            raise ValueError(
                f"{source} returned no token for sample {position} of {len(completion_ids)}. A completion has at least "
                "one, such as the end-of-sequence token; check its stop strings and its limit of tokens."
            )


def truncated_sampling(args: Any) -> tuple[str, str] | None:
    """Whether GRPO is going to divide probabilities of all tokens by those of the tokens that a truncation kept.

    vLLM's log-probabilities are normalised over the tokens that `top_p`, `top_k` and `min_p` keep, the trainer's over
    the vocabulary. A ratio of the two is the kept probability, even for equal weights. It is computed only with vLLM:
    for the correction by importance sampling, and to mask sequences that are off the policy. RLOO, and GRPO without
    vLLM, compare the trainer's log-probabilities with each other.

    Returns:
        The mistake, and what to do; None if there is none.
    """
    sampling = {"top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p, **(args.generation_kwargs or {})}
    truncates = {"top_p": sampling["top_p"] < 1.0, "top_k": sampling["top_k"] > 0, "min_p": bool(sampling["min_p"])}
    names = [name for name, on in truncates.items() if on]
    whole = {"top_p": 1.0, "top_k": 0, "min_p": None}
    without = []
    if getattr(args, "vllm_importance_sampling_correction", False):
        without.append("`vllm_importance_sampling_correction=False`")
    if getattr(args, "off_policy_mask_threshold", None) is not None:
        without.append("`off_policy_mask_threshold=None`")
    if not (args.use_vllm and names and without):
        return None
    return (
        f"{', '.join(f'`{name}={sampling[name]}`' for name in names)}: vLLM's log-probabilities are normalised over "
        "the tokens that this keeps, the trainer's over all. Their ratio is too small by the probability of the kept "
        "tokens, in a whole completion by the product of these",
        f"Set {', '.join(f'`{name}={whole[name]}`' for name in names)}, or do without the ratio: "
        f"{' and '.join(without)}",
    )


def warn_of_truncated_sampling(trainer: Any) -> None:
    """Warns of what [`truncated_sampling`] finds."""
    found = truncated_sampling(trainer.args)
    if found is not None and trainer.is_world_process_zero():
        logger.warning("%s. %s.", *found)
