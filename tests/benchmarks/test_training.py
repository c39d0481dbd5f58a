"""Training steps: providers agree, configurations have the published shapes, a failing process is a line."""

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

from liger_trainer.benchmarks import plots, training_providers
from liger_trainer.benchmarks.models import MODELS, model_config
from liger_trainer.benchmarks.records import PADDED, UNSHARED, Run, TrainingRecord
from liger_trainer.benchmarks.registry import BenchmarkError
from liger_trainer.benchmarks.report import rows_in_words
from liger_trainer.benchmarks.training import GROUPS, PAIRS, Task, TrainingProcess, reason
from liger_trainer.benchmarks.training_providers import (
    IN_FP8,
    TRAINING_PROVIDERS,
    Setup,
    completions,
    find_training_provider,
    training_provider,
)
from liger_trainer.benchmarks.training_step import Steps, run
from liger_trainer.errors import UserError
from liger_trainer.tools.cli import bench, main
from tests.quantised import library

HYBRIDS = {name: model for name, model in MODELS.items() if model.mixer}

MINE = """
from liger_trainer.benchmarks.training_step import training_provider

@training_provider("slow")
def slow(setup):
    raise RuntimeError("no such trainer\\nat all")
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "trainer", "options"),
    [
        *(("tiny", name, {"lora": lora}) for name in ("causal_lm", "sft", "dpo", "grpo") for lora in (0, 4)),
        *(("tiny", name, {"lora": 4}) for name in ("kto", "orpo", "cpo", "reward", "rloo")),
        *(("tiny-moe", name, {"lora": lora}) for name, lora in (("causal_lm", 0), ("causal_lm", 4), ("sft", 4))),
        *(("tiny", name, {"lora": 4, "quantize": "nf4"}) for name in ("causal_lm", "sft")),
        *(("tiny", name, rows) for name in ("causal_lm", "sft") for rows in ({"documents": 6}, {"padding": 0.375})),
        ("tiny", "sft", {"labelled": 0.25}),
        *((name, "causal_lm", {"lora": lora, "layers": 0}) for name in HYBRIDS if "tiny" in name for lora in (0, 4)),
        ("tiny", "sft", {"dtype": "float32"}),
    ],
)
def test_losses_agree(model, trainer, options):
    if "quantize" in options:
        library()
    options = {"layers": 1, **options}
    task = Task(model, trainer=trainer, batch=2, length=16, steps=3, device="cpu", **options)
    results = {provider: run(task, provider) for provider in ("hf", "liger_trainer")}
    for result in results.values():
        assert len(result["losses"]) == 3
        assert result["tokens_per_second"] > 0
        assert result["peak_gibibytes"] is None
    assert results["hf"]["losses"] == pytest.approx(results["liger_trainer"]["losses"], abs=0.02)
    assert any(results["hf"]["losses"])


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.experts])
def test_adapters_are_on_attention_and_experts(name):
    if MODELS[name].mixer is not None:
        pytest.skip("a hybrid's are on its mixers too: test_adapters_of_a_hybrid")
    dense = MODELS[name].dense_layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(MODELS[name], layers=dense + 1))
        adapted = get_peft_model(model, Setup(Task(name, lora=4), model, {}, []).lora)
    keys = [key for key, _ in adapted.named_parameters() if f"layers.{dense}." in key and "lora_A" in key]
    places = {key.split(".lora_A")[0].split(f"layers.{dense}.")[1] for key in keys}
    attention = [f"self_attn.{name}" for name, child in model.model.layers[dense].self_attn.named_children()]
    assert {place for place in places if "self_attn" in place} == {name for name in attention if "_proj" in name}
    assert len({place for place in places if "experts" in place}) == 2
    assert len(places) == sum("_proj" in name for name in attention) + 2
    implementation = "eager" if name == "llama4-scout" else "grouped_mm"  # what `hf` runs; of Llama 4 there is one
    assert model.config._experts_implementation == implementation


@pytest.mark.parametrize("name", HYBRIDS)
def test_adapters_of_a_hybrid(name):
    """On every projection of the mixers and the attention but the one that PEFT refuses, and on what follows them."""
    shape = MODELS[name]
    layers = max(shape.mixer.layers.index("*"), shape.first_with_experts) + 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(shape, layers=layers))
        linear = {key for key, module in model.named_modules() if type(module) is torch.nn.Linear and key != "lm_head"}
        adapted = get_peft_model(model, Setup(Task(name, lora=4), model, {}, []).lora)
    reached = {key for key, module in adapted.base_model.model.named_modules() if getattr(module, "lora_A", None)}
    left_out = {key.split(".", 3)[3] for key in linear - reached}
    if not shape.experts:
        assert not left_out
        return
    assert {key for key in left_out if "shared" not in key} == ({"mixer.out_proj"} if "nemotron" in name else set())
    assert any(key.endswith("experts.base_layer") for key in reached), "of stacked parameters"


def test_a_provider_with_a_number():
    name = "liger_trainer tiled_mlp activation_offloading"
    assert find_training_provider(name) is TRAINING_PROVIDERS[name]

    class Taken:
        def trainer(self, **arguments):
            return arguments

    assert find_training_provider(name)(Taken())["activation_offloading_fraction"] == 1
    taken = find_training_provider(f"{name}=0.5")(Taken())
    assert taken["activation_offloading"] is True
    assert taken["activation_offloading_fraction"] == 0.5
    for wrong, message in {f"{name}=half": "no number", "hf=0.5": "takes no number", "hg": "Did you mean 'hf'"}.items():
        with pytest.raises(BenchmarkError, match=message):
            find_training_provider(wrong)


@pytest.mark.parametrize(("name", "mode"), IN_FP8.items())
def test_a_provider_in_each_mode_of_fp8(name, mode, monkeypatch):
    monkeypatch.setattr(Setup, "trainer", lambda setup, **arguments: {**setup.arguments, **arguments})
    found = find_training_provider(f"{name} activation_memory=auto")(Setup(None, None, {}, []))
    assert found == {"ours": True, "fp8": mode, "activation_memory": "auto"}


def test_a_provider_with_activation_memory():
    def built(setup, **arguments):
        return {**setup.arguments, **arguments}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Setup, "trainer", built)
        setup = Setup(None, None, {"max_steps": 1}, [])
        found = find_training_provider("liger_trainer activation_offloading=0.5 activation_memory=2GiB")(setup)
    assert found["activation_memory"] == "2GiB"
    assert found["activation_offloading_fraction"] == 0.5
    assert found["max_steps"] == 1
    assert "activation_memory" not in setup.arguments
    for wrong, message in {
        "hf activation_memory=auto": "not of 'hf'",
        "liger_trainer activation_memory=much": "`activation_memory` is 'much'",
        "liger_trainr activation_memory=auto": "Did you mean 'liger_trainer'",
    }.items():
        with pytest.raises(BenchmarkError, match=message):
            find_training_provider(wrong)


@pytest.mark.parametrize(
    ("name", "optim", "bf16", "task"),
    [
        ("hf optim=adamw_torch", "adamw_torch", True, {}),
        ("liger_trainer optim=liger_adamw", "liger_adamw", False, {}),  # else FSDP2 would make the weights fp32
        ("liger_trainer optim=liger_adamw activation_memory=1MiB", "liger_adamw", False, {}),
        ("liger_trainer optim=liger_adamw", "liger_adamw", True, {"dtype": "float32"}),
        ("liger_trainer optim=liger_adamw", "liger_adamw", True, {"lora": 4}),
    ],
)
def test_a_provider_with_an_optimizer(name, optim, bf16, task, monkeypatch):
    monkeypatch.setattr(Setup, "trainer", lambda setup, **arguments: {**setup.arguments, **arguments})
    found = find_training_provider(name)(Setup(Task("tiny", **task), None, {"bf16": True, "optim": "sgd"}, []))
    assert (found["optim"], found["bf16"]) == (optim, bf16)
    assert found.get("activation_memory", "1MiB") == "1MiB"


@pytest.mark.filterwarnings("ignore")
def test_timed_steps_have_one_loss():
    """So that nothing waits for the device between them."""
    task = Task("tiny", layers=1, batch=2, length=16, steps=5, warmup=1, device="cpu")
    several, each = (run(dataclasses.replace(task, warmup=warmup), "hf")["losses"] for warmup in (1, 5))
    assert several == pytest.approx([each[0], sum(each[1:]) / 4], abs=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_bf16_weights_train_as_fp32_weights(monkeypatch):
    """From the same weights; with others, losses are 0.03 apart."""
    native = AutoModelForCausalLM.from_config

    def from_config(config, dtype):
        model = native(config, dtype=dtype)
        torch.manual_seed(0)  # with which older torch draws other numbers in bf16 than in fp32 on a CPU
        model.load_state_dict(native(config, dtype=torch.float32).state_dict())
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", from_config)
    task = Task("tiny", layers=1, batch=2, length=16, steps=3, device="cpu")
    exact = run(dataclasses.replace(task, dtype="float32"), "liger_trainer")["losses"]
    assert run(task, "liger_trainer optim=liger_adamw")["losses"] == pytest.approx(exact, abs=3e-3)


def test_each_optimizer_is_a_run_of_those_that_have_it(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(TrainingProcess, "__enter__", lambda self: seen.append(self.arguments[2]) or self)
    monkeypatch.setattr(TrainingProcess, "__exit__", lambda *arguments: None)
    monkeypatch.setattr(TrainingProcess, "result", lambda *arguments: {"tokens_per_second": 2.0})
    options = ["--device", "cpu", "--optim", "adamw_torch_fused,liger_adamw", "--output", str(tmp_path)]
    for dtype in ("bfloat16", "float32"):
        assert main(["bench", "training", *options, "--dtype", dtype, "--providers", "hf,liger_trainer"]) == 0
        assert seen == ["hf", "liger_trainer", "liger_trainer optim=liger_adamw"]
        seen.clear()
        records = Run.read(tmp_path / "results.json").training
        assert len({record.group for record in records}) == 1
        assert {record.dtype for record in records} == {dtype}
        assert rows_in_words(records[0]) == ("fp32 weights" if dtype == "float32" else "")


@pytest.mark.filterwarnings("ignore")
def test_the_argument_arrives_and_what_was_kept_comes_back():
    task, seen = Task("tiny", layers=1, batch=4, length=512, steps=4, device="cpu"), Batches()

    @training_provider("liger_trainer watched")
    def watched(setup):
        setup.callbacks.append(seen)
        return setup.trainer(ours=True)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Batches, "on_train_begin", lambda self, args, *others, **kwargs: self.found.append(args))
        found = run(task, "liger_trainer watched activation_memory=8MiB")
    del TRAINING_PROVIDERS["liger_trainer watched"]
    assert [args.activation_memory for args in seen.found] == ["8MiB"]
    assert 0 < found["kept_gibibytes"] <= 0.008


def test_the_first_step_is_timed_from_the_building_of_its_trainer():
    @training_provider("slow")
    def slow(setup):
        time.sleep(0.5)
        return setup.trainer()

    task = Task("tiny", layers=1, batch=1, length=16, steps=2, device="cpu")
    found = run(task, "slow")
    del TRAINING_PROVIDERS["slow"]
    assert found["first_step_seconds"] >= 0.5


def test_each_size_is_a_run_of_ours(tmp_path, capsys, monkeypatch):
    seen, drawn = [], []
    monkeypatch.setattr(TrainingProcess, "__enter__", lambda self: seen.append(self.arguments[2]) or self)
    monkeypatch.setattr(TrainingProcess, "__exit__", lambda *arguments: None)
    result = {"tokens_per_second": 2.0, "kept_gibibytes": 1.25}
    monkeypatch.setattr(TrainingProcess, "result", lambda *arguments: result)
    monkeypatch.setattr(plots, "draw_pareto", lambda records, device, file: drawn.append((len(records), file)))
    options = ["--device", "cpu", "--activation_memory", "0,1MiB,auto", "--output", str(tmp_path)]
    assert main(["bench", "training", *options, "--providers", "hf,liger_trainer"]) == 0
    sizes = ["", " activation_memory=1MiB", " activation_memory=auto"]
    assert seen == ["hf", *(f"liger_trainer{size}" for size in sizes)]
    records = Run.read(tmp_path / "results.json").training
    assert [record.activation_memory for record in records] == ["", "", "1MiB", "auto"]
    assert len({record.group for record in records}) == 1
    assert drawn == [(4, tmp_path / "pareto.png")]
    shown = capsys.readouterr().out
    assert "liger_trainer activation_memory=auto" in shown
    assert "│ 1.2 │" in shown.replace("  ", " ").replace("  ", " ")


def test_pairs_and_completions():
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=100))
    pairs = Setup(Task("tiny", trainer="dpo", batch=2, length=16, steps=1), model, {}, []).pairs()
    assert [[*map(len, pair)] for pair in pairs] == [[2, 14, 14]] * 2
    assert pairs[0][1] != pairs[0][2]
    task = Task("tiny", trainer="grpo", batch=3, length=16)
    batch = completions(task, 100, 0, torch.device("cpu"))
    assert batch["prompt_ids"].shape == (3, 2)
    assert torch.equal(batch["completion_ids"], completions(task, 100, 0, torch.device("cpu"))["completion_ids"])
    assert not torch.equal(batch["completion_ids"], completions(task, 100, 1, torch.device("cpu"))["completion_ids"])
    sizes = {"causal_lm": 64, "sft": 64, "dpo": 128, "kto": 64, "reward": 128, "grpo": 72, "rloo": 72}
    assert {name: Task("tiny", trainer=name, length=16).step_tokens[-1] for name in sizes} == sizes


class Batches(TrainerCallback):
    """Keeps the inputs of every step, as the trainer's collator made them."""

    def __init__(self):
        self.found = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        keep = lambda module, args, kwargs: self.found.append(dict(zip(["input_ids"], args)) | kwargs)  # noqa: E731
        model.register_forward_pre_hook(keep, with_kwargs=True)


