"""The keys of a recipe: where each is declared, and what each ``trainer`` stands for.

A recipe's keys are the fields of these dataclasses (`argument_classes`); a key's name, type, default and meaning are
declared there and nowhere else:

- `RecipeArguments`, and for some trainers `CausalLMArguments` or `RewardArguments`, below;
- TRL's `ScriptArguments`, `DatasetMixtureConfig` and `ModelConfig`;
- the trainer's own arguments, such as `LigerDPOConfig`, whose kernel flags are in `liger_trainer.configs.flags`.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    JSONMapping = dict[str, Any]  # once the dataclass is built
else:
    JSONMapping = dict[str, Any] | str  # as a recipe or the command line gives it: a mapping, or one as JSON text


@dataclass
class RecipeArguments:
    """Trainer, model and data: the keys of every recipe that are not arguments of TRL's scripts or of a trainer.

    Args:
        trainer: ``"sft"`` (`LigerSFTTrainer`: conversations, prompt and completion, or text), ``"causal_lm"``
            (`LigerTrainer` on blocks of plain text), ``"dpo"``, ``"orpo"``, ``"cpo"`` (SimPO is its ``loss_type:
            "simpo"``) and ``"reward"`` (pairs of a chosen and a rejected answer), ``"kto"`` (answers with a label),
            ``"grpo"`` or ``"rloo"`` (prompts, and reward functions).
        accelerate_config: How to spread the recipe over GPUs: a name or file, as for ``--accelerate_config``.
            ``liger-trainer train`` uses it if that option is not given and there are GPUs.
        expert_parallel_size: Number of processes that share the experts of a mixture of experts: each holds some of
            them whole, and tokens are sent to their experts. FSDP2 splits the rest of the model over all processes;
            `from_pretrained` does that, so launch with ``accelerate_config: "ddp"``. 1 by default.
        model_config: Configuration of a model to train from scratch, with its ``model_type``; a mapping or JSON.
            Replaces ``model_name_or_path``.
        model_family: The ``model_type`` that ``--smoke`` shrinks; found from the model's id by default.
        tokenizer_name_or_path: Tokenizer to load; the model's own by default.
        tokenizer_vocab_size: Train a byte-level BPE tokenizer of this size on the training text instead.
        data_files: Local files to train on, patterns of their names (``data/*.jsonl``), or folders of them: json,
            jsonl, csv, tsv, parquet, arrow or txt, compressed or not.
        eval_data_files: Local files to evaluate on, of the same kinds.
        columns: New names of columns, each with its name in the data: ``{"prompt": "question"}``. The rows are then
            read as any others.
        roles: Names of roles in conversations, each with the role that it stands for: ``{"narrator": "system"}``.
        prompt_template: The text of the prompt, with names of columns in braces: ``"{question} Answer:"``. It is
            taken as it is, without a chat template, unless there is a ``system_prompt``.
        system_prompt: Turns plain prompts, and their answers, into conversations: a system turn with this text (none if
            it is empty), then the prompt as the user's turn. A conversation gets this system turn unless it has one.
        warm_start: Keys of a ``trainer: "sft"`` recipe that runs first, as a mapping or JSON; this recipe then
            continues with its model. Model, tokenizer, precision and seed come from this recipe.
        overwrite_output_dir: Delete the checkpoints in ``output_dir`` and start again.
        loss_curve: Draw ``loss_curve.png`` into ``output_dir`` at the end.
        router_balance: For a mixture of experts, log how evenly its experts are used, and at the end draw
            ``router_balance.png`` and write ``router_balance.csv`` into ``output_dir``; see `RouterBalanceCallback`.
        sample_prompts: Texts that the saved model, loaded again, continues at the end; after training on conversations,
            questions that it answers.
        sample_tokens: New tokens for each of them.
        sample_steps: Show the likeliest answers to ``sample_prompts`` during the run too: before the first step, and
            every so many steps.
    """

    trainer: Literal["sft", "causal_lm", "dpo", "kto", "orpo", "cpo", "grpo", "rloo", "reward"] = "sft"
    accelerate_config: str | None = None
    expert_parallel_size: int = 1
    model_config: JSONMapping | None = None
    model_family: str | None = None
    tokenizer_name_or_path: str | None = None
    tokenizer_vocab_size: int | None = None
    data_files: list[str] | None = None
    eval_data_files: list[str] | None = None
    columns: JSONMapping | None = None
    roles: JSONMapping | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None
    warm_start: JSONMapping | None = None
    overwrite_output_dir: bool = False
    loss_curve: bool = True
    router_balance: bool = False
    sample_prompts: list[str] | None = None
    sample_tokens: int = 48
    sample_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("model_config", "columns", "roles", "warm_start"):
            setattr(self, name, mapping(name, getattr(self, name)))


def mapping(name: str, value: Any) -> dict[str, Any] | None:
    """The value of the key `name` as a mapping; it may be JSON text, or None."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"`{name}` is {value!r}, which is not JSON: {error}.") from error
    if value is not None and not isinstance(value, dict):
        like = " with a `model_type`" if name == "model_config" else ""
        raise ValueError(f"`{name}` is {value!r}; give a mapping{like}.")
    if name == "model_config" and value is not None and "model_type" not in value:
        raise ValueError("`model_config` has no `model_type`; give one, such as 'llama'.")
    return value


@dataclass
class CausalLMArguments:
    """Keys of ``trainer: "causal_lm"`` beside the training arguments; TRL's `SFTConfig` has its own.

    Args:
        max_length: Tokens in a training block; documents are joined by the end-of-sequence token and cut into blocks.
        dataset_text_field: The column that holds the text.
        trust_remote_code: Run model or tokenizer code that comes with a repository.
    """

    max_length: int = 1024
    dataset_text_field: str = "text"
    trust_remote_code: bool = False


@dataclass
class RewardArguments:
    """Keys of ``trainer: "grpo"`` and ``"rloo"`` beside their training arguments.

    Args:
        reward_funcs: Reward functions as ``"package.module:function"`` (also found in the current folder), and reward
            models by their Hub id or folder.
        reward_options: For a function in `reward_funcs`, the keyword arguments of every call; a mapping of mappings, or
            JSON.
    """

    reward_funcs: list[str] | None = None
    reward_options: JSONMapping | None = None

    def __post_init__(self) -> None:
        if not self.reward_funcs:
            raise ValueError('`reward_funcs` is empty; name at least one, such as ["liger_trainer.rewards:accuracy"].')
        self.reward_options = mapping("reward_options", self.reward_options)
        for name, options in (self.reward_options or {}).items():
            if name not in self.reward_funcs or not isinstance(options, dict):
                raise ValueError(
                    f"`reward_options` holds {name!r}: {options!r}; its keys are names in `reward_funcs` (here "
                    f"{', '.join(self.reward_funcs)}), each with a mapping of keyword arguments."
                )


TEXT_FIELD = "dataset_text_field"
"""Among a trainer's columns, stands for the column that this key of the recipe names."""


@dataclass(frozen=True)
class TrainerKind:
    """One value of ``trainer``."""

    name: str  # the classes are ``Liger{name}Trainer`` and ``Liger{name}Config``
    data: str  # the kind of rows, as in `smoke.ROW_KINDS`
    columns: tuple[tuple[str, ...], ...]  # alternatives; the data must have all columns of one of them
    more: type | None = None  # a dataclass of further keys
    # The cross entropy of logits, a function of log-probabilities, or none of the two, where the model scores sequences
    # and has another head.
    loss: Literal["cross_entropy", "log_probs", "none"] = "log_probs"
    # Whether the trainer loads its model, or a reference model, from a folder or the Hub, so that a new model must be
    # saved first.
    from_folder: bool = True
    # Whether the loss needs a reference model; one that generates needs it for its penalty alone.
    has_reference: bool = False

    @property
    def pairs(self) -> bool:
        """Whether a sample is two sequences, a chosen and a rejected one."""
        return self.data == "preference"

    @property
    def generates(self) -> bool:
        """Whether the model that is trained writes the answers, so that the data has no labels."""
        return self.data == "prompt"

    @property
    def scores(self) -> bool:
        """Whether the model gives a sequence a number, and writes no text."""
        return self.loss == "none"

    @property
    def batch_is_fixed(self) -> bool:
        """Whether another micro-batch would change the loss: KTO estimates a mean over it, groups must stay whole."""
        return self.data in ("unpaired", "prompt")

    @property
    def trainer_class(self) -> Any:
        """The trainer's class."""
        return getattr(importlib.import_module("liger_trainer"), f"Liger{self.name}Trainer")

    @property
    def config_class(self) -> Any:
        """The class of its arguments."""
        name = f"Liger{self.name}Config" if self.name else "LigerTrainingArguments"
        return getattr(importlib.import_module("liger_trainer"), name)


_MESSAGES = (("messages",), ("conversations",), ("prompt", "completion"), ("input_ids",), (TEXT_FIELD,))
_PAIRS = (("chosen", "rejected"),)
_LABELLED = (("prompt", "completion", "label"), ("chosen", "rejected"))

TRAINERS = {
    "sft": TrainerKind("SFT", "messages", _MESSAGES, loss="cross_entropy", from_folder=False),
    "causal_lm": TrainerKind("", "text", ((TEXT_FIELD,),), CausalLMArguments, "cross_entropy", from_folder=False),
    "dpo": TrainerKind("DPO", "preference", _PAIRS, has_reference=True),
    "kto": TrainerKind("KTO", "unpaired", _LABELLED, has_reference=True),
    "orpo": TrainerKind("ORPO", "preference", _PAIRS),
    "cpo": TrainerKind("CPO", "preference", _PAIRS),
    "grpo": TrainerKind("GRPO", "prompt", (("prompt",),), RewardArguments),
    "rloo": TrainerKind("RLOO", "prompt", (("prompt",),), RewardArguments),
    "reward": TrainerKind("Reward", "preference", _PAIRS, loss="none"),
}


def argument_classes(trainer: str) -> tuple[type, ...]:
    """The dataclasses whose fields are the keys of a recipe for `trainer`; a `Recipe` holds an instance of each."""
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

    kind = TRAINERS[trainer]
    common = (RecipeArguments, ScriptArguments, DatasetMixtureConfig, ModelConfig, kind.config_class)
    return common if kind.more is None else (*common, kind.more)
