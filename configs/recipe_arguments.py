"""The keys of a recipe that are not already arguments of TRL's scripts or of the trainer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class RecipeArguments:
    """What to train, on what.

    Args:
        trainer: ``"sft"`` (`LigerSFTTrainer`: conversations, prompt and completion, or text) or ``"causal_lm"``
            (`LigerTrainer` on blocks of plain text).
        model_config: A configuration to train from scratch, with its ``model_type``; a mapping or JSON. Used in place
            of ``model_name_or_path``.
        model_family: The ``model_type`` that ``--smoke`` shrinks; found from the model's id where it is not given.
        tokenizer_name_or_path: Tokenizer to load; the model's own where it is not given.
        tokenizer_vocab_size: Train a byte-level BPE tokenizer of this size on the training text instead.
        data_files: Local files to train on: json, jsonl, csv, parquet or txt.
        eval_data_files: Local files to evaluate on, of the same kinds.
        overwrite_output_dir: Delete the checkpoints in ``output_dir`` and start again.
        loss_curve: Draw ``loss_curve.png`` into ``output_dir`` at the end.
        sample_prompts: Texts the saved model continues at the end; the saved model is loaded again for it.
        sample_tokens: New tokens for each of them.
    """

    trainer: Literal["sft", "causal_lm"] = field(default="sft", metadata={"help": "Which trainer runs."})
    model_config: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Configuration of a model to train from scratch, with its model_type; JSON."}
    )
    model_family: str | None = field(default=None, metadata={"help": "The model_type that --smoke shrinks."})
    tokenizer_name_or_path: str | None = field(
        default=None, metadata={"help": "Tokenizer to load; default the model's own."}
    )
    tokenizer_vocab_size: int | None = field(
        default=None, metadata={"help": "Train a byte-level BPE tokenizer of this size on the training text."}
    )
    data_files: list[str] | None = field(
        default=None, metadata={"help": "Local files to train on: json, jsonl, csv, parquet or txt."}
    )
    eval_data_files: list[str] | None = field(default=None, metadata={"help": "Local files to evaluate on."})
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Delete the checkpoints in output_dir and start again."}
    )
    loss_curve: bool = field(default=True, metadata={"help": "Draw loss_curve.png into output_dir at the end."})
    sample_prompts: list[str] | None = field(
        default=None, metadata={"help": "Texts the saved model continues at the end."}
    )
    sample_tokens: int = field(default=48, metadata={"help": "New tokens for each sample prompt."})

    def __post_init__(self) -> None:
        if isinstance(self.model_config, str):
            try:
                self.model_config = json.loads(self.model_config)
            except json.JSONDecodeError as error:
                raise ValueError(f"`model_config` is {self.model_config!r}, which is not JSON: {error}.") from error
        if self.model_config is not None and not isinstance(self.model_config, dict):
            raise ValueError(f"`model_config` is {self.model_config!r}; give a mapping with a `model_type`.")
        if self.model_config is not None and "model_type" not in self.model_config:
            raise ValueError("`model_config` has no `model_type`; give one, such as 'llama'.")


@dataclass
class CausalLMArguments:
    """What ``trainer: "causal_lm"`` takes beside the training arguments; TRL's `SFTConfig` has its own.

    Args:
        max_length: Tokens in a training block; documents are joined with the end-of-sequence token and cut into blocks.
        dataset_text_field: The column that holds the text.
        trust_remote_code: Run model or tokenizer code that comes with a repository.
    """

    max_length: int = field(default=1024, metadata={"help": "Tokens in a training block."})
    dataset_text_field: str = field(default="text", metadata={"help": "The column that holds the text."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with a repository."})
