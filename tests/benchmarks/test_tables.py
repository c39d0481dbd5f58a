"""README and docs/performance.md hold what the results say."""

import dataclasses

import pytest

from liger_trainer.benchmarks import plots, tables
from liger_trainer.benchmarks.records import (
    PADDED,
    UNSHARED,
    Machine,
    Record,
    Results,
    Run,
    TrainingRecord,
    compare_with_eager,
)
from liger_trainer.benchmarks.registry import load_operations
from liger_trainer.benchmarks.tables import ROOT, TABLES, error_table, experts_table, operation_table, render
from liger_trainer.benchmarks.training_tables import (
    alignment_table,
    lora_table,
    results_table,
    several_gpus_tables,
    training_table,
    uneven_table,
    uneven_table_and_source,
)

load_operations()
GROUP = ("rms_norm", "llama3-8b", 16384, "")


def record(provider, both, memory=1.0, **others):
    case = Record(*GROUP, "16384×4096", "bfloat16", provider, both=both, peak_gibibytes=memory, floor=0.5)
    return dataclasses.replace(case, **others)


def run(*records, date="2026-01-01", training=(), command="liger-trainer bench rms_norm"):
    versions = {"torch": "2.11.0", "liger-kernel": "0.8.5"}
    return Run(command, Machine("NVIDIA H200", 4e12, 8e14), versions, date, [*records], [*training])


def results(*records, **others):
    return Results([run(*records, **others)])


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"][2:]


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_documents_are_what_the_generator_makes(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    measured = Results.read(ROOT / "benchmarks" / "results" / "nvidia-h200")
    assert render(text, measured) == text, "run `make tables`"


def test_every_table_stands_in_a_document():
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in tables.DOCUMENTS]
    for name in TABLES:
        assert any(f"<!-- table: {name} -->" in text for text in texts), name


def test_render_replaces_what_is_between_the_markers():
    text = "a\n<!-- table: operations -->\nold\n<!-- end of table -->\nb\n"
    made = render(text, results(record("liger_trainer", 1.0)))
    assert "old" not in made
    assert made.startswith("a\n<!-- table: operations -->\n| work |")
    assert made.endswith("\n<!-- end of table -->\nb\n")
    assert render(made, results(record("liger_trainer", 1.0))) == made


def test_the_newer_run_of_a_case_counts_as_a_whole():
    old = run(record("torch.compile", 3.0), record("liger_trainer", 2.0), date="2026-01-01", command="old")
    new = run(record("liger_trainer", 1.0), date="2026-02-01", command="new")
    for runs in ([old, new], [new, old]):
        measured = Results(runs)
        table = operation_table(measured, [GROUP])
        assert cells(table) == [["RMSNorm 16384×4096", "0.500", "–", "–", "–", "**1.000 / 1.00**", "50 %", "–"]]
        assert "`new`" in table
        assert "`old`" not in table


def test_bold_is_for_more_than_noise():
    near = results(record("torch.compile", 1.01), record("liger_trainer", 1.0))
    assert cells(operation_table(near, [GROUP]))[0][5] == "1.000 / 1.00"
    far = results(record("torch.compile", 1.1), record("liger_trainer", 1.0))
    assert cells(operation_table(far, [GROUP]))[0][5] == "**1.000 / 1.00**"
    behind = results(record("quack", 0.9), record("liger_trainer", 1.0))
    assert cells(operation_table(behind, [GROUP]))[0][4:6] == ["0.900 / 1.00 (quack)", "1.000 / 1.00"]


def test_a_faster_setting_stands_beside_the_default():
    records = [
        record("torch.compile", 30.0),
        record("liger-kernel", 50.0),
        record("liger-kernel chunk=8", 36.0, 2.0),
        record("liger_trainer", 36.0),
        record("liger_trainer logits_memory=1GiB", 25.0, 2.0),
        record("liger_trainer logits_memory=2GiB", 26.0, 3.0),
    ]
    (row,) = cells(operation_table(results(*records), [GROUP]))
    assert row[3] == "50.0 / 1.00; 36.0 / 2.00 with `chunk=8`"
    assert row[5] == "36.0 / 1.00; **25.0 / 2.00** with `logits_memory=1GiB`"
    assert row[6] == "2 %"


def test_failures_and_gaps_are_in_words():
    records = [
        record("torch.compile", None, failure="out of memory"),
        record("liger-kernel", None, failure="skipped: liger_kernel is not installed"),
        record("liger_trainer", 1.0),
    ]
    (row,) = cells(operation_table(results(*records), [GROUP]))
    assert row[2:5] == ["out of memory", "–", "–"]