def batches(trainer, **rows):
    """The inputs of two steps of four sequences of 16 tokens."""
    task = Task("tiny", layers=1, trainer=trainer, batch=4, length=16, steps=2, device="cpu", **rows)
    seen = Batches()

    @training_provider("watched")
    def watched(setup):
        setup.callbacks.append(seen)
        return setup.trainer(use_liger_kernel=False)

    losses = run(task, "watched")["losses"]
    del TRAINING_PROVIDERS["watched"]
    return task, seen.found, losses


@pytest.mark.filterwarnings("ignore")
def test_packed_rows():
    """TRL lays the sequences of a step behind each other, and gives their offsets; the Trainer leaves them in rows."""
    task, stock, losses = batches("causal_lm", documents=6)
    assert task.step_tokens == [64, 64]
    positions = torch.tensor([*range(6), *range(6), *range(4)]).expand(4, 16)
    for batch in stock:
        assert torch.equal(batch["position_ids"], positions)
        assert torch.equal(batch["labels"], batch["input_ids"].masked_fill(positions == 0, -100))
        assert batch.get("attention_mask") is None
    _, packed, losses_of_trl = batches("sft", documents=6)
    for batch in packed:
        assert torch.equal(batch["position_ids"], positions.reshape(1, 64))
        ends = [row + end for row in (0, 16, 32, 48) for end in (6, 12, 16)]
        assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, *ends]
        assert batch["max_length_q"] == 6
        assert batch.get("attention_mask") is None
    assert losses_of_trl == pytest.approx(losses, abs=0.01)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer", ["causal_lm", "sft"])
