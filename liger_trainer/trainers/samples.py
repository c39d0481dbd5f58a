"""Answers of the model while it trains, at intervals, to prompts that stay the same.

An answer is the likeliest tokens, one forward of the trained model for each, without a cache. That forward is right
however the model is wrapped: FSDP and ZeRO gather its weights as for a training step. So every process computes all
answers, and takes the first one's tokens. The step afterwards has the bits that it has without samples.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import nn
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import MLflowCallback, TensorBoardCallback, TrackioCallback, WandbCallback

from liger_trainer.callbacks.throughput import ThroughputCallback
from liger_trainer.patching.probe import drawing_apart

_COLUMNS = ["step", "prompt", "answer"]

Prompt = str | Sequence[Mapping[str, Any]]


class SamplesCallback(TrainerCallback):
    """Shows answers of the model before the first step and every `steps` steps; for any `Trainer` of a causal LM.

    Adapters are on, and the answers are the likeliest tokens, so that only the training changes them. They are printed,
    are in `log_history` (`samples`) and in the report of the run, and reach TensorBoard, wandb, trackio and MLflow. The
    time is not counted in `tokens_per_second`.

    Args:
        trainer: The trainer, whose `add_callback` gets this.
        prompts: Texts that the model continues, and conversations (lists of turns) that it answers by its chat
            template.
        steps: Optimizer steps from one time to the next.
        max_new_tokens: Tokens of an answer, at most.

    Raises:
        ValueError: for a model that writes no text or has an encoder, for sequences that processes split (context and
            sequence parallelism), and for a prompt without tokens or without room for an answer.
    """

    def __init__(self, trainer: Trainer, prompts: Sequence[Prompt], steps: int, max_new_tokens: int = 48) -> None:
        self.trainer, self.steps = trainer, steps
        model: Any = trainer.accelerator.unwrap_model(trainer.model)
        if not model.can_generate() or model.config.is_encoder_decoder:
            raise ValueError(f"samples: {type(model).__name__} is no causal language model; leave them out.")
        if trainer.get_cp_size() * trainer.get_sp_size() > 1:
            raise ValueError("samples: context and sequence parallelism split each sequence; leave the samples out.")
        processor: Any = trainer.processing_class
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._names = [prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) for prompt in prompts]
        self._ids = [self._tokens(prompt) for prompt in prompts]
        room = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
        for name, ids in zip(self._names, self._ids, strict=True):
            if not 0 < len(ids) < room:
                raise ValueError(
                    f"samples: the prompt {name[:40]!r} has {len(ids)} tokens, the model {room} positions."
                )
        self._new = min([max_new_tokens, *(room - len(ids) for ids in self._ids)])
        known = getattr(model.generation_config, "eos_token_id", None)
        self._ends = {self._tokenizer.eos_token_id, *(known if isinstance(known, list) else [known])}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The answers of the untrained model; a resumed run has had them."""
        if state.global_step == 0:
            self._sample(args, state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The answers after every `steps` steps."""
        if state.global_step % self.steps == 0:
            self._sample(args, state)

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer(prompt)["input_ids"]
        options = getattr(self.trainer.args, "chat_template_kwargs", None) or {}
        template = getattr(self.trainer.processing_class, "chat_template", None)
        asked = self._tokenizer.apply_chat_template(
            list(prompt), chat_template=template, add_generation_prompt=True, return_dict=True, **options
        )
        return asked["input_ids"]

    def _sample(self, args: TrainingArguments, state: TrainerState) -> None:
        model: Any = self.trainer.model
        with _left_as_it_was(model, args.device), torch.no_grad():
            answers = [self._text(ids) for ids in self._answers(model, args.device)]
        release = getattr(self.trainer.model_wrapped, "empty_partition_cache", None)
        if release is not None:  # ZeRO-3 keeps the head's weight, whole, until a backward or a step
            release()
        samples = list(zip(self._names, answers, strict=True))
        history: list[Any] = state.log_history
        history.append({"step": state.global_step, "samples": samples})
        callbacks = self.trainer.callback_handler.callbacks
        if state.is_world_process_zero:
            tqdm.write(_shown(state.global_step, samples))
            send_samples(callbacks, state.global_step, samples)
        for callback in callbacks:
            if isinstance(callback, ThroughputCallback):
                callback.leave_out()

    def _answers(self, model: nn.Module, device: torch.device) -> list[list[int]]:
        """The new tokens of each prompt, with the one that ends it."""
        rows, open_rows = [list(ids) for ids in self._ids], set(range(len(self._ids)))
        for _ in range(self._new):
            width = max(map(len, rows))
            # Padding at the right changes nothing before it. Positions are counted from the end: virtual tokens of a
            # prompt encoder come before a row.
            ids = torch.tensor([row + [self._tokenizer.pad_token_id or 0] * (width - len(row)) for row in rows])
            last = torch.tensor([len(row) - width - 1 for row in rows])
            mask = torch.arange(width) <= (last + width)[:, None]
            logits = model(input_ids=ids.to(device), attention_mask=mask.long().to(device), use_cache=False).logits
            tokens = broadcast(logits[torch.arange(len(rows)), last].argmax(-1)).tolist()
            for index in sorted(open_rows):
                rows[index].append(tokens[index])
            open_rows -= {index for index in open_rows if tokens[index] in self._ends}
            if not open_rows:
                break
        return [row[len(ids) :] for row, ids in zip(rows, self._ids, strict=True)]

    def _text(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluates `model`, and leaves its modules and the random states as they were."""
    training = [module for module in model.modules() if module.training]
    with drawing_apart(device):
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


def _shown(step: int, samples: Sequence[tuple[str, str]]) -> str:
    pairs = (
        f"{textwrap.indent(prompt, '  ')}\n{textwrap.indent(answer.strip() or '(nothing)', '    ')}"
        for prompt, answer in samples
    )
    return "\n".join([f"samples at step {step}", *pairs])


def send_samples(callbacks: Iterable[TrainerCallback], step: int, samples: Sequence[tuple[str, str]]) -> None:
    """Sends the answers of one step to each tracker among `callbacks`; to be called on the main process.

    TensorBoard and MLflow get texts, wandb and trackio tables. Any other tracker gets nothing.

    Args:
        callbacks: The callbacks of the trainer.
        step: The optimizer step.
        samples: Prompt and answer of each.
    """
    texts = [f"**{prompt}**\n\n{answer}" for prompt, answer in samples]
    rows = [[step, *sample] for sample in samples]
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback):
            for index, text in enumerate(texts, 1):
                callback.tb_writer.add_text(f"samples/{index}", text, step)
        elif isinstance(callback, MLflowCallback):
            import mlflow

            mlflow.log_text("\n\n".join(texts), f"samples/step-{step}.md")
        elif isinstance(callback, WandbCallback):
            import wandb

            _log(wandb, wandb.Table(columns=_COLUMNS, data=rows), step)
        elif isinstance(callback, TrackioCallback):
            import pandas
            import trackio

            _log(trackio, trackio.Table(dataframe=pandas.DataFrame(rows, columns=_COLUMNS)), step)


def _log(tracker: Any, table: Any, step: int) -> None:
    tracker.log({"samples": table, "train/global_step": step})  # along which transformers draws everything
