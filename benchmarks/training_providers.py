"""The libraries and settings that `bench training` compares, and the trainers that it builds, on random tokens."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.training_args import OptimizerNames

from liger_trainer.benchmarks.models import MODELS
from liger_trainer.benchmarks.records import ACTIVATION_MEMORY, FP8_BASE, OPTIM, PADDED, UNSHARED
from liger_trainer.benchmarks.registry import BenchmarkError, closest, family
from liger_trainer.benchmarks.training import Task
from liger_trainer.configs.flags import activation_memory_of
from liger_trainer.configs.liger_adamw import LIGER_ADAMW

if TYPE_CHECKING:
    from peft import LoraConfig

    from liger_trainer.kernels.fp8.modes import Fp8Mode

ATTENTION_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj"]
ATTENTION_LAYERS += ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]  # of latent attention
EXPERT_PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]  # not linear layers: one parameter for all experts
MIXER_LAYERS = ["in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]


def random_tokens(size: int, length: int, vocab: int) -> torch.Tensor:
    """`size` random token sequences, the same for every run."""
    return torch.randint(vocab, (size, length), generator=torch.Generator().manual_seed(0))


class Sequences(torch.utils.data.Dataset):
    """The sequences of all steps and GPUs of a task: of one document, packed from several, or padded."""

    def __init__(self, task: Task, vocab: int) -> None:
        self.task = task
        self.tokens = random_tokens(task.samples, task.length, vocab)
        self.positions = torch.arange(task.length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, labels = self.tokens[index], self._labels(index)
        if self.task.documents:
            positions = self.positions % self.task.documents
            labels = labels.masked_fill(positions == 0, -100)  # nothing predicts the start of the next document
            return {"input_ids": tokens, "labels": labels, "position_ids": positions}
        if self.task.padding:
            padding = self.positions >= self._end(index)
            labels, tokens = labels.masked_fill(padding, -100), tokens.masked_fill(padding, 0)
            return {"input_ids": tokens, "labels": labels, "attention_mask": (~padding).long()}
        return {"input_ids": tokens, "labels": labels}

    def _end(self, index: int) -> int:
        """Where the padding of a sequence begins; every step has the same ones."""
        return self.task.row_tokens[index % self.task.batch]

    def _labels(self, index: int) -> torch.Tensor:
        """The tokens of a sequence, padding included, -100 at the start of each document."""
        end = self._end(index)
        start = self.positions - self.positions % (self.task.documents or end)
        sizes = (end - start).clamp(max=self.task.documents or end)
        unlabelled = sizes - (sizes * self.task.labelled).round()
        return self.tokens[index].masked_fill(self.positions - start < unlabelled, -100)

    def rows(self) -> Any:
        """The same as a dataset of lists, for TRL's collator, which makes positions, masks and padding itself."""
        whole, rest = divmod(self.task.length, self.task.documents or self.task.length)
        lengths = [self.task.documents] * whole + [rest] * bool(rest)
        packed = {"seq_lengths": lengths} if self.task.documents else {}
        rows = []
        for index in range(len(self)):
            row, end = self[index], self._end(index)
            rows.append({name: row[name][:end].tolist() for name in ("input_ids", "labels")} | packed)
        return _dataset(rows)


