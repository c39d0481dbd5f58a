"""What a training run has left: finds its model or its adapters, and loads them with their tokenizer."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import DEQUANTISED_MODELS
from liger_trainer.errors import UserError
from liger_trainer.packed.loading import PackedError, dequantise, method_of, packed_loading, quantization_of
from liger_trainer.patching.moe.quantized_experts import round_experts
from liger_trainer.recipe.file import first_line
from liger_trainer.recipe.model import check_weights, model_class, read_config
from liger_trainer.trainers.checks.low_bit import check_scales

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

    from liger_trainer.trainers.checkpoints.saved_weights import BaseQuantization

logger = logging.getLogger("liger_trainer")

ADAPTER_CONFIG = "adapter_config.json"
_PROCESSOR = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """The folder with a run's model or adapters, and the base of the adapters."""

    folder: Path  # the output folder of the run, or a checkpoint in it
    adapter: PeftConfig | None  # PEFT's configuration; None for a whole model
    base: str  # the name or folder of the base model; for a whole model, `folder`
    revision: str = "main"  # the revision of `base` on the Hub
    # How the base was quantised while it was loaded for training; None if it was not.
    quantization: BaseQuantization | None = None
    trust_remote_code: bool = False  # whether to run code that comes with the model

    @property
    def given(self) -> str:
        """How messages name the model."""
        return f"The base model of {str(self.folder)!r}" if self.adapter is not None else "RUN"

    def hub_options(self) -> dict[str, Any]:
        """Keyword arguments of every ``from_pretrained`` of the base."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def find_run(run: str, base_model: str | None = None, trust_remote_code: bool = False) -> SavedRun:
    """The model that a training run has left in the folder `run`, or in the last complete checkpoint there."""
    folder = _folder_of(Path(run))
    if not (folder / ADAPTER_CONFIG).is_file():
        if base_model is not None:
            raise UserError(f"`--base_model` is {base_model!r}, but {str(folder)!r} holds a whole model; leave it out.")
        return SavedRun(folder, None, str(folder), trust_remote_code=trust_remote_code)
    from peft import PeftConfig

    from liger_trainer.trainers.checkpoints.saved_weights import read_base_quantization

    try:
        adapter = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # each kind of adapter has its own checks and errors
        raise UserError(f"{str(folder / ADAPTER_CONFIG)!r} cannot be read: {first_line(error)}") from error
    base = base_model or _base_of(adapter, folder)
    revision = (None if base_model else adapter.revision) or "main"
    return SavedRun(folder, adapter, base, revision, read_base_quantization(folder), trust_remote_code)


def _folder_of(run: Path) -> Path:
    if not run.is_dir():
        raise UserError(f"RUN: there is no folder {str(run)!r} (looked from {Path.cwd()}).")
    from liger_trainer.trainers.checkpoints.whole import complete_checkpoints

    for folder in (run, *reversed(complete_checkpoints(run))):
        if (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
            if folder != run:
                logger.warning("%s holds no model of its own; its last checkpoint, %s, is used.", run, folder.name)
            return folder
    raise UserError(
        f"RUN: the folder {str(run)!r} holds neither adapters ({ADAPTER_CONFIG}) nor a model (config.json), and no "
        "complete checkpoint with one of them; give the output folder of a training run, or a checkpoint in it."
    )


def _base_of(adapter: PeftConfig, folder: Path) -> str:
    base = adapter.base_model_name_or_path
    if not base:
        raise UserError(f"The adapters in {str(folder)!r} name no base model; give it with `--base_model`.")
    if Path(base).name != "initial_model" or Path(base).is_dir():
        return base
    moved = [place / "initial_model" for place in (folder, folder.parent)]  # with its run, to another place
    found = next((str(place) for place in moved if place.is_dir()), None)
    if found is None:
        raise UserError(
            f"The base model of {str(folder)!r} is no longer in {base!r}; give its folder with `--base_model`."
        )
    return found


def read_base_config(run: SavedRun) -> PreTrainedConfig:
    """The configuration of the base model, or of the whole model."""
    if run.adapter is not None and Path(run.base).is_absolute() and not Path(run.base).exists():
        raise UserError(f"{run.given}: there is no folder {run.base!r}; say where it is now with `--base_model`.")
    config = read_config(run.base, run.given, run.revision, run.trust_remote_code)
    check_weights(run.base, f"{run.given}: {run.base!r}")
    return config


def load_model(run: SavedRun, dtype: torch.dtype | str) -> PreTrainedModel:
    """The base model in host memory, or the whole model.

    A quantised base has the weights that training computed with: quantised in the dtype of the training, and back.
    """
    config = read_base_config(run)
    cls, options = class_of_model(run, config)
    trained_on = run.quantization
    settings = (trained_on and trained_on.config) or quantization_of(config)
    options["dtype"] = dtype
    if settings is not None or trained_on is not None:
        options |= _of_training(run)
    try:
        by_transformers = trained_on is not None and trained_on.decoded
        model: Any = _decoded(cls, run, options) if method_of(config) is not None and not by_transformers else None
        if model is None and settings is not None:
            options |= _quantisation_options(settings, is_published=trained_on is None)
        if model is None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "You passed `quantization_config`")  # its `dequantize` counts
                model = cls.from_pretrained(run.base, **options, **run.hub_options())
            if settings is not None:
                model = _dequantised(model)
        check_scales(model)
        if trained_on is not None and trained_on.experts is not None:
            round_experts(model, **trained_on.experts)
    except Exception as error:  # each architecture and each quantisation has its own errors
        raise UserError(f"{run.given}: {run.base!r} cannot be loaded: {first_line(error)}") from error
    return (model if dtype == "auto" else model.to(dtype)).eval()


def load_packed_base(run: SavedRun) -> PreTrainedModel:
    """The base model as it was published, in host memory: its weights stay packed."""
    cls, options = class_of_model(run, read_base_config(run))
    try:
        with packed_loading():
            return cls.from_pretrained(run.base, **options, **_of_training(run), **run.hub_options())
    except Exception as error:  # each architecture and each quantisation has its own errors
        raise UserError(f"{run.given}: {run.base!r} cannot be loaded packed: {first_line(error)}") from error


def _of_training(run: SavedRun) -> dict[str, Any]:
    """What ``from_pretrained`` is told to load a quantised base as for training, but in host memory."""
    dtype = "auto" if run.quantization is None else run.quantization.dtype
    return {"dtype": dtype, "device_map": {"": "cpu"}}


def _decoded(cls: Any, run: SavedRun, options: dict[str, Any]) -> PreTrainedModel | None:
    """A base that was published packed, decoded as trainers decode it; None if they cannot keep it packed."""
    try:
        with packed_loading():
            return dequantise(cls.from_pretrained(run.base, **options, **run.hub_options()))
    except PackedError:
        return None


def _quantisation_options(settings: Any, is_published: bool) -> dict[str, Any]:
    """What ``from_pretrained`` is told of the quantisation `settings`: to dequantise at once, if the format can."""
    from transformers.quantizers import AutoQuantizationConfig

    config = AutoQuantizationConfig.from_dict(settings if isinstance(settings, dict) else settings.to_dict())
    if hasattr(config, "dequantize"):
        config.dequantize = True
    elif is_published:  # it is in the checkpoint
        return {}
    return {"quantization_config": config}


def _dequantised(model: Any) -> PreTrainedModel:
    """`model` without its quantisation, which may have gone while it was loaded."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        if getattr(quantizer.quantization_config, "dequantize", False):
            quantizer.remove_quantization_config(model)
        else:
            model = model.dequantize()
    vars(model.config.get_text_config(decoder=True)).pop("quantization_config", None)
    require(DEQUANTISED_MODELS)
    model.__dict__.pop("_weight_conversions", None)  # else it would be saved as it was published, quantised
    return model


