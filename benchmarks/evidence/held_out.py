"""Measures trained weights on held-out rows: in fp32, with transformers' own model, whoever has trained them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from liger_trainer.benchmarks.evidence.training import ANSWER_TOKENS, BETA, read_rows, score

_BATCH = 32


class Measuring:
    """A model in fp32 that gets the weights of one run after the other. As it is made, it is the reference of DPO.

    Args:
        data: The prepared folder.
        trainer: Whose held-out rows are measured.
        device: Where.
        count: How many of the rows; None for all.
    """

    def __init__(self, data: Path, trainer: str, device: torch.device, count: int | None = None) -> None:
        self.trainer = trainer
        self.rows = read_rows(data, trainer, "held_out")[:count]
        self.tokenizer: Any = AutoTokenizer.from_pretrained(data / "model", padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(data / "model", dtype=torch.float32)
        self.model = model.to(device).eval()
        self._reference = self._of_pairs() if trainer == "dpo" else []

    @torch.no_grad()
    def load(self, weights: Path) -> None:
        """Takes the weights of a run."""
        trained, own = load_file(weights), dict(self.model.named_parameters())
        if trained.keys() != own.keys():
            raise RuntimeError(f"{weights} has other parameters than the model: {sorted(trained.keys() ^ own.keys())}")
        for name, weight in trained.items():
            own[name].copy_(weight)

    @torch.no_grad()
    def measure(self) -> dict[str, list[float]]:
        """Each held-out measure, a number for each row."""
        return {"sft": self._sft, "dpo": self._dpo, "grpo": self._grpo}[self.trainer]()

    def _sft(self) -> dict[str, list[float]]:
        """Loss: the mean over a reply's tokens."""
        log_probs = self._log_probs("completion")
        return {"loss": [-of_reply.mean().item() for of_reply in log_probs]}

    def _dpo(self) -> dict[str, list[float]]:
        """Margin: of the implicit rewards; accuracy: whether it is positive, a half where it is 0 as at the start."""
        margins = [
            BETA * ((chosen - of_chosen) - (rejected - of_rejected))
            for (chosen, rejected), (of_chosen, of_rejected) in zip(self._of_pairs(), self._reference)
        ]
        return {"accuracy": [0.5 + 0.5 * ((margin > 0) - (margin < 0)) for margin in margins], "margin": margins}

    @torch.no_grad()
    def _of_pairs(self) -> list[tuple[float, float]]:
        """The log-probabilities of each row's replies, the chosen and the rejected one."""
        chosen, rejected = ([reply.sum().item() for reply in self._log_probs(of)] for of in ("chosen", "rejected"))
        return list(zip(chosen, rejected))

    def _grpo(self) -> dict[str, list[float]]:
        """Score: what the verifier says of the most probable tokens."""
        scores = []
        for rows in self._batches():
            prompts = [self._text(row["prompt"], add_generation_prompt=True) for row in rows]
            inputs = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.model.device)
            made = self.model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
            texts = self.tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            scores += [score(text, row["answer"]) for text, row in zip(texts, rows)]
        return {"score": scores}

    def _batches(self) -> list[Sequence[dict[str, Any]]]:
        return [self.rows[start : start + _BATCH] for start in range(0, len(self.rows), _BATCH)]

    def _text(self, messages: Sequence[dict[str, str]], **options: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def _log_probs(self, column: str) -> list[Tensor]:
        """The log-probabilities of a column's tokens after the prompt, a vector for each row."""
        found = []
        for rows in self._batches():
            prompts = [self._text(row["prompt"], add_generation_prompt=True) for row in rows]
            wholes = [self._text(row["prompt"] + row[column]) for row in rows]
            counts = [
                len(self.tokenizer(whole.removeprefix(prompt)).input_ids) for prompt, whole in zip(prompts, wholes)
            ]
            inputs = self.tokenizer(wholes, return_tensors="pt", padding=True).to(self.model.device)
            logits, targets = self.model(**inputs).logits[:, :-1], inputs["input_ids"][:, 1:]
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
            found += [-row[-count:].cpu() for row, count in zip(losses, counts)]
        return found