@dataclasses.dataclass
class Setup:
    """The parts from which a provider builds its trainer."""

    task: Task
    model: PreTrainedModel
    arguments: dict[str, Any]
    callbacks: list[TrainerCallback]

    @property
    def dataset(self) -> Sequences:
        """The sequences of all steps and GPUs."""
        return Sequences(self.task, self.model.config.vocab_size)

    def answers(self) -> list[tuple[list[int], list[int]]]:
        """Prompt and completion of each sequence of all steps and GPUs."""
        prompt, counts = self.task.prompt_tokens, list(itertools.chain(*self.task.completion_tokens))
        rows = random_tokens(len(counts), prompt + max(counts), self.model.config.vocab_size).tolist()
        return [(row[:prompt], row[prompt : prompt + count]) for row, count in zip(rows, counts)]

    def pairs(self) -> list[tuple[list[int], list[int], list[int]]]:
        """A prompt, chosen and rejected completion for every two of the `answers`."""
        answers = self.answers()
        return [(*first, second[1]) for first, second in zip(answers[::2], answers[1::2])]

    def trainer(self, ours: bool = False, **arguments: Any) -> Trainer:
        """The trainer of the task, stock or `ours`, with some training arguments changed."""
        return TRAINERS[self.task.trainer](self, ours, {**self.arguments, **arguments})

    @property
    def lora(self) -> LoraConfig | None:
        """Adapters of the task's rank on all linear layers except the head.

        With experts, on attention, mixers and experts. PEFT refuses the `out_proj` of Nemotron-H.
        """
        from peft import LoraConfig

        rank = self.task.lora
        if not rank:
            return None
        targets: dict[str, Any] = {"target_modules": "all-linear"}
        if MODELS[self.task.model].experts:  # by name: for "all-linear" PEFT doubles the rank of gate and up
            targets = {"target_modules": ATTENTION_LAYERS, "target_parameters": EXPERT_PARAMETERS}
            if self.model.config.model_type == "nemotron_h":
                targets = {"target_modules": [*ATTENTION_LAYERS, "in_proj"]}
                targets |= {"target_parameters": ["experts.up_proj", "experts.down_proj"]}
            elif MODELS[self.task.model].mixer:
                targets["target_modules"] = [*ATTENTION_LAYERS, *MIXER_LAYERS, "out_proj"]
        kind = "SEQ_CLS" if self.task.trainer == "reward" else "CAUSAL_LM"
        return LoraConfig(r=rank, lora_alpha=2 * rank, task_type=kind, **targets)

    @property
    def trl(self) -> dict[str, Any]:
        """Arguments of every TRL trainer."""
        return {"processing_class": _tokenizer(), "callbacks": self.callbacks, "peft_config": self.lora}