def class_of_model(run: SavedRun, config: PreTrainedConfig) -> tuple[Any, dict[str, Any]]:
    """The class of the model that was trained, and what its ``from_pretrained`` needs to know."""
    import transformers

    if run.adapter is not None and getattr(run.adapter.task_type, "value", run.adapter.task_type) == "SEQ_CLS":
        scores = [shape for name, shape in _adapter_shapes(run.folder).items() if name.endswith("score.weight")]
        return transformers.AutoModelForSequenceClassification, {"num_labels": scores[0][0]} if scores else {}
    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    return next((cls for cls in named if cls is not None), model_class(config)), {}


def _adapter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        return {}
    with safe_open(file, "pt") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def add_adapter(run: SavedRun, base: PreTrainedModel, dtype: torch.dtype | None = None) -> PeftModel:
    """`base` with the adapters of `run`, of which every tensor must find its place; `dtype` None is PEFT's choice."""
    from peft import PeftModel

    folder = str(run.folder)
    check_weights(folder, "RUN")
    _fit_vocabulary(run, base)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # missing tensors are refused below; the others are about training
            model = PeftModel.from_pretrained(base, folder, torch_device="cpu", low_cpu_mem_usage=False)
            result = model.load_adapter(folder, "default", torch_device="cpu")
    except Exception as error:  # of PEFT, of torch, and of the file
        raise UserError(
            f"The adapters in {folder!r} do not fit their base model {run.base!r}: {first_line(error)} Give the model "
            "that they were trained on with `--base_model`."
        ) from error
    names = _adapter_shapes(run.folder).keys()
    # Beside a resized vocabulary PEFT writes the trained embedding and head twice, and reads them by the shorter name.
    copies = {name for name in names if ".modules_to_save." in name and name.replace(".modules_to_save", "") in names}
    wrong = [name for name in (*result.missing_keys, *result.unexpected_keys) if name not in copies]
    if wrong and not model.active_peft_config.is_prompt_learning:  # prompts have a place of their own
        raise UserError(
            f"The adapters in {folder!r} do not fit their base model {run.base!r}: {len(wrong)} tensors are missing in "
            f"one of them, such as {wrong[0]!r}. Give the model that they were trained on with `--base_model`."
        )
    if dtype is not None:
        model = model.to(dtype)
    return model.eval()


