"""Which parts of each model family run on our kernels: the table of docs/models.md, made by `make models`.

Every causal and every image-text type of the installed transformers is built with its default config, which for most is
that of a published model, on the meta device, and gets the kernels. A few families, or all with `--write`:

    python -m liger_trainer.benchmarks.served llama deepseek_v3
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import re
import types
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
)

from liger_trainer.benchmarks.report import markdown
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.patching.report import WITHOUT_A_GATE, KernelReportRow
from liger_trainer.trainers.choose_packing import PADDING_FREE, SHARE_PROMPT, choose_packing

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
COLUMNS = {
    "norms": ("rms_norm", "layer_norm"),
    "rope": ("rope",),
    "MLP": ("swiglu", "geglu", "relu_squared"),
    "experts": ("experts", "router"),
    "attention": ("attention",),
    "head": ("linear_cross_entropy",),
    PADDING_FREE: (PADDING_FREE,),
    SHARE_PROMPT: (SHARE_PROMPT,),
}
_FAMILIES_A_PROCESS = 20  # builds and proofs leave memory behind
_SMALLEST_SHARE = 0.01
_BEGIN, _END = "<!-- table: models -->", "<!-- end of table -->"

_MROPE = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
_IMAGE_TOKENS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653, "audio_start_token_id": 151647}
_PUBLISHED: dict[str, dict[str, Any]] = {
    "aya_vision": {
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_attention_heads": 16}
    },
    "dbrx": {"attn_config": {"rope_theta": 5e5, "kv_n_heads": 8, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "step3p7": {"text_config": {"sliding_window": 512}},
    **{name: {"text_config": {"rope_parameters": _MROPE}} for name in ("glm4v", "glm46v", "glmga")},
    "glm4v_moe": {"text_config": {"rope_parameters": _MROPE, "head_dim": 128}},
    "qwen2_5_omni_thinker": _IMAGE_TOKENS,
    "qwen3_omni_moe_thinker": {**_IMAGE_TOKENS, "text_config": {"head_dim": 128}},
}
"""What published configs of a type have and its defaults lack, without which no model is built or runs."""


@dataclasses.dataclass(frozen=True)
class Served:
    """What is served of a family.

    Args:
        family: The `model_type`.
        cells: One for each of `COLUMNS`: "yes", "no", "part" (of its kinds of modules), or "–" for none of the kind.
        reason: Why what is not served is not, and what no kernel is for.
        crashed: Whether our own code raised an error.
    """

    family: str
    cells: tuple[str, ...]
    reason: str
    crashed: bool = False


def families() -> list[str]:
    """The causal and the image-text types of the installed transformers."""
    configs = {*MODEL_FOR_CAUSAL_LM_MAPPING.keys(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.keys()}
    return sorted(name for name, config in CONFIG_MAPPING.items() if config in configs)


def served(family: str) -> Served:
    """What is served of a family with its default config."""
    nothing = ("–",) * len(COLUMNS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = _built(family)
        except Exception as error:  # of a config that is no model's
            return Served(family, nothing, f"its default config gives no model: {_line(error)}")
        try:
            rows = list(apply_liger_kernel(model))
            rows += choose_packing(types.SimpleNamespace(), model, may_share=True)[1]
        except Exception as error:
            return Served(family, nothing, f"liger_trainer failed: {_line(error)}", crashed=True)
    cells = tuple(_cell([row for row in rows if row.component in components]) for components in COLUMNS.values())
    return Served(family, cells, _reason(rows))


def _built(family: str) -> Any:
    config = AutoConfig.for_model(family, **_PUBLISHED.get(family, {}))
    multimodal = config.get_text_config() is not config and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    of_images = multimodal or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if of_images else MODEL_FOR_CAUSAL_LM_MAPPING
    with torch.device("meta"):
        return mapping[type(config)](config)


def _cell(rows: Sequence[KernelReportRow]) -> str:
    if not rows:
        return "–"
    applied = sum(row.applied for row in rows)
    return "yes" if applied == len(rows) else "part" if applied else "no"


def _reason(rows: Iterable[KernelReportRow]) -> str:
    """The reasons, each once, and the modules without a kernel that are not small."""
    left = [row for row in rows if not row.applied]
    reasons = [f"{row.target}: {row.reason}" for row in left if row.share is None]
    large = [row for row in left if row.share is not None and row.share >= _SMALLEST_SHARE]
    others = [f"{row.target} ({_kind(row)}{100 * (row.share or 0.0):.0f} %)" for row in large]
    if others:
        reasons.append(f"no kernel for {', '.join(others)}")
    # Errors of a proof differ from one CPU to the next.
    return re.sub(r" \((relative difference )?([0-9.]+e[+-][0-9]+|inf)\)", "", "; ".join(dict.fromkeys(reasons)))


def _kind(row: KernelReportRow) -> str:
    return f"{WITHOUT_A_GATE}, " if WITHOUT_A_GATE in row.reason else ""


def _line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0].strip()[:120]}"


def all_served(names: Sequence[str]) -> list[Served]:
    """What is served of these families, in processes of their own, one after the other."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=_FAMILIES_A_PROCESS) as pool:
        return list(pool.imap(served, names))


def table(rows: Iterable[Served]) -> str:
    """The rows in Markdown."""
    header = ["family", *COLUMNS, "why not, and what no kernel is for"]
    cells = ([f"`{row.family}`", *row.cells, _escaped(row.reason)] for row in rows)
    return markdown(header, cells)


def _escaped(text: str) -> str:
    return re.sub(r"([|<>\[\]_*`])", r"\\\1", text)


def written(page: str, rows: Sequence[Served]) -> str:
    """The page with these rows in its table, and the version that they are of."""
    begin, end = page.index(_BEGIN) + len(_BEGIN), page.index(_END)
    version = f"transformers {transformers.__version__}, {len(rows)} types."
    return f"{page[:begin]}\n\n{version}\n\n{table(rows)}\n\n{page[end:]}"


def main() -> None:
    """Prints the table, or writes it into docs/models.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="a `model_type`; all of them by default")
    parser.add_argument("--write", action="store_true", help="write docs/models.md, of all families")
    arguments = parser.parse_args()
    if arguments.write and arguments.families:
        parser.error(f"--write is for all families, but {', '.join(arguments.families)} are named. Leave one out.")
    unknown = sorted(set(arguments.families) - set(families()))
    if unknown:
        parser.error(f"{', '.join(unknown)}: no causal or image-text type of transformers {transformers.__version__}.")
    rows = all_served(arguments.families or families())
    if arguments.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
