"""Merges the adapters of a run into their base model, and proves that the result is the same model.

All is computed in fp32 and rounded once, to the dtype that is saved. PEFT merges; what it gets wrong is prepared
before: a head that is tied to the embedding gets a weight of its own, since both would get the adapter of one, and with
`ensure_weight_tying` twice.

It is if both compute the same logits, within the rounding of a dtype.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import PUBLISHED_NAMES
from liger_trainer.errors import UserError
from liger_trainer.head.lm_head import trained_rows_of
from liger_trainer.packed.formats import METHODS, format_name
from liger_trainer.packed.loading import dequantise, packed_loading, quantization_of
from liger_trainer.recipe.file import first_line
from liger_trainer.tools.export.folders import new_folder
from liger_trainer.tools.export.fp8_blocks import Survival, check_form, packed_weights, quantise_again
from liger_trainer.tools.export.saved_run import (
    SavedRun,
    add_adapter,
    copy_processor,
    load_model,
    load_packed_base,
    load_tokenizer,
    read_base_config,
    stop_at_end_of_turn,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel


ROWS, TOKENS = 4, 64
"""Random rows: with 256 tokens, each of 128 experts of which a token takes 8 is left out with probability 1e-7."""

SURVIVAL_FILE = "fp8_merge.json"
"""Beside a model that was quantised again: what that left of the adapters' change, of the model and of each weight."""

_PRODUCTS = 8
"""Of a layer: q, k, v, o, gate, up and down, and the sum; their relative errors add up as random numbers do."""

_AMPLIFIED = 4.0
"""What later layers may make of an error: nonlinear functions, and differences of large numbers."""


def random_rows(model: Any, left_out: set[int]) -> torch.Tensor:
    """Token ids `(ROWS, TOKENS)`, the same at each call, without special ones, which may stand for images."""
    config = model.config.get_text_config()
    special = left_out | _ids_in(model.config.to_dict())
    ids = [id for id in range(config.vocab_size) if id not in special]
    length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    drawn = torch.randint(len(ids), (ROWS, length), generator=torch.Generator().manual_seed(0))
    return torch.tensor(ids)[drawn]


def _ids_in(settings: dict[str, Any]) -> set[int]:
    """The ids that a configuration names, such as ``image_token_id``, at any depth."""
    found: set[int] = set()
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= _ids_in(value)
        elif str(key).endswith(("token_id", "token_index")):
            found |= {one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)}
    return found


@torch.no_grad()
def logits_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The logits of each position of `rows`, or the scores of each row, `(positions, vocabulary)` in fp32."""
    found = [model(input_ids=row[None], use_cache=False).logits.float() for row in rows]
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in found])


def distances(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The distance of each position's logits, relative to the root mean square of all expected ones."""
    size = expected.square().mean(dim=-1).mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return (expected - found).square().mean(dim=-1).sqrt() / size


def tolerance(dtype: torch.dtype, layers: int) -> float:
    """How far logits may be apart, relative to their size, after each weight was rounded to `dtype`.

    A rounding to nearest is an error of up to ``eps / 2``, of ``eps / 2 / sqrt(3)`` on average, relative to the weight
    and so to a product with it. The errors of the layers' products are independent, so their squares add up. fp32
    arithmetic has errors of the same form: the adapted model adds two products, the merged one computes one.
    """
    rounding = torch.finfo(dtype).eps / 2 / math.sqrt(3)
    arithmetic = 8 * torch.finfo(torch.float32).eps  # sums over rows of a weight, in another order
    return _AMPLIFIED * math.sqrt(_PRODUCTS * layers) * (rounding + arithmetic)


logger = logging.getLogger("liger_trainer")