def test_padded_rows(trainer):
    task, found, _ = batches(trainer, padding=0.5)
    assert task.row_tokens == [4, 5, 7, 16]
    assert task.step_tokens == [32, 32]
    for batch in found:
        assert batch["attention_mask"].sum(1).tolist() == task.row_tokens
        assert batch["attention_mask"].diff().max() <= 0  # on the right
        real = batch["attention_mask"].bool()
        assert torch.equal(batch["labels"], batch["input_ids"].masked_fill(~real, -100))
        assert not batch["input_ids"][~real].any()
    assert not torch.equal(found[0]["input_ids"], found[1]["input_ids"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer", ["causal_lm", "sft"])
@pytest.mark.parametrize(
    ("rows", "labelled"),
    [
        ({}, [[*range(12, 16)]] * 4),
        ({"padding": 0.5}, [[3], [4], [5, 6], [*range(12, 16)]]),
        ({"documents": 8}, [[6, 7, 14, 15]] * 4),
    ],
)
def test_labelled_rows(trainer, rows, labelled):
    """The last quarter of each document has labels."""
    _, found, _ = batches(trainer, labelled=0.25, **rows)
    for batch in found:
        labels, ids = batch["labels"].view(4, 16), batch["input_ids"].view(4, 16)
        assert [row.ne(-100).nonzero().flatten().tolist() for row in labels] == labelled
        assert torch.equal(labels, ids.masked_fill(labels == -100, -100))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("trainer", "rows"),
    [
        *((name, {"lengths": "2:9", "prompt": 5}) for name in ("dpo", "kto", "orpo", "cpo", "reward")),
        *((name, {"lengths": "2:9", "prompt": 5, "group_size": 2}) for name in GROUPS),
        *((name, {"lengths": "3:9"}) for name in ("kto", "reward")),
        ("grpo", {"lengths": "6", "prompt": 3, "group_size": 4}),
    ],
)
def test_uneven_lengths(trainer, rows, monkeypatch):
    """The lengths are the drawn ones, a pair or a group has one prompt, and a step counts as TRL pads it."""
    monkeypatch.setattr(Steps, "seconds", lambda self: [2.0] * (len(self.ends) - 1))
    task, found, losses = batches(trainer, **rows)
    prompt, each = task.prompt_tokens, len(found) // 2
    assert prompt == rows.get("prompt", 2)
    for counts, tokens, batch in zip(task.completion_tokens, task.step_tokens, found[each - 1 :: each], strict=True):
        mask, ids = batch["attention_mask"], batch["input_ids"]
        order = [*counts[::2], *counts[1::2]] if trainer in PAIRS else counts
        assert mask.sum(1).tolist() == [prompt + count for count in order]
        assert mask.diff().max() <= 0
        assert not ids[mask == 0].any()
        assert mask.numel() == tokens == len(counts) * (prompt + max(counts))
        prompts = ids[:, :prompt].view(2, 4, -1) if trainer in PAIRS else ids[:, :prompt][None]
        assert torch.equal(prompts[0], prompts[-1])
        assert len(prompts[0].unique(dim=0)) == 4 // rows.get("group_size", 1)
    assert not torch.equal(found[0]["input_ids"], found[-1]["input_ids"])
    ours = run(task, "liger_trainer")
    assert ours["losses"] == pytest.approx(losses, abs=0.01)
    assert ours["tokens_per_second"] == pytest.approx(task.step_tokens[-1] / 2)  # of the step that is timed


@pytest.mark.filterwarnings("ignore")
def test_mismatched_completions():
    """KTO's second forward has each prompt with the completion of the row before, as TRL pairs them in a batch."""
    task, found, _ = batches("kto", lengths="2:9", prompt=5)
    for counts, batch in zip(task.completion_tokens, found[::2], strict=True):
        assert batch["attention_mask"].sum(1).tolist() == [5 + count for count in counts[-1:] + counts[:-1]]


@pytest.mark.parametrize("trainer", ["orpo", "cpo"])
def test_prompts_have_no_labels(trainer, tmp_path, monkeypatch):
    rows = []
    monkeypatch.setattr(training_providers, "_dataset", rows.extend)
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=100))
    settings = {"output_dir": str(tmp_path), "use_cpu": True}
    setup = Setup(Task("tiny", trainer=trainer, batch=1, lengths="3", prompt=2, steps=1), model, {}, [])
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        training_providers.TRAINERS[trainer](setup, False, settings)
    for side in ("chosen", "rejected"):
        ids, labels = (rows[0][f"{side}_{name}"] for name in ("input_ids", "labels"))
        assert labels == [-100, -100, *ids[2:]]


