"""Whether the adapters of a checkpoint fit those that a run goes on with: the same tensors, scaled alike.

PEFT loads the tensors that both have and leaves the others as they were drawn. The optimizer's states are matched by
their order, not by their names: with as many tensors of other shapes, its fused step writes outside of them. So names
and shapes are compared before, from the header of the file. What is in no name, such as `lora_alpha`, is compared in
the adapters' configuration.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peft.utils import CONFIG_NAME, get_peft_model_state_dict
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from liger_trainer.trainers.checkpoints.saved_weights import are_pruned, folder_of, shapes_in, writes_other_tensors

_OF_TENSORS = {  # arguments of PEFT, and keys of recipes, that say which tensors there are
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "r": "lora_r",
    "use_dora": "use_dora",
    **dict.fromkeys(("rank_pattern", "exclude_modules", "layers_to_transform", "layers_pattern"), ""),
}
_OF_MEANING = {  # and those that names and shapes of tensors may not show
    "lora_alpha": "lora_alpha",
    "use_rslora": "use_rslora",
    "modules_to_save": "lora_modules_to_save",
    **dict.fromkeys(("peft_type", "alpha_pattern", "bias", "trainable_token_indices"), ""),
}


def differing_adapters(checkpoint: Path, model: Any) -> str | None:
    """How the adapters in `checkpoint` do not fit those of `model`; None if they do."""
    for adapter, config in model.peft_config.items():
        folder = folder_of(adapter, checkpoint)
        if not (folder / CONFIG_NAME).is_file():
            continue
        saved = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        comparable = not writes_other_tensors(config) and not are_pruned(saved.get("rank_pattern"))
        tensors = _differing_tensors(folder / ADAPTER_SAFE_WEIGHTS_NAME, model, adapter) if comparable else None
        if tensors or _differing(_OF_MEANING, saved, config):
            arguments = _differing({**_OF_TENSORS, **_OF_MEANING}, saved, config)
            return f"do not fit those of this run: {'; '.join(arguments) or tensors}"
    return None


def _differing(keys: dict[str, str], saved: dict[str, Any], config: Any) -> list[str]:
    """The arguments that have other values in a checkpoint than in `config`, a clause for each."""
    found = []
    for key, of_recipes in keys.items():
        before, now = _plain(saved.get(key)), _plain(getattr(config, key, None))
        if key in saved and (before or None) != (now or None):
            name = f"`{key}`" + (f" (`{of_recipes}`)" if of_recipes not in ("", key) else "")
            found.append(f"{name} is {before!r} in the checkpoint and {now!r} here")
    return found


def _plain(value: Any) -> Any:
    """A value of a configuration as JSON holds it, with names in the order of the alphabet."""
    if isinstance(value, set | list | tuple) and all(isinstance(each, str) for each in value):
        value = sorted(value)
    return json.loads(json.dumps(value))


def _differing_tensors(file: Path, model: Any, adapter: str) -> str | None:
    """The first tensor that only one of `file` and `model` has, or that has another shape; None if there is none."""
    if not file.is_file():
        return None
    tensors = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    found, here = shapes_in([file]), {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    # PEFT may have written the embeddings too.
    others = found.keys() - here.keys() - model.state_dict().keys()
    for name in sorted(others | here.keys()):
        before, now = found.get(name), here.get(name)
        empty = now is not None and 0 in now  # DeepSpeed holds it elsewhere
        if before is None or now is None or (before != now and not empty):
            return f"{name!r} is {before or 'missing'} in the checkpoint and {now or 'missing'} here"
    return None