def test_errors_are_beside_eager_ones():
    records = [
        record("torch", 3.0, errors={"output": 9.0, "dx": 2e-3, "dweight": 1e-3}),
        record("liger_trainer", 1.0, errors={"output": 9.0, "dx": 2e-3, "dweight": 1.5e-3}),
    ]
    compare_with_eager(records)
    measured = results(*records)
    assert cells(operation_table(measured, [GROUP]))[0][7] == "1.50"
    assert cells(error_table(measured, [GROUP])) == [
        ["RMSNorm 16384×4096", "dx", "2.00e-03", "–", "2.00e-03", "1.00"],
        ["RMSNorm 16384×4096", "dweight", "1.00e-03", "–", "1.50e-03", "1.50"],
    ]


def test_experts_are_a_table_of_their_own():
    group = ("moe_experts", "qwen3-30b-a3b", 8192, "frozen", "8192×2048→768, 8 of 128", "bfloat16")
    measured = {"peak_gibibytes": 1.0, "saved_gibibytes": 114_688 * 8192 / 2**30, "floor": 2.0}
    records = [
        Record(*group, "torch", both=8.0, **measured),
        Record(*group, "torch.compile", failure="skipped: no time left"),
        Record(*group, "liger-kernel", failure="ValueError: takes no biases"),
        Record(*group, "liger_trainer", both=4.0, **{**measured, "saved_gibibytes": None}),
    ]
    found = results(*records)
    assert cells(experts_table(found)) == [
        [
            *("Qwen3-30B-A3B, frozen, 8,192 tokens", "2.000", "8.000 / 1.00 / 114.7 KB", "–"),
            *("ValueError: takes no biases", "**4.000 / 1.00**", "50 %"),
        ]
    ]
    assert cells(TABLES["operations"](found)) == []


def test_the_optimizer_is_a_table_of_its_own():
    group = ("adamw", "llama3-8b", 0, "8 layers", "2.80B weights")
    found = results(
        Record(*group, "bfloat16", "torch", both=12.5, floor=10.0, remark="8.00 bytes a weight"),
        Record(*group, "bfloat16", "torchao", failure="skipped: torchao is not installed"),
        Record(*group, "float32", "torch dtype=float32", failure="out of memory"),
    )
    assert cells(TABLES["optimizer"](found)) == [
        ["torch", "bfloat16", "8.00", "12.5", "80 %"],
        ["torch dtype=float32", "float32", "–", "out of memory", "–"],
    ]
    assert cells(TABLES["operations"](found)) == []


def test_training_rows():
    task = ("qwen3-30b-a3b", 12, "causal_lm", 4, 4096, True)
    training = [
        TrainingRecord(*task, "hf", 20000.0, None, 70.0),
        TrainingRecord(*task, "liger-kernel", failure="no result in 100 s"),
        TrainingRecord(*task, "liger_trainer", 30000.4, 0.41, 60.04),
    ]
    (row,) = cells(training_table(results(training=training)))
    assert row == [
        "Qwen3-30B-A3B, 12 of its layers",
        "20,000 / 70.0",
        "no result in 100 s",
        "**30,000 / 60.0 / 41 %**",
    ]


def test_results_of_short_checkpointed_steps_on_one_gpu():
    task = ("llama3-8b", 0)
    training = [
        TrainingRecord(*task, "dpo", 4, 2048, True, "hf", 9000.0, None, 60.0, lora=16, weights_gibibytes=15.0),
        TrainingRecord(*task, "dpo", 1, 32768, True, "hf", 4000.0, None, 50.0, lora=16),
        TrainingRecord(*task, "causal_lm", 4, 4096, False, "hf", 8200.0, None, 90.0),
        TrainingRecord(*task, "causal_lm", 4, 4096, True, "hf", 8000.0, 0.4, 70.0),
        TrainingRecord(*task, "causal_lm", 4, 4096, True, "liger_trainer", 9000.0, 0.45, 60.0),
        TrainingRecord(*task, "causal_lm", 8, 4096, True, "hf", 8100.0, 0.4, 79.5, gpus=4, accelerate_config="fsdp2"),
    ]
    table = results_table(results(training=training))
    assert cells(table) == [["Llama-3 8B", "8,000 / 70.0", "**9,000 / 60.0**"]]
    assert "`liger-trainer bench" not in table


