"""A conversation with the model of a run, whose answers come piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import StoppingCriteria, TextIteratorStreamer

from liger_trainer.errors import UserError
from liger_trainer.recipe.file import first_line
from liger_trainer.tools.export.saved_run import SavedRun, add_adapter, load_model, load_tokenizer, stop_at_end_of_turn


class _Stopped(StoppingCriteria):
    """Ends the generation when the answer is no longer read."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.asked.is_set(), device=input_ids.device)


class Conversation:
    """Turns of a user and a model.

    Args:
        model: A model that generates.
        tokenizer: The tokenizer of the model; without a chat template, the model continues the plain text of all turns.
        max_new_tokens: Tokens of an answer, at most.
        temperature: 0 takes the likeliest token; None leaves it to the model's generation configuration.
        system: The system message.

    Raises:
        UserError: for a system message without a chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_new_tokens: int = 512,
        temperature: float | None = None,
        system: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.max_new_tokens = model, tokenizer, max_new_tokens
        self.has_template = bool(tokenizer.chat_template)
        if system is not None and not self.has_template:
            raise UserError("`--system` is given, but the tokenizer has no chat template to put it in; leave it out.")
        self.system = system
        self.sampling: dict[str, Any] = {}
        if temperature is not None:
            self.sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        self.reset()

    def reset(self) -> None:
        """Forgets all turns but the system message."""
        self.turns = [] if self.system is None else [{"role": "system", "content": self.system}]

    def answer(self, message: str) -> Iterator[str]:
        """The pieces of the answer to `message`; both become turns when the answer is complete."""
        asked = [*self.turns, {"role": "user", "content": message}]
        inputs = self._inputs(asked)
        length = inputs["input_ids"].shape[1]
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if room is not None and length >= room:
            raise UserError(
                f"The conversation has {length} tokens, and the model {room} positions; `/reset` forgets it, or write "
                "less."
            )
        new = self.max_new_tokens if room is None else min(self.max_new_tokens, room - length)
        pieces: list[str] = []
        for piece in self._generate(inputs, new):
            pieces.append(piece)
            yield piece
        self.turns = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def _inputs(self, turns: list[dict[str, str]]) -> Any:
        if self.has_template:
            try:
                inputs = self.tokenizer.apply_chat_template(
                    turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
                )
            except (TemplateError, ValueError) as error:
                raise UserError(f"The chat template cannot be applied: {first_line(error)}") from error
        else:
            inputs = self.tokenizer("".join(turn["content"] for turn in turns), return_tensors="pt")
        return {key: inputs[key].to(self.model.device) for key in ("input_ids", "attention_mask")}

    def _generate(self, inputs: Any, new: int) -> Iterator[str]:
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        stopped, failed = _Stopped(), []

        def run() -> None:
            try:
                self.model.generate(
                    **inputs, **self.sampling, max_new_tokens=new, streamer=streamer, stopping_criteria=[stopped]
                )
            except Exception as error:  # raised below, in the thread that reads
                failed.append(error)
                streamer.end()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield from streamer
        finally:
            stopped.asked.set()
            thread.join()
        if failed:
            raise failed[0]


def open_conversation(
    run: SavedRun, max_new_tokens: int = 512, temperature: float | None = None, system: str | None = None
) -> Conversation:
    """A conversation with the model of `run`, on the accelerator if there is one."""
    tokenizer = load_tokenizer(run)
    if tokenizer is None:
        raise UserError(f"Neither {str(run.folder)!r} nor its base model has a tokenizer.")
    model: Any = load_model(run, "auto")
    if not model.can_generate():
        raise UserError(f"RUN: {type(model).__name__} generates no text, so there is nobody to talk to.")
    stop_at_end_of_turn(model, tokenizer)
    if run.adapter is not None:
        model = add_adapter(run, model)
    device = torch.accelerator.current_accelerator(check_available=True)
    return Conversation(model.to(device or "cpu"), tokenizer, max_new_tokens, temperature, system)