def test_drawn_lengths():
    task = Task("tiny", trainer="dpo", batch=50, steps=3, gpus=2, lengths="3:5", prompt=7)
    drawn = task.completion_tokens
    assert [len(batch) for batch in drawn] == [100] * 6
    assert {count for batch in drawn for count in batch} == {3, 4, 5}
    assert drawn[0] != drawn[1]
    task = dataclasses.replace(task, batch=1, lengths="3:50")
    first, second = (2 * (7 + max(batch)) for batch in task.completion_tokens[:2])
    assert first != second
    assert task.step_tokens[0] == (first + second) / 2
    assert dataclasses.replace(task, trainer="kto", prompt=0, lengths="9").completion_tokens[0] == [5]
    assert (
        completions(Task("tiny", trainer="grpo", batch=2, steps=1, gpus=2, lengths="6", prompt=1), 9, 1, "cpu")[
            "num_items_in_batch"
        ]
        == 24
    )  # of both GPUs


def test_providers_without_packing(monkeypatch):
    monkeypatch.setattr(Setup, "trainer", lambda setup, **arguments: {**setup.arguments, **arguments})
    setup = Setup(Task("tiny", trainer="dpo"), None, {}, [])
    off = {"liger_trainer": {}, PADDED: {"padding_free": False}}
    off[f"{UNSHARED} activation_memory=1MiB"] = {"share_prompt": False, "activation_memory": "1MiB"}
    for name, arguments in off.items():
        assert find_training_provider(name)(setup) == {"ours": True, **arguments}


