"""Whether a run goes on with the base model that the adapters of its checkpoint were trained on.

The adapters' own configuration names it, and a file beside them says how it was quantised. What neither says, as of a
checkpoint of a stock trainer or of a model that has no name, is not compared.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from peft.utils import CONFIG_NAME

from liger_trainer.packed.formats import METHODS, format_name
from liger_trainer.trainers.checkpoints.run_state import is_of_ours
from liger_trainer.trainers.checkpoints.saved_weights import (
    BaseQuantization,
    base_quantization,
    folder_of,
    read_base_quantization,
)

logger = logging.getLogger("liger_trainer")

_PLAIN = "16 or 32 bits"


def differing_base(checkpoint: Path, model: Any) -> str | None:
    """How the base of `model` is another than that of the adapters in `checkpoint`; None if it is not.

    Warns where the same one may have moved to another folder.
    """
    found = read_base_quantization(checkpoint)
    forms = _form(found) if found is not None or is_of_ours(checkpoint) else None, _form(base_quantization(model))
    for adapter, config in model.peft_config.items():
        file = folder_of(adapter, checkpoint) / CONFIG_NAME
        if not file.is_file():
            continue
        saved = json.loads(file.read_text(encoding="utf-8"))
        names = saved.get("base_model_name_or_path"), config.base_model_name_or_path
        revisions = saved.get("revision"), config.revision
        same = not all(names) or Path(names[0]).resolve() == Path(names[1]).resolve()
        its_own = same or _may_have_moved(*names)
        # A published base that stays packed is, but for rounding, the dequantised one.
        decoded = _PLAIN in forms and all(form == _PLAIN or str(form).split()[0] in METHODS for form in forms)
        # A folder has no revisions.
        revised = _differ(revisions) and not Path(names[1] or "").is_dir()
        other = not its_own or revised or (_differ(forms) and not decoded)
        if other:
            more = [pair for pair in (revisions, forms) if _differ(pair)]
            before, now = (_in_words(names[which], [str(pair[which]) for pair in more]) for which in (0, 1))
            return f"were trained on {before}, and the base of this run is {now}"
        if not same:
            logger.warning("%s names the base %r; this run takes %r for the same one.", checkpoint, *names)
    return None


def _differ(pair: tuple[str | None, str | None]) -> bool:
    return all(pair) and pair[0] != pair[1]


def _may_have_moved(before: str, now: str) -> bool:
    """Whether two names may be of one model: folders of the same name, or one that is no longer there."""
    a_folder = any(Path(name).is_absolute() or Path(name).is_dir() for name in (before, now))
    is_gone = Path(before).is_absolute() and not Path(before).exists()
    return (a_folder and Path(before).name == Path(now).name) or (is_gone and Path(now).is_dir())


def _form(found: BaseQuantization | None) -> str:
    """The format of a base, in a word."""
    if found is None or found.decoded:
        return _PLAIN
    of_experts = str((found.experts or {}).get("quant_type", _PLAIN))
    return format_name(found.config) or of_experts


def _in_words(name: str | None, more: list[str]) -> str:
    return (repr(name) if name else "a model without a name") + (f" ({', '.join(more)})" if more else "")