def _dataset(rows: list[dict[str, Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_list(rows)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1, "prompt": 2}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")


def import_trainer(name: str) -> None:
    """Imports the classes of the trainer `name`, ours and stock, as a script does at its top."""
    title = {"causal_lm": "", "reward": "Reward"}.get(name, name.upper())
    getattr(importlib.import_module("liger_trainer"), f"Liger{title}Trainer")


def causal_lm(setup: Setup, ours: bool, settings: dict[str, Any]) -> Trainer:
    """The Trainer on language modelling."""
    from peft import get_peft_model
    from transformers import TrainingArguments

    from liger_trainer import LigerTrainer, LigerTrainingArguments, quantize_experts

    trainer, config = (LigerTrainer, LigerTrainingArguments) if ours else (Trainer, TrainingArguments)
    model: Any = setup.model
    if setup.lora is not None:
        with torch.device(model.device):  # random values for the many adapters of experts take long on a CPU
            model = get_peft_model(model, setup.lora)
    if ours and setup.task.quantize == "nf4" and MODELS[setup.task.model].experts:  # where only ours trains adapters
        quantize_experts(model, setup.task.quantize)
    return trainer(model, config(**settings), train_dataset=setup.dataset, callbacks=setup.callbacks)


def sft(setup: Setup, ours: bool, settings: dict[str, Any]) -> Trainer:
    """TRL's SFTTrainer on the same sequences; packed ones become one row, as with its `packing`."""
    trainer, config = _classes("SFT", ours)
    settings |= {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
    settings |= {"padding_free": bool(setup.task.documents)}
    return trainer(setup.model, args=config(**settings), train_dataset=setup.dataset.rows(), **setup.trl)


def _classes(name: str, ours: bool, module: str = "trl") -> tuple[Any, Any]:
    """TRL's trainer of that name and its config, or ours."""
    found, prefix = importlib.import_module("liger_trainer" if ours else module), "Liger" if ours else ""
    return getattr(found, f"{prefix}{name}Trainer"), getattr(found, f"{prefix}{name}Config")


def dpo(setup: Setup, ours: bool, settings: dict[str, Any]) -> Trainer:
    """TRL's DPOTrainer on tokenised pairs."""
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return _with_reference("DPO", setup, ours, settings, [dict(zip(names, pair)) for pair in setup.pairs()])


def kto(setup: Setup, ours: bool, settings: dict[str, Any]) -> Trainer:
    """TRL's KTOTrainer on tokenised completions, good and bad ones in turn."""
    batch, answers = setup.task.batch, setup.answers()
    rows = []
    for place, (prompt, completion) in enumerate(answers):
        before = place - 1 if place % batch else place + batch - 1  # TRL mismatches the completions of a batch
        mismatched = answers[before][1]
        row = {"prompt_ids": prompt, "completion_ids": completion, "KL_completion_ids": mismatched}
        rows.append(row | {"label": place % 2 == 0})
    return _with_reference("KTO", setup, ours, settings, rows)


def _with_reference(
    name: str, setup: Setup, ours: bool, settings: dict[str, Any], rows: list[dict[str, Any]]
) -> Trainer:
    base: Any
    base, config = _classes(name, ours)

    class Tokenised(base):
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    reference = None if setup.task.lora else copy.deepcopy(setup.model)  # without adapters, the policy is the reference
    arguments = config(**settings, max_length=None)
    return Tokenised(setup.model, reference, arguments, train_dataset=_dataset(rows), **setup.trl)


def _without_reference(name: str, setup: Setup, ours: bool, settings: dict[str, Any]) -> Trainer:
    """TRL's ORPOTrainer or CPOTrainer on tokenised pairs."""
    base: Any
    base, config = _classes(name, ours, f"trl.experimental.{name.lower()}")

    class Tokenised(base):
        @staticmethod
        def tokenize_row(feature: dict[str, Any]) -> dict[str, Any]:
            return feature

    rows: list[dict[str, Any]] = []
    for prompt, *completions in setup.pairs():
        rows.append({})
        for side, completion in zip(("chosen", "rejected"), completions):
            rows[-1] |= {
                f"{side}_input_ids": prompt + completion,
                f"{side}_attention_mask": [1] * len(prompt + completion),
                f"{side}_labels": [-100] * len(prompt) + completion,
            }
    return Tokenised(setup.model, config(**settings), train_dataset=_dataset(rows), **setup.trl)


def reward(setup: Setup, ours: bool, settings: dict[str, Any]) -> Trainer:
    """TRL's RewardTrainer on tokenised pairs, and a model with a score for its head."""
    trainer, config = _classes("Reward", ours)
    rows = [{"chosen_ids": prompt + good, "rejected_ids": prompt + bad} for prompt, good, bad in setup.pairs()]
    return trainer(setup.model, config(**settings, max_length=None), train_dataset=_dataset(rows), **setup.trl)


def rloo(setup: Setup, ours: bool, settings: dict[str, Any]) -> Trainer:
    """TRL's RLOOTrainer with given completions; nothing is generated.

    Its ratios are of whole completions, so no guess at the old log-probabilities is near enough: they are those of the
    step's own forward, plus what `completions` gives.
    """
    settings |= {"beta": 0.0}  # the reference is for rewards, which are given
    trainer = _completed("RLOO", setup, ours, settings)

    def are_old(model: Any, args: Any, outputs: Any) -> None:
        trainer.given["old_logps"] += outputs.log_probs.detach().sum(-1)

    trainer.model.register_forward_hook(are_old)
    return trainer


def _completed(name: str, setup: Setup, ours: bool, settings: dict[str, Any]) -> Any:
    """TRL's GRPOTrainer or RLOOTrainer with given completions and old log-probabilities; nothing is generated."""
    base: Any
    base, config = _classes(name, ours)
    task, vocab, steps = setup.task, setup.model.config.vocab_size, itertools.count()

    class Completed(base):
        def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
            place = next(steps) * task.batches + self.accelerator.process_index // task.context_parallel
            self.given = completions(task, vocab, place, self.accelerator.device)
            return self._known(self.given) if ours else self.given  # as after a generation

    settings |= {"num_generations": task.group_size or task.batch, "max_completion_length": task.length}
    prompts = _dataset([{"prompt": "prompt"}] * task.samples)
    data = {"reward_funcs": lambda completions, **_: [0.0] * len(completions), "train_dataset": prompts}
    return Completed(setup.model, args=config(**settings), **data, **setup.trl)


def completions(task: Task, vocab: int, place: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What GRPO's and RLOO's losses take: prompts, completions, advantages and old log-probabilities.

    Args:
        task: The work.
        vocab: Token ids are below it.
        place: Which batch of `Task.completion_tokens`.
        device: Device of the tensors.
    """
    generator = torch.Generator().manual_seed(place)
    batches, size = task.completion_tokens, task.group_size or 1
    counts = torch.tensor(batches[place])[:, None]
    first = place - place % task.batches  # of this step
    prompts = torch.randint(vocab, (task.batch // size, task.prompt_tokens), generator=generator)
    prompts = prompts.repeat_interleave(size, dim=0)
    shape = (task.batch, int(counts.max()))
    mask = (torch.arange(shape[1]) < counts).long()
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": torch.randint(vocab, shape, generator=generator) * mask,
        "completion_mask": mask,
        "advantages": torch.linspace(-1.0, 1.5, task.batch),
        # Close to those of random weights, so that some ratios are clipped and some are not.
        "old_per_token_logps": (torch.randn(shape, generator=generator) - math.log(vocab)) * mask,
        "num_items_in_batch": torch.tensor(sum(map(sum, batches[first : first + task.batches]))),
        "old_logps": 0.3 * torch.randn(task.batch, generator=generator),  # of RLOO, above the log-probabilities
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


TRAINERS: dict[str, Callable[[Setup, bool, dict[str, Any]], Trainer]] = {
    "causal_lm": causal_lm,
    "sft": sft,
    "dpo": dpo,
    "kto": kto,
    "orpo": functools.partial(_without_reference, "ORPO"),
    "cpo": functools.partial(_without_reference, "CPO"),
    "reward": reward,
    "grpo": functools.partial(_completed, "GRPO"),
    "rloo": rloo,
}


TRAINING_PROVIDERS: dict[str, Callable[[Setup], Trainer]] = {}


def training_provider(name: str) -> Callable[[Callable[[Setup], Trainer]], Callable[[Setup], Trainer]]:
    """Registers a function that builds the trainer of a `Setup`."""

    def register(function: Callable[[Setup], Trainer]) -> Callable[[Setup], Trainer]:
        TRAINING_PROVIDERS[name] = function
        return function

    return register


def _with(ours: bool = True, **arguments: Any) -> Callable[[Setup], Trainer]:
    """The trainer with these training arguments."""
    return lambda setup: setup.trainer(ours=ours, **arguments)


def _offloading(**arguments: Any) -> Callable[..., Trainer]:
    """Our trainer with these training arguments and a share of the activations in host memory."""

    def build(setup: Setup, fraction: float = 1.0) -> Trainer:
        offloaded = {"activation_offloading": True, "activation_offloading_fraction": fraction}
        return setup.trainer(ours=True, **arguments, **offloaded)

    return build


def _liger(setup: Setup) -> Trainer:
    from liger_trainer import set_stock_trainer_kernels

    set_stock_trainer_kernels("liger_kernel")
    return setup.trainer(use_liger_kernel=True)


def _with_fla(build: Callable[[Setup], Trainer]) -> Callable[[Setup], Trainer]:
    """`build`, only where flash-linear-attention is installed: transformers then runs it in gated delta nets."""

    def checked(setup: Setup) -> Trainer:
        importlib.import_module("fla.ops.gated_delta_rule")
        return build(setup)

    return checked


IN_FP8: dict[str, Fp8Mode] = {
    "liger_trainer fp8": "rowwise_gw_hp",
    "liger_trainer fp8 rowwise": "rowwise",
    "liger_trainer fp8 tensorwise": "tensorwise",
}
_IN_TILES: dict[str, Any] = {"liger_kernel_config": {"tiled_mlp": True}}
TRAINING_PROVIDERS |= {
    "hf": _with(ours=False, use_liger_kernel=False),
    "hf activation_offloading": _with(ours=False, use_liger_kernel=False, activation_offloading=True),
    "torch.compile": _with(ours=False, use_liger_kernel=False, torch_compile=True),
    "torch.compile reduce-overhead": _with(
        ours=False, use_liger_kernel=False, torch_compile=True, torch_compile_mode="reduce-overhead"
    ),
    "hf fla": _with_fla(_with(ours=False, use_liger_kernel=False)),
    "liger-kernel": _liger,
    "liger-kernel fla": _with_fla(_liger),
    "liger_trainer": _with(),
    "liger_trainer without cuda_graphs": _with(cuda_graphs=False),
    PADDED: _with(padding_free=False),
    UNSHARED: _with(share_prompt=False),
    **{name: _with(fp8=mode) for name, mode in IN_FP8.items()},
    FP8_BASE: _with(fp8_base=True),
    f"{FP8_BASE} activation_offloading": _offloading(fp8_base=True),
    "liger_trainer tiled_mlp": _with(**_IN_TILES),
    "liger_trainer activation_offloading": _offloading(),
    "liger_trainer tiled_mlp activation_offloading": _offloading(**_IN_TILES),
}


def find_training_provider(name: str) -> Callable[[Setup], Trainer]:
    """The provider NAME, or for ``NAME=NUMBER`` the provider NAME with that number as its second argument.

    After the name, `OPTIM` and an optimizer set that argument; after the name of one of ours, `ACTIVATION_MEMORY` and a
    size, or ``auto``, that one. With both, the optimizer comes first.

    Raises:
        BenchmarkError: if there is no such provider, or it takes no number, no such size or no such optimizer.
    """
    name, sized, size = name.partition(ACTIVATION_MEMORY)
    name, chosen, optim = name.partition(OPTIM)
    function, more = _with_number(name), {}
    if sized:
        if family(name) != "liger_trainer":
            raise BenchmarkError(f"`activation_memory` is an argument of liger_trainer, not of {name!r}; leave it out.")
        more["activation_memory"] = size
        try:
            activation_memory_of(SimpleNamespace(**more))
        except ValueError as error:
            raise BenchmarkError(str(error)) from None
    if chosen:
        more["optim"] = closest(optim, optimizers_of(name), "optimizer")
    return functools.partial(_with_arguments, function, more) if more else function


def _with_number(name: str) -> Callable[[Setup], Trainer]:
    known, equals, number = name.partition("=")
    function = TRAINING_PROVIDERS[closest(known, TRAINING_PROVIDERS, "provider")]
    if not equals:
        return function
    settings = list(inspect.signature(function).parameters)[1:]
    if not settings:
        raise BenchmarkError(f"Provider {known!r} takes no number; leave out {equals + number!r}.")
    try:
        return functools.partial(function, **{settings[0]: float(number)})
    except ValueError:
        raise BenchmarkError(f"Provider {name!r}: {number!r} is no number.") from None


def _with_arguments(function: Callable[[Setup], Trainer], more: dict[str, Any], setup: Setup) -> Trainer:
    # Under autocast accelerate's FSDP2 would make the weights fp32.
    stays = more.get("optim") == LIGER_ADAMW and setup.task.dtype == "bfloat16" and not setup.task.lora
    arguments = {**setup.arguments, **more, **({"bf16": False} if stays else {})}
    return function(dataclasses.replace(setup, arguments=arguments))


def optimizers_of(provider: str) -> list[str]:
    """The optimizers that a provider may train with."""
    stock = [name.value for name in OptimizerNames]
    return [LIGER_ADAMW, *stock] if family(provider) == "liger_trainer" else stock