def test_uneven_lengths_on_the_command_line(tmp_path, capsys, monkeypatch):
    seen, drawn = [], []
    monkeypatch.setattr(TrainingProcess, "__enter__", lambda self: seen.append(self.task) or self)
    monkeypatch.setattr(TrainingProcess, "__exit__", lambda *arguments: None)
    monkeypatch.setattr(TrainingProcess, "result", lambda *arguments: {"tokens_per_second": 2.0})
    monkeypatch.setattr(plots, "draw_alignment", lambda records, device, file: drawn.append((len(records), file)))
    options = ["--lengths", "64:1024", "--prompt", "512", "--trainer", "grpo", "--device", "cpu"]
    options += ["--providers", f"hf,{PADDED},{UNSHARED},liger_trainer", "--output", str(tmp_path)]
    assert main(["bench", "training", *options]) == 0
    assert {(task.batch, task.length, task.lengths, task.prompt, task.group_size) for task in seen} == {
        (16, 1536, "64:1024", 512, 8)
    }
    records = Run.read(tmp_path / "results.json").training
    assert [record.provider for record in records] == ["hf", PADDED, UNSHARED, "liger_trainer"]
    assert {(record.lengths, record.prompt, record.group_size) for record in records} == {("64:1024", 512, 8)}
    assert drawn == [(4, tmp_path / "alignment.png")]
    shown = capsys.readouterr().out
    assert "prompts of 512, 8 completions each of 64 to 1024" in shown
    assert "tokens/s, with padding" in shown