def test_adapters_are_a_table_of_their_own():
    task = ("llama3-8b", 0, "causal_lm", 4, 4096)
    training = [
        TrainingRecord(*task, True, "liger_trainer activation_offloading", 11800.0, None, 8.5, lora=16, quantize="nf4"),
        TrainingRecord(*task, True, "hf", 8100.0, None, 33.6, lora=16, quantize="nf4"),
        TrainingRecord(*task, False, "liger_trainer", 15600.0, None, 70.4, lora=16),
        TrainingRecord(*task, True, "hf", 7500.0, None, 43.2, lora=16),
        TrainingRecord(*task, True, "liger_trainer activation_offloading", 11000.0, None, 18.0, lora=16),
        TrainingRecord(*task, True, "liger_trainer", 12000.0, None, 22.0, lora=16),
        TrainingRecord(*task, True, "hf", 8000.0, 0.4, 70.0),
    ]
    measured = results(training=training)
    assert [row[0] for row in cells(training_table(measured))] == ["Llama-3 8B"]
    assert cells(lora_table(measured)) == [
        [
            "Llama-3 8B, LoRA r=16",
            "7,500 / 43.2",
            "**12,000 / 22.0**; 11,000 / 18.0 with `activation_offloading`",
        ],
        ["Llama-3 8B, LoRA r=16, nothing checkpointed", "–", "15,600 / 70.4"],
        ["Llama-3 8B, LoRA r=16 on nf4", "8,100 / 33.6", "**11,800 / 8.5** with `activation_offloading`"],
    ]


def test_alignment_is_a_table_of_its_own():
    task = ("llama3-8b", 0, "dpo", 4, 2048, True)
    training = [
        TrainingRecord(*task, "hf", 9000.0, None, 60.0, lora=16, weights_gibibytes=15.0),
        TrainingRecord(*task, "liger_trainer", 12000.0, None, 30.0, lora=16, weights_gibibytes=15.0),
        TrainingRecord("llama3-8b", 0, "causal_lm", 4, 4096, True, "hf", 8000.0, 0.4, 70.0),
    ]
    measured = results(training=training)
    assert [row[0] for row in cells(training_table(measured))] == ["Llama-3 8B"]
    assert cells(alignment_table(measured)) == [
        ["Llama-3 8B, DPO, LoRA r=16, 4 pairs × 2048", "9,000 / 60.0 / 45.0", "**12,000 / 30.0 / 15.0**"]
    ]


def uneven():
    """Two tasks on uneven lengths, and one of GRPO at its full length."""
    lengths = {"lora": 16, "lengths": "64:1024", "prompt": 1024}
    dpo, grpo = (("llama3-8b", 0, name, batch, 2048, True) for name, batch in (("dpo", 8), ("grpo", 16)))
    measured = {"hf": (4000.0, None, 60.0), PADDED: (6000.0, None, 40.0), "liger_trainer": (12345.0, None, 20.0)}
    groups = {**measured, UNSHARED: (8000.0, None, 30.0), "liger_trainer": ()}
    return [
        *(TrainingRecord(*dpo, name, *values, **lengths) for name, values in measured.items()),
        *(TrainingRecord(*grpo, name, *values, **lengths, group_size=8) for name, values in groups.items()),
        TrainingRecord(*grpo, "liger_trainer", 12000.0, None, 30.0, lora=16),
    ]


def test_uneven_lengths_are_a_table_of_their_own():
    *records, full = uneven()
    records[-2].failure = "out of memory"
    measured = results(training=[*records, full])
    expected = [
        [
            *("Llama-3 8B, DPO, LoRA r=16, 8 pairs, prompts of 1024, completions of 64 to 1024", "4,000 / 60.0"),
            *("6,000 / 40.0", "–", "**12,345 / 20.0**", "3.09", "2.06"),
        ],
        [
            "Llama-3 8B, GRPO's loss, LoRA r=16, batch 16, prompts of 1024, 8 completions each of 64 to 1024",
            *("4,000 / 60.0", "6,000 / 40.0", "**8,000 / 30.0**", "out of memory", "–", "–"),
        ],
    ]
    assert cells(uneven_table(measured)) == expected
    assert uneven_table_and_source(measured).startswith(uneven_table(measured))
    assert "`liger-trainer bench" in uneven_table_and_source(measured)
    assert results_table(measured) == results_table(results(training=[full]))
    assert [row[0] for row in cells(alignment_table(measured))] == ["Llama-3 8B, GRPO's loss, LoRA r=16, 16 × 2048"]


