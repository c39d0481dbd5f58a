"""The keys of a recipe that are not already arguments of TRL's scripts or of the trainer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class RecipeArguments:
    """What to train, on what.

    Args:
        trainer: ``"sft"`` (`LigerSFTTrainer`: conversations, prompt and completion, or text), ``"causal_lm"``
            (`LigerTrainer` on blocks of plain text), ``"dpo"``, ``"orpo"``, ``"cpo"`` (SimPO is its ``loss_type:
            "simpo"``) and ``"reward"`` (pairs of a chosen and a rejected answer), ``"kto"`` (answers with a label),
            ``"grpo"`` or ``"rloo"`` (prompts, and reward functions).
        accelerate_config: How the recipe is meant to be spread over GPUs: a name or file as ``--accelerate_config``
            takes it. ``liger-trainer train`` uses it where that is not given and there are GPUs.
        expert_parallel_size: Processes that share the experts of a mixture of experts: each holds some of them whole,
            and tokens go to their experts. The rest of the model is split over all processes by FSDP2, which
            `from_pretrained` does here, so the launch is ``accelerate_config: "ddp"``. 1 by default.
        model_config: A configuration to train from scratch, with its ``model_type``; a mapping or JSON. Used in place
            of ``model_name_or_path``.
        model_family: The ``model_type`` that ``--smoke`` shrinks; found from the model's id where it is not given.
        tokenizer_name_or_path: Tokenizer to load; the model's own where it is not given.
        tokenizer_vocab_size: Train a byte-level BPE tokenizer of this size on the training text instead.
        data_files: Local files to train on: json, jsonl, csv, parquet or txt.
        eval_data_files: Local files to evaluate on, of the same kinds.
        columns: New names of columns, each with the name it has in the data: ``{"prompt": "question"}``.
        warm_start: Keys of a ``trainer: "sft"`` recipe that runs first, as a mapping or JSON; its model is the one to
            go on with. Model, tokenizer, precision and seed are those of this recipe.
        overwrite_output_dir: Delete the checkpoints in ``output_dir`` and start again.
        loss_curve: Draw ``loss_curve.png`` into ``output_dir`` at the end.
        router_balance: For a mixture of experts, log how evenly its experts are used and draw ``router_balance.png``
            and write ``router_balance.csv`` into ``output_dir`` at the end; see `RouterBalanceCallback`.
        sample_prompts: Texts the saved model continues at the end; the saved model is loaded again for it.
        sample_tokens: New tokens for each of them.
    """

    trainer: Literal["sft", "causal_lm", "dpo", "kto", "orpo", "cpo", "grpo", "rloo", "reward"] = field(
        default="sft", metadata={"help": "Which trainer runs."}
    )
    accelerate_config: str | None = field(
        default=None, metadata={"help": "Configuration of accelerate for `liger-trainer train` on GPUs."}
    )
    expert_parallel_size: int = field(
        default=1, metadata={"help": "Processes that share the experts of a mixture of experts; launch with DDP."}
    )
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
    columns: dict[str, str] | str | None = field(
        default=None, metadata={"help": "New names of columns, each with the name it has in the data; JSON."}
    )
    warm_start: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keys of a supervised recipe that runs first on the same model; JSON."}
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Delete the checkpoints in output_dir and start again."}
    )
    loss_curve: bool = field(default=True, metadata={"help": "Draw loss_curve.png into output_dir at the end."})
    router_balance: bool = field(
        default=False, metadata={"help": "Log and draw how evenly a mixture of experts uses its experts."}
    )
    sample_prompts: list[str] | None = field(
        default=None, metadata={"help": "Texts the saved model continues at the end."}
    )
    sample_tokens: int = field(default=48, metadata={"help": "New tokens for each sample prompt."})

    def __post_init__(self) -> None:
        for name in ("model_config", "columns", "warm_start"):
            setattr(self, name, _mapping(name, getattr(self, name)))
        if self.model_config is not None and "model_type" not in self.model_config:
            raise ValueError("`model_config` has no `model_type`; give one, such as 'llama'.")


def _mapping(name: str, value: Any) -> dict[str, Any] | None:
    """`value`, which may be written as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"`{name}` is {value!r}, which is not JSON: {error}.") from error
    if value is not None and not isinstance(value, dict):
        like = " with a `model_type`" if name == "model_config" else ""
        raise ValueError(f"`{name}` is {value!r}; give a mapping{like}.")
    return value


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


@dataclass
class RewardArguments:
    """What ``trainer: "grpo"`` and ``"rloo"`` take beside their training arguments.

    Args:
        reward_funcs: Reward functions as ``"package.module:function"`` (the current folder is looked in too), and
            reward models by their Hub id or folder.
        reward_options: For a function named in `reward_funcs`, keyword arguments that it is always called with; a
            mapping of mappings, or JSON.
        system_prompt: Makes conversations of prompts that are plain text: this as the system's turn (none where it is
            empty), the prompt as the user's. Prompts that are conversations begin with it, unless they have one.
    """

    reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Reward functions as package.module:function, or reward models."}
    )
    reward_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments of the reward functions, by their names; JSON."}
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "Makes conversations of plain prompts, with this as the system's turn."}
    )

    def __post_init__(self) -> None:
        if not self.reward_funcs:
            raise ValueError('`reward_funcs` is empty; name at least one, such as ["liger_trainer.rewards:accuracy"].')
        self.reward_options = _mapping("reward_options", self.reward_options)
        for name, options in (self.reward_options or {}).items():
            if name not in self.reward_funcs or not isinstance(options, dict):
                raise ValueError(
                    f"`reward_options` holds {name!r}: {options!r}; its keys are names in `reward_funcs` (here "
                    f"{', '.join(self.reward_funcs)}), each with a mapping of keyword arguments."
                )