def test_rows_in_words():
    record = TrainingRecord("tiny", 1, "sft", 4, 16, True, "hf")
    assert rows_in_words(record) == ""
    record.documents, record.labelled = 8, 0.25
    assert rows_in_words(record) == "documents of 8, 25 % labelled"
    record.documents, record.padding = 0, 0.5
    assert rows_in_words(record) == "50 % padding, 25 % labelled"
    record = TrainingRecord("tiny", 1, "kto", 4, 16, True, "hf", lengths="256:2048")
    assert rows_in_words(record) == "rows of 256 to 2048"
    record.lengths, record.prompt = "512", 64
    assert rows_in_words(record) == "prompts of 64, completions of 512"


@pytest.mark.parametrize("batch", [2, 3, 8])
@pytest.mark.parametrize("padding", [0.05, 0.2, 0.45])
def test_lengths_of_padded_rows(batch, padding):
    *shorter, full = Task("tiny", batch=batch, length=512, padding=padding).row_tokens
    assert full == 512
    assert len(shorter) == batch - 1
    assert sorted(shorter) == shorter
    assert shorter[0] >= 2
    assert sum(shorter) + full == round(512 * batch * (1 - padding))
    assert batch == 2 or len({*shorter, full}) == batch


@pytest.mark.parametrize("name", sorted(MODELS))
def test_configurations(name):
    shape = MODELS[name]
    first = shape.mixer.layers.index("*") if shape.mixer else 0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(shape, layers=first + 1))
    assert model.lm_head.weight.shape == (shape.vocab, shape.hidden)
    assert model.config.tie_word_embeddings is (shape.tied or name.startswith("gemma"))
    layer = model.model.layers[first]
    attention = layer.mixer if hasattr(layer, "mixer") else layer.self_attn
    if shape.latent_attention:  # of each head 64 numbers are rotated and the others not; the keys' 64 are shared by all
        assert attention.q_b_proj.weight.shape[0] == shape.heads * (shape.head_dim + model.config.qk_nope_head_dim)
        assert attention.kv_a_proj_with_mqa.weight.shape == (shape.kv_heads * shape.head_dim + 512, shape.hidden)
    else:
        gates = 2 if shape.mixer and shape.known.startswith(("Qwen", "qwen")) else 1  # of the attention's output
        assert attention.q_proj.weight.shape == (gates * shape.heads * shape.head_dim, shape.hidden)
        assert attention.k_proj.weight.shape == (shape.kv_heads * shape.head_dim, shape.hidden)
    norm = attention._modules.get("q_norm") or attention._modules.get("q_layernorm")  # OLMoE's is of all heads together
    assert (norm is not None and norm.weight.shape == (shape.head_dim,)) is (shape.qk_norm and name != "tiny")
    assert model_config(shape).num_hidden_layers == shape.layers