def test_the_picture_of_uneven_lengths(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, file: drawn.append(figure) or file)
    records, file = uneven(), tmp_path / "alignment.png"
    assert plots.draw_alignment(records, "GPU", file) == file
    speed, memory = drawn[0].axes
    bars = {bars.get_label(): [bar.get_height() for bar in bars] for bars in speed.containers}
    assert bars == {"TRL": [4000, 4000], PADDED: [6000, 6000], UNSHARED: [8000], "liger_trainer": [12345]}
    assert [bar.get_height() for bars in memory.containers for bar in bars] == [60, 60, 40, 40, 30, 20]
    names = [label.get_text().splitlines()[1:] for label in speed.get_xticklabels()]
    assert names[0] == ["DPO", "LoRA r=16", "8 pairs", "prompts of 1024", "completions of 64 to 1024"]
    assert plots.draw_alignment(records[-1:], "GPU", file) is None


def test_several_gpus_are_a_table_of_their_own():
    task, fsdp = ("llama3-8b", 0, "causal_lm", 8), {"gpus": 4, "accelerate_config": "fsdp2"}
    training = [
        TrainingRecord(*task, 4096, True, "hf", 8000.0, 0.4, 79.5, **fsdp),
        TrainingRecord(*task, 8192, True, "hf", failure="out of memory", **fsdp),
        TrainingRecord(*task, 8192, True, "liger_trainer", 9000.0, 0.5, 50.0, **fsdp),
        TrainingRecord("llama3-8b", 0, "causal_lm", 4, 4096, True, "hf", 8100.0, 0.4, 70.0),
    ]
    measured = results(training=training)
    assert cells(training_table(measured)) == [["Llama-3 8B", "8,100 / 70.0 / 40 %"]]
    section = several_gpus_tables(measured)
    assert "Llama-3 8B, batch 8 a GPU, 4 GPUs, fsdp2:" in section
    assert cells(section) == [
        ["hf", "8,000 / 79.5 / 40 %", "OOM"],
        ["liger_trainer", "–", "9,000 / 50.0 / 50 %"],
    ]


def budgets(checkpointing=True):
    """A line of ours over `activation_memory`, and another library's point, or those without checkpointing."""
    task = ("llama3-8b", 0, "causal_lm", 4, 4096, checkpointing)
    if not checkpointing:
        whole = TrainingRecord(*task, "liger_trainer", 6.0, None, 90.0)
        return [TrainingRecord(*task, "liger-kernel", failure="out of memory"), whole]
    points = {"": (1.0, 60.0), " activation_memory=auto": (5.0, 80.0), " activation_memory=8GiB": (3.0, 61.0)}
    records = [TrainingRecord(*task, f"liger_trainer{name}", rate, None, peak) for name, (rate, peak) in points.items()]
    return [TrainingRecord(*task, "liger-kernel", 0.5, None, 62.0), *records]


def test_sizes_of_activation_memory_are_in_the_picture_alone():
    (row,) = cells(training_table(results(training=budgets())))
    assert row == ["Llama-3 8B", "0 / 62.0", "1 / 60.0; **5 / 80.0** with `activation_memory=auto`"]


def test_the_picture_of_speed_and_memory(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, file: drawn.append(figure) or file)
    others = [TrainingRecord("qwen3-8b", 0, "causal_lm", 4, 4096, True, "liger_trainer", 1.0, None, 1.0)]
    file = tmp_path / "pareto.png"
    assert plots.draw_pareto([*budgets(), *budgets(False), *others], "GPU", file) == file
    (axis,) = drawn[0].axes  # the other model has no `activation_memory`, so it has no picture
    lines = {line.get_label(): [*zip(*line.get_data())] for line in axis.get_lines()}
    ours = [(60.0, 1.0), (61.0, 3.0), (80.0, 5.0), (90.0, 6.0)]
    assert [line.get_linestyle() for line in axis.get_lines()] == [":", "-"]
    assert lines == {"liger-kernel": [(62.0, 0.5)], "liger_trainer": ours}
    assert [text.get_text() for text in axis.texts] == ["", "", "8GiB", "auto", "no checkpointing"]
    assert plots.draw_pareto(others, "GPU", file) is None


def test_the_picture_is_a_file(tmp_path):
    file = plots.draw_pareto(budgets(), "GPU", tmp_path / "made" / "pareto.png")
    assert file.stat().st_size > 1000