class MergeError(UserError):
    """A merged model that is not the adapted one, or adapters that cannot be merged; the text is the whole message."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """How far the merged model's logits are from the adapted model's, relative to the size of the logits."""

    merged: float  # the largest distance of a position, with the merged weights in fp32
    saved: float  # the median distance of the positions, with the model loaded from the folder
    limit: float  # the largest `saved` that rounding to the saved dtype explains
    effect: float  # the median distance of the adapted model from its base
    survival: Survival | None = None  # what quantising the merged weights again leaves of the adapters' change


def merge(
    run: SavedRun,
    folder: Path,
    dtype: torch.dtype | None = None,
    say: Callable[[str], Any] = print,
    to: str | None = None,
) -> Proof:
    """Writes the model of `run`, with its adapters merged, into `folder`, with tokenizer or processor.

    Args:
        run: A run.
        folder: An empty folder, or one that does not exist; it exists only after the proof.
        dtype: The dtype of the saved weights, but for those that are quantised again; by default that of the base model
            or, if it is quantised, that which it was trained with.
        say: Gets a line for each step.
        to: ``"fp8"`` to quantise the weights that the base has in FP8 blocks again, with numbers of what that leaves of
            the adapters in `SURVIVAL_FILE`; None for none in fewer than 16 bits.

    Raises:
        MergeError: if the merged model does not compute what the adapted one does.
        UserError: if something cannot be loaded or written, or `folder` is not empty.
    """
    if run.adapter is None or run.adapter.is_prompt_learning:
        kind = "a whole model" if run.adapter is None else f"adapters of the kind {_kind(run.adapter)}"
        raise MergeError(f"{str(run.folder)!r} holds {kind}, and nothing that could be added to a model's weights.")
    if to is not None:
        check_form(to, quantization_of(read_base_config(run)), repr(run.base))
    with new_folder(folder) as unfinished:
        return _merge_into(unfinished, run, dtype or _dtype_of(run), say, to)


def _merge_into(folder: Path, run: SavedRun, dtype: torch.dtype, say: Callable[[str], Any], to: str | None) -> Proof:
    assert run.adapter is not None
    line = f"Merging the {_kind(run.adapter)} adapters in {run.folder} into {run.base}, in {to or _name(dtype)}"
    config, trained_on = read_base_config(run), run.quantization
    settings = quantization_of(config)
    if trained_on is not None or settings is not None:
        line += "; the base was quantised for training, and is merged as its dequantised weights"
    say(f"{line}.")
    published, found = format_name(trained_on and trained_on.config), format_name(settings)
    if published is not None and published.split()[0] in METHODS and published != found:
        form = found or "16 or 32 bits"
        say(f"The adapters were trained on a base in {published}; {run.base}, in {form}, is another.")
    base = load_model(run, torch.float32)
    tokenizer = load_tokenizer(run)
    if tokenizer is None:
        say("Neither the run nor its base model has a tokenizer; the merged model is saved without one.")
    elif base.config.get_text_config().pad_token_id is None:
        base.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    adapted = add_adapter(run, base, torch.float32)
    rows = random_rows(base, set(getattr(tokenizer, "all_special_ids", ())))
    trained = trained_tokens(run.adapter)[: rows.numel()]
    rows.view(-1)[: len(trained)] = torch.tensor(trained, dtype=rows.dtype)
    expected = logits_of(adapted, rows)
    with adapted.disable_adapter():
        effect = distances(expected, logits_of(adapted, rows)).median().item()
    merged: Any = merged_model(adapted)
    in_fp32 = _check_merged(expected, logits_of(merged, rows), merged)
    survival = None if to is None else _save_in_blocks(merged, run, folder, dtype)
    if survival is None:
        _round(merged, dtype)
        merged.save_pretrained(folder)
    if merged.can_generate():
        stop_at_end_of_turn(merged, tokenizer)  # transformers would save changes of valid configurations only
        merged.generation_config.to_json_file(folder / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    copy_processor(run, folder)
    saved, limit = _check_saved(expected, merged, folder, rows, dtype, run.trust_remote_code, to is not None)
    return Proof(in_fp32, saved, limit, effect, survival)


def _save_in_blocks(merged: Any, run: SavedRun, folder: Path, dtype: torch.dtype) -> Survival:
    """Saves `merged` as its base was published, in FP8 blocks; its weights become what was saved."""
    packed = load_packed_base(run)
    if run.quantization is not None and run.quantization.decoded:
        _check_decoded_alike(packed)
    published, survival = quantise_again(merged, packed, dtype)
    _round(merged, dtype)
    names = {name for name, _ in packed_weights(packed)}
    rest = {name: each for name, each in merged.state_dict().items() if name not in names}
    published |= require(PUBLISHED_NAMES)[0](merged, rest)
    config, owner = read_base_config(run), merged.config
    if not hasattr(config, "quantization_config"):
        owner = owner.get_text_config(decoder=True)
    owner.quantization_config = quantization_of(config)
    merged.save_pretrained(folder, state_dict=published, save_original_format=False)
    del owner.quantization_config
    (folder / SURVIVAL_FILE).write_text(json.dumps(survival.as_dict(), indent=1), encoding="utf-8")
    return survival


def _check_decoded_alike(packed: Any) -> None:
    """Checks that transformers, with whose decoding the adapters were trained, takes blocks to be of their sizes."""
    for name, weight in packed_weights(packed):
        if any(size > block and size % block for size, block in zip(weight.shape[-2:], weight.block, strict=True)):
            raise MergeError(
                f"The adapters were trained on what transformers decodes (`packed_base: false`), which differs from "
                f"what the base holds: {name} is {tuple(weight.shape)}, and blocks of {weight.block} do not divide "
                "it. Leave `--to` out, which merges into 16 bits."
            )


def _dtype_of(run: SavedRun) -> torch.dtype:
    config = read_base_config(run)
    named = run.quantization.dtype if run.quantization is not None else config.dtype or config.get_text_config().dtype
    named = named or "float32"
    return getattr(torch, named) if isinstance(named, str) else named


def merged_model(adapted: PeftModel) -> PreTrainedModel:
    """The base of `adapted`, in place, with the adapters in its weights, and without anything of PEFT."""
    base: Any = adapted.get_base_model()
    for name, layer in base.named_modules():
        if any(getattr(layer, "lora_bias", {}).values()) and getattr(layer.get_base_layer(), "bias", None) is None:
            raise MergeError(
                f"`lora_bias` is true in the adapters, and {name!r} has no bias that could take theirs. Load the run "
                "with `PeftModel.from_pretrained`, or train without `lora_bias`."
            )
    configs = {id(one): one for one in (base.config, base.config.get_text_config())}.values()
    tied = [config for config in configs if getattr(config, "tie_word_embeddings", False)]
    _untie(base)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT advises to do what is done here
            merged: Any = adapted.merge_and_unload()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise MergeError(
            f"Adapters of the kind {_kind(adapted.active_peft_config)} cannot be merged into this model: "
            f"{first_line(error)} Load the run with `PeftModel.from_pretrained` instead."
        ) from error
    _tie_equal(merged, tied)
    return merged


def trained_tokens(adapter: Any) -> list[int]:
    """The ids whose rows of the embedding were trained alone (``trainable_token_indices``)."""
    named = getattr(adapter, "trainable_token_indices", None) or []
    return sorted({id for ids in (named.values() if isinstance(named, dict) else [named]) for id in ids})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(adapter: Any) -> str:
    return str(getattr(adapter.peft_type, "value", adapter.peft_type))


def _ends(model: Any) -> tuple[Any, Any]:
    """The embedding and the head of a model, without the adapters on them; None where it has none."""
    found = []
    for get in ("get_input_embeddings", "get_output_embeddings"):
        try:
            end = getattr(model, get)()
        except (AttributeError, NotImplementedError):
            end = None
        end = trained_rows_of(end)
        found.append(getattr(end, "base_layer", end))
    return found[0], found[1]


def _untie(base: Any) -> None:
    """Gives a head that is tied to the embedding a weight of its own."""
    embedding, head = _ends(base)
    own = None if head is None else head._parameters.get("weight")  # a copy that PEFT saves has a weight of its own
    if own is not None and own is getattr(embedding, "weight", None):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _tie_equal(merged: Any, tied: Sequence[Any]) -> None:
    """Ties head and embedding again if they are still equal; else their configurations, `tied`, say that they are not.

    They are equal if no adapter was on either of them, or, with `ensure_weight_tying`, the same one on both.
    """
    embedding, head = _ends(merged)
    if not tied or head is None or embedding is None:
        return
    equal = torch.equal(head.weight, embedding.weight)
    if equal:
        head.weight = embedding.weight
    for config in tied:
        config.tie_word_embeddings = equal


def _layers(model: Any) -> int:
    return int(getattr(model.config.get_text_config(), "num_hidden_layers", None) or 1)


def _check_merged(expected: torch.Tensor, found: torch.Tensor, merged: Any) -> float:
    """The largest distance of a position; with weights in fp32 there is hardly any rounding, so none may differ."""
    distance, limit = distances(expected, found).max().item(), tolerance(torch.float32, _layers(merged))
    if not distance <= limit:  # NaN too
        raise MergeError(
            f"The merged model is not the adapted one: its logits differ by {distance:.1e} of their size, where fp32 "
            f"arithmetic explains {limit:.1e}. Nothing was saved. Load the run with `PeftModel.from_pretrained`, or "
            "serve the adapters as they are."
        )
    return distance


def _round(merged: Any, dtype: torch.dtype) -> None:
    """Rounds the weights of `merged` to `dtype`, in place; buffers, such as routing biases, keep theirs."""
    for name, parameter in merged.named_parameters():
        parameter.data = parameter.data.to(dtype)
        if not parameter.data.isfinite().all():
            raise MergeError(
                f"The weight {name} has values that are not finite in {_name(dtype)}; give another `--dtype`. Nothing "
                "was saved."
            )


def _check_saved(
    expected: torch.Tensor,
    merged: Any,
    folder: Path,
    rows: torch.Tensor,
    dtype: torch.dtype,
    trusted: bool,
    in_blocks: bool,
) -> tuple[float, float]:
    """Loads `folder` and compares every weight with that of `merged`, and the logits with those of the adapted model.

    The logits are computed in fp32 from the rounded weights, so that only these differ. The median position is
    compared, as rounding may send a token to another expert; the weights are compared one by one.
    """
    with packed_loading() if in_blocks else contextlib.nullcontext():
        loaded, report = type(merged).from_pretrained(
            folder, dtype=dtype, output_loading_info=True, trust_remote_code=trusted
        )
    beside: set[str] = set()  # what is in the files for others, and in no model
    if in_blocks:
        beside = {name.rpartition(".")[2] for name in loaded.hf_quantizer.left_out}
        loaded = dequantise(loaded)
    unexpected = {name for name in report["unexpected_keys"] if name.rpartition(".")[2] not in beside}
    weights, saved = merged.state_dict(), loaded.state_dict()
    wrong = sorted({*report["missing_keys"], *unexpected, *(weights.keys() ^ saved.keys())})
    wrong = wrong or [name for name in weights if not torch.equal(weights[name].to(saved[name].dtype), saved[name])]
    if wrong:
        raise MergeError(
            f"The saved model does not load as it was merged: {len(wrong)} weights differ, such as {wrong[0]}. Nothing "
            "was kept of it. transformers cannot write this architecture faithfully; load the run with "
            "`PeftModel.from_pretrained` instead."
        )
    del weights
    merged.to("meta")  # frees its memory
    found = logits_of(loaded.eval().float(), rows)
    rounded = torch.float8_e4m3fn if in_blocks else dtype
    distance, limit = distances(expected, found).median().item(), tolerance(rounded, _layers(loaded))
    if not distance <= limit:
        raise MergeError(
            f"The saved model is not the adapted one: its logits differ by {distance:.1e} of their size, where the "
            f"rounding of the weights to {_name(rounded)} explains {limit:.1e}. Nothing was kept of it; "
            + ("merge without `--to`." if in_blocks else "try another `--dtype`.")
        )
    return distance, limit