LETTERS = {"linear_attention": "M", "conv": "M", "full_attention": "*", "moe": "E"}


@pytest.mark.parametrize("name", HYBRIDS)
def test_mixers_of_hybrids(name):
    """Fewer layers are the first ones: mixers and attention keep their order."""
    shape, mixer = HYBRIDS[name], HYBRIDS[name].mixer
    few = min(12, shape.layers)
    config = model_config(shape, layers=few)
    assert "".join(LETTERS[kind] for kind in config.layer_types) == mixer.layers[:few]
    assert config.num_hidden_layers == few
    assert len(mixer.layers) == shape.layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(shape, layers=1))
    (conv,) = (module for module in model.modules() if isinstance(module, torch.nn.Conv1d))
    assert conv.weight.shape == (mixer.channels or shape.hidden, 1, mixer.taps)
    weights = {key.rsplit(".", 2)[-2 if key.endswith("weight") else -1]: w for key, w in model.named_parameters()}
    taken = {"delta_rule": "in_proj_z", "state_space": "D", "short_conv": "out_proj"}[mixer.kind]
    heads = mixer.value_heads * (1 if taken == "D" else mixer.value_dim) or shape.hidden
    assert weights[taken].shape[0] == heads


def test_more_layers_than_a_hybrid_has():
    with pytest.raises(UserError, match=r"`--layers` is 33, but qwen3\.5-9b has 32 layers"):
        model_config(MODELS["qwen3.5-9b"], 33)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3.5-9b", 8_953_803_264),  # without the vision tower
        ("qwen3.5-35b-a3b", 34_660_610_688),
        ("nemotron-3-nano", 31_577_937_344),  # and 2,944 in buffers of its routers
        ("granite-4-h-small", 32_207_337_984),
        ("lfm2-2.6b", 2_569_272_320),
    ],
)
def test_parameters_of_hybrids(name, parameters):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(HYBRIDS[name]))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.experts])
def test_layers_with_experts(name):
    shape = MODELS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(shape, layers=shape.first_with_experts + 1))
    experts = {key: module for key, module in model.named_modules() if key.endswith(".experts")}
    ((place, module),) = experts.items()
    assert f"layers.{shape.first_with_experts}." in place
    transposed = getattr(module, "is_transposed", name == "llama4-scout")
    down = (shape.expert_intermediate, shape.hidden)
    assert module.down_proj.shape == (shape.experts, *(down if transposed else down[::-1]))
    assert model.config.num_experts_per_tok == shape.experts_per_token


