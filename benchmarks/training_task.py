"""What `bench training` and `bench longest` train."""

from __future__ import annotations

import dataclasses
import json

PROMPT_FRACTION = 8
"""A prompt is one eighth as long as its sequence."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, and how; the same for every provider.

    Attributes:
        model: Name in `models.MODELS`.
        layers: Layers of the model; 0 for all.
        trainer: ``"causal_lm"`` for the Trainer; ``"sft"``, ``"dpo"`` and ``"grpo"`` for TRL's.
        batch: Sequences in a step on one GPU, or pairs for DPO.
        length: Tokens in a sequence; GRPO adds prompts of an eighth of that.
        steps: Number of steps.
        checkpointing: Whether every layer is recomputed in the backward pass.
        device: Where to train; empty for the accelerator.
        lora: Rank of adapters on all linear layers; 0 to train all weights.
        warmup: Steps at the start that are not timed.
        gpus: Processes, one per GPU.
        accelerate_config: File for `accelerate launch`; empty to start one process without it.
        quantize: ``"nf4"`` for a base model that bitsandbytes has quantised (double quantisation); empty for bf16.
    """

    model: str
    layers: int = 0
    trainer: str = "causal_lm"
    batch: int = 4
    length: int = 4096
    steps: int = 6
    checkpointing: bool = True
    device: str = ""
    lora: int = 0
    warmup: int = 2
    gpus: int = 1
    accelerate_config: str = ""
    quantize: str = ""

    @property
    def samples(self) -> int:
        """Sequences or pairs of all steps and GPUs."""
        return self.batch * self.steps * self.gpus

    def to_json(self) -> str:
        """The task as JSON, for the process that trains it."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a step trains on, on one GPU: of both sequences of a pair, of prompts and completions."""
        if self.trainer == "dpo":
            return 2 * self.batch * self.length
        if self.trainer == "grpo":
            return self.batch * (self.length + self.length // PROMPT_FRACTION)
        return self.batch * self.length
