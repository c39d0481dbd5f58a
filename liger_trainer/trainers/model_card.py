"""What TRL's model card says of a model without a name on the Hub: `None`, in a link and in the example."""

from __future__ import annotations

from pathlib import Path

_BASE = "a fine-tuned version of [None](https://huggingface.co/None)"
_NEW = "initial_model"  # the folder of a model that a recipe has built from its configuration


def mend_card(card: Path, base: str, name: str) -> None:
    """Puts names in the place of `None`, in the file that TRL has written.

    Args:
        card: The file.
        base: The model's `name_or_path`: a folder, or empty.
        name: The folder of the trained model.
    """
    folder = Path(base).name
    origins = {"": "trained from a model without a name", _NEW: "trained from scratch"}
    origin = origins.get(folder, f"a fine-tuned version of `{folder}`")
    text = card.read_text(encoding="utf-8")
    mended = text.replace(_BASE, origin).replace('model="None"', f'model="{name}"')
    if mended != text:
        card.write_text(mended, encoding="utf-8")