def test_a_process_that_fails_is_a_line(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(MINE)
    sizes = ["--layers", "1", "--batch", "1", "--length", "8", "--steps", "1", "--device", "cpu"]
    mine = ["--providers", "slow", "--provider_file", str(tmp_path / "mine.py"), "--output", str(tmp_path)]
    assert main(["bench", "training", *sizes, *mine]) == 1
    shown = capsys.readouterr()
    assert "RuntimeError: no such trainer" in shown.out
    assert "8: RuntimeError: no such trainer" in shown.err  # at once, before the tables
    (record,) = Run.read(tmp_path / "results.json").training
    assert record.failure == "RuntimeError: no such trainer"
    assert record.group == ("tiny", 1, "causal_lm", 1, "bfloat16", 0, 0.0, 1.0, "", 0, 0, True, 0, "", "", 1, 1, 8, 1)


def test_reasons():
    trace = "Traceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n"
    assert reason(trace, 1) == "out of memory"
    assert reason("torch.AcceleratorError: CUDA error: out of memory\nSearch for", 1) == "out of memory"
    assert (
        reason("ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'", 1)
        == "out of memory"
    )
    launched = "ValueError: first\nTraceback\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n==="
    assert reason(launched, 1) == "ValueError: first"
    assert reason("", -9) == "exit code -9"
    assert reason("a.b.SomeError: first\nsecond\n", 1) == "a.b.SomeError: first"
    whole = f"ValueError: {'a word and another ' * 20}"
    assert reason(whole, 1) == whole


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (["--providers", "liger_trainer, hf,liger_trainer"], [("liger_trainer", "tiny"), ("hf", "tiny")]),
        (["--model", "tiny,tiny-moe,tiny"], [("liger_trainer", "tiny"), ("liger_trainer", "tiny-moe")]),
        (["--length", "8,16,8"], [("liger_trainer", "tiny", 8, 16)]),
        (["--gpus", "1,01"], [("liger_trainer", "tiny")]),
        (["--lora", "4", "--quantize", "bf16,bf16"], [("liger_trainer", "tiny")]),
        (
            ["--optim", "liger_adamw,liger_adamw", "--model", "tiny-moe"],
            [("liger_trainer optim=liger_adamw", "tiny-moe")],
        ),
        (
            ["--activation_memory", "auto,1MiB,auto"],
            [("liger_trainer activation_memory=auto", "tiny"), ("liger_trainer activation_memory=1MiB", "tiny")],
        ),
    ],
    ids=str,
)
def test_a_value_that_is_given_twice_runs_once(options, runs, monkeypatch):
    seen = []

    def noted(self):
        lengths = json.loads(self.arguments[1])
        seen.append((self.arguments[2], self.task.model, *(lengths if len(lengths) > 1 else ())))
        return self

    monkeypatch.setattr(TrainingProcess, "__enter__", noted)
    monkeypatch.setattr(TrainingProcess, "__exit__", lambda *arguments: None)
    monkeypatch.setattr(TrainingProcess, "result", lambda *arguments: {"tokens_per_second": 2.0})
    given = [] if "--providers" in options else ["--providers", "liger_trainer"]
    assert main(["bench", "training", *options, "--device", "cpu", *given]) == 0
    assert seen == runs


def test_an_operation_that_is_given_twice_is_measured_once(monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "_measure", lambda arguments, command: seen.extend(arguments.operations) or 0)
    assert main(["bench", "rms_norm", "rope", "rms_norm", "--device", "cpu"]) == 0
    assert seen == ["rms_norm", "rope"]