def _fit_vocabulary(run: SavedRun, base: Any) -> None:
    """Gives the embedding of `base` as many rows as it had when it was saved beside the adapters."""
    ends = (".embed_tokens.weight", ".lm_head.weight", ".wte.weight")
    rows = {shape[0] for name, shape in _adapter_shapes(run.folder).items() if name.endswith(ends)}
    if len(rows) == 1 and rows != {base.get_input_embeddings().num_embeddings}:
        base.resize_token_embeddings(rows.pop(), mean_resizing=False)


def load_tokenizer(run: SavedRun) -> Any:
    """The tokenizer of the run or, where it saved none, of its base model; None if neither has one."""
    from transformers import AutoTokenizer

    trusted = {"trust_remote_code": run.trust_remote_code}
    places: list[tuple[str, dict[str, Any]]] = [(str(run.folder), trusted), (run.base, run.hub_options())]
    for place, options in places:
        if _find_file(place, "tokenizer_config.json", options.get("revision")) is None:
            continue
        try:
            return AutoTokenizer.from_pretrained(place, **options)
        except Exception as error:  # of each tokenizer's own files
            raise UserError(f"The tokenizer in {place!r} cannot be loaded: {first_line(error)}") from error
    return None


def copy_quantization(run: SavedRun, folder: Path) -> None:
    """Copies into `folder` what `run` says about its base, so that adapters there are merged into the same weights."""
    from liger_trainer.trainers.checkpoints.saved_weights import FILE

    if (run.folder / FILE).is_file():
        shutil.copyfile(run.folder / FILE, folder / FILE)


def copy_processor(run: SavedRun, folder: Path) -> None:
    """Copies what a multimodal processor has beside its tokenizer, of the run or else of its base, into `folder`.

    The files alone: loading them would need libraries for pictures and videos.
    """
    for place, revision in ((str(run.folder), None), (run.base, run.revision)):
        found = [path for file in _PROCESSOR if (path := _find_file(place, file, revision)) is not None]
        for path in found:
            shutil.copyfile(path, folder / Path(path).name)
        if found:
            return


def _find_file(place: str, file: str, revision: str | None) -> str | None:
    from transformers.utils import cached_file

    try:
        return cached_file(place, file, revision=revision)
    except OSError:  # there is none
        return None


def stop_at_end_of_turn(model: Any, tokenizer: Any) -> None:
    """Makes generation stop at the tokenizer's end token, as the Trainer does for a whole model before it saves it."""
    config = getattr(model, "generation_config", None)
    if config is None or tokenizer is None:
        return
    known = config.eos_token_id
    ends = [] if known is None else [known] if isinstance(known, int) else list(known)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        config.eos_token_id = [tokenizer.eos_token_id, *ends]
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
