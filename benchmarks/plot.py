"""The README's picture, from what `benchmarks.training` printed: `python -m benchmarks.plot results.jsonl gain.png`."""

from __future__ import annotations

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_SETS = {
    "none": ("Hugging Face", "#b8b8b8"),
    "liger": ("+ Liger", "#f2a65a"),
    "liger_trainer": ("liger_trainer", "#2a6f97"),
}
_MODELS = {"llama3_8b": "Llama-3 8B", "gemma3_4b": "Gemma3 4B", "qwen3_moe_12l": "Qwen3-MoE\n(12 layers)"}


def main() -> None:
    """Draws tokens/s and peak memory of each model, one bar per set of kernels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=pathlib.Path, help="one JSON object a line")
    parser.add_argument("picture", type=pathlib.Path)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.results.read_text().splitlines() if line.startswith("{")]
    measured = {(row["model"], row["kernels"]): row for row in rows if row["trainer"] == "causal_lm"}
    models = [model for model in _MODELS if any(key[0] == model for key in measured)]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6))
    for axis, field, title in (
        (axes[0], "tokens_per_second", "tokens/s (higher is better)"),
        (axes[1], "peak_gibibytes", "peak memory, GiB (lower is better)"),
    ):
        for offset, (kernels, (label, color)) in enumerate(_SETS.items()):
            present = [
                (i, measured[model, kernels][field]) for i, model in enumerate(models) if (model, kernels) in measured
            ]
            bars = axis.bar(
                [i + (offset - 1) * 0.27 for i, _ in present], [v for _, v in present], 0.26, label=label, color=color
            )
            axis.bar_label(bars, fmt="{:,.0f}", fontsize=7)
        axis.set_xticks(range(len(models)), [_MODELS[model] for model in models])
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle("Full fine-tuning through the Trainer, batch 4 x 4096, full checkpointing, one H200", fontsize=10)
    figure.tight_layout()
    figure.savefig(args.picture, dpi=160)


if __name__ == "__main__":
    main()
