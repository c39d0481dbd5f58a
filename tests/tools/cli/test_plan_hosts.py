"""`liger-trainer plan` for several hosts: what it proposes can be launched, and what it cannot plan is named."""

import re
import shlex

import pytest
from accelerate.commands.launch import launch_command_parser

from liger_trainer.tools.cli import main
from liger_trainer.tools.planning.cards import CARDS, card_named, cluster_of, network_rate

DENSE = '{"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, \
"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}'  # 70B
SYNC = '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'  # no whole gradients between micro-batches
LARGE = ("quickstart", "--model_config", DENSE, "--dtype", "bfloat16", "--bf16", "false", "--optim", "liger_adamw")
LARGE += ("--per_device_train_batch_size", "1", "--accelerator_config", SYNC)


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")

    def plan(*arguments):
        code = main(["plan", *arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return plan


def launched(text):
    """What accelerate reads of the command that was printed, and the words after its launcher."""
    (line,) = (line for line in text.splitlines() if line.startswith("  accelerate launch"))
    assert '"$MACHINE_RANK"' in line or "--machine_rank" not in line, "left to the shell"
    words = shlex.split(line.replace('"$MACHINE_RANK"', "1").replace('"$MAIN_HOST"', "10.0.0.1"))
    found = launch_command_parser().parse_args(words[2:])
    return found, words[words.index("liger_trainer") :]


def layouts_of(text):
    """The rows of the table of layouts: name, and what the last column says."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.count("│") == 9]
    return {re.sub(r", (no )?checkpointing.*", "", row[0]): row[-1] for row in rows if row[0]}


def test_the_choice_on_512_gpus_can_be_launched(run):
    code, out, err = run("llama3_8b_sft", "--gpus", "512", "--hosts", "64", "--network", "400Gb/s", "--card", "H100")
    assert code == 0, err
    rows = layouts_of(out)
    (best,) = (name for name, verdict in rows.items() if verdict == "best")
    assert best.startswith("HSDP")
    assert {"FSDP2", "DDP"} < set(rows)
    assert rows["DDP"].startswith("too big by")
    assert "slower" in rows["FSDP2"]
    copies, shards = map(int, re.match(r"HSDP of (\d+) × (\d+)", best).groups())
    launch, command = launched(out)
    assert (launch.num_machines, launch.num_processes, launch.machine_rank) == (64, 512, 1)
    assert launch.config_file.endswith("fsdp2.yaml")
    assert launch.use_parallelism_config
    assert launch.fsdp_version == "2"
    assert int(launch.parallelism_config_dp_replicate_size) == copies
    assert int(launch.parallelism_config_dp_shard_size) == shards
    assert copies * shards == 512
    assert command[:3] == ["liger_trainer", "train", "llama3_8b_sft"]
    assert f"between hosts and under HSDP of {copies} × {shards} nothing was measured" in out
    assert re.search(r"About [\d,]+ tokens/s a GPU at the rates of H100", out)


def test_a_slow_network_costs_speed(run):
    speeds = []
    for rate in ("3.2Tb/s/host", "25Gb/s", "1Gb/s/host"):
        code, out, _ = run("llama3_8b_sft", "--gpus", "16", "--hosts", "2", "--network", rate, "--card", "H100")
        assert code == 0
        speeds.append(int(re.search(r"About ([\d,]+) tokens/s", out)[1].replace(",", "")))
    assert speeds[0] > speeds[1] > speeds[2]


def test_long_sequences_are_shared(run):
    """One sequence of 262,144 tokens fits no GPU of 80 GB."""
    options = ("--gpus", "32", "--hosts", "4", "--card", "H100", "--max_length", "262144")
    code, out, err = run(*LARGE, *options)
    assert code == 0, err
    rows = layouts_of(out)
    (best,) = (name for name, verdict in rows.items() if verdict == "best")
    assert best.startswith("FSDP2, CP of")
    assert rows["FSDP2"].startswith("too big by")
    launch, _ = launched(out)
    size, shards = int(launch.parallelism_config_cp_size), int(launch.parallelism_config_dp_shard_size)
    assert size * shards == 32
    assert size == int(re.search(r"CP of (\d+)", best)[1])
    assert f"between hosts and under FSDP2, CP of {size} nothing was measured" in out


def test_a_split_that_recipes_have_no_key_for_is_named(run, monkeypatch):
    from liger_trainer.tools.planning import layouts

    monkeypatch.setattr(layouts, "_against_parts", lambda *arguments: "it is left out here")
    options = ("--gpus", "32", "--hosts", "4", "--card", "H100", "--max_length", "262144")
    code, out, err = run(*LARGE, *options)
    assert code == 0, err
    (best,) = (name for name, verdict in layouts_of(out).items() if verdict == "best")
    size = int(re.match(r"TP of (\d+)", best)[1])
    assert f"DistributedConfig(tp_size={size}, fsdp_size={32 // size})" in out
    assert "context parallel (it is left out here)" in out
    assert "accelerate launch" not in out


OTHERS_ATTENTION = ["--liger_kernel_config", '{"attention": false}']


@pytest.mark.parametrize(
    ("recipe", "options", "reason"),
    [
        ("llama3_8b_grpo", [], "context parallel (generation is not planned with it)"),
        ("llama3_8b_dpo", OTHERS_ATTENTION, "context parallel (the loss of `trainer: dpo` needs whole sequences)"),
        (
            "llama3_8b_dpo",
            ["--precompute_ref_log_probs", "true"],
            "context parallel (`precompute_ref_log_probs` is true)",
        ),
        (
            "llama3_8b_sft",
            ["--packing", "true", *OTHERS_ATTENTION],
            "context parallel (ring attention does not tell packed documents",
        ),
        ("gemma3_4b_sft", [], "context parallel (the model takes images)"),
        ("llama3_8b_sft_lora", [], "tensor parallel (PEFT gives adapters on split projections the wrong width)"),
        ("llama3_8b_sft_qlora", [], "sharded (`load_in_4bit` is true)"),
        ("llama3_8b_sft", ["--activation_memory", "auto"], "tensor parallel (`activation_memory` is not planned"),
        ("qwen3_30b_a3b_sft_ep", [], "tensor parallel (experts and recurrent layers are not planned with it)"),
        ("llama3_8b_sft", [], "expert parallel (transformers has no plan to split experts of this model)"),
    ],
)
def test_what_is_refused_is_not_proposed(run, recipe, options, reason):
    code, out, err = run(recipe, "--gpus", "16", "--hosts", "2", "--card", "H200", *options)
    assert code == 0, err
    assert reason in out
    names = {"context": "CP of", "tensor": "TP of", "sharded": "FSDP2", "expert": "EP of"}
    assert names[reason.split()[0]] not in "".join(layouts_of(out))


def test_fsdp2_splits_a_packed_base(run):
    code, out, err = run("qwen3_30b_a3b_fp8_sft_lora", "--gpus", "16", "--hosts", "2", "--card", "H200")
    assert code == 0, err
    assert "FSDP2" in layouts_of(out)
    assert "EP of" not in "".join(layouts_of(out))
    assert "sharded (" not in out


def test_nothing_that_fits_is_one_line_that_says_what_would(run):
    code, _, err = run(*LARGE, "--gpus", "4", "--hosts", "2", "--card", "H100", "--max_length", "8192")
    assert code == 2
    (line,) = (line for line in err.splitlines() if "Nothing fits" in line)
    assert re.search(r"Nothing fits on 4 × 74\.5 GiB\. The least is .*: take GPUs of at least [\d.]+ GiB", line)
    assert re.search(r"or \d+ GPUs of this size", line)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hosts", "3"], "`--hosts` is 3, but `--gpus` is 16, which it does not divide"),
        (["--network", "400Gb/s"], "`--network` is that between hosts, but `--hosts` is 1"),
        (["--hosts", "2", "--card", "L40S"], "`--network` is not given, and hosts with L40S have no usual one"),
    ],
)
def test_hosts_that_cannot_be(run, options, words):
    code, _, err = run("llama3_8b_sft", "--gpus", "16", *options)
    assert code == 2
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hosts", "0"], "--hosts"),
        (["--hosts", "2", "--network", "fast"], "'fast' is not a rate; give that of a GPU, such as 400Gb/s"),
        (["--hosts", "2", "--network", "0Gb/s"], "'0Gb/s' is not a rate"),
        (["--card", "H1000"], "'H1000' is not known; take the nearest of B200, H200"),
    ],
)
def test_bad_options(capsys, options, words):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "llama3_8b_sft", "--gpus", "16", *options])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("400Gb/s", (50e9, False)),
        ("50GB/s", (50e9, False)),
        ("400 Gb/s/gpu", (50e9, False)),
        ("3.2Tb/s/host", (400e9, True)),
        ("100Mb/s", (12.5e6, False)),
        ("400", None),
        ("400Gb", None),
        ("-1Gb/s", None),
    ],
)
def test_rates_are_of_a_gpu_unless_they_say_host(text, rate):
    assert network_rate(text) == rate


def test_a_host_s_rate_is_shared_by_its_gpus():
    h100 = card_named("H100")
    of_host, of_gpu = (cluster_of(h100, 16, 2, network_rate(text)) for text in ("3200Gb/s/host", "400Gb/s"))
    assert of_host == of_gpu == cluster_of(h100, 16, 2), "which is what hosts of H100 have"


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA L4", "L4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("h100", "H100"),
    ],
)
def test_cards_by_the_name_of_their_device(device, name):
    assert card_named(device).name == name


def test_every_card_has_a_rate_of_its_matmuls():
    for card in CARDS:
        cluster = cluster_of(card, 8)
        assert 1e13 < cluster.flops < 3e15
        assert cluster.link < cluster.memory
    assert card_named("Quadro") is None


@pytest.mark.parametrize("key", ["deepspeed", "fsdp"])
def test_a_recipe_that_splits_the_model_itself_is_not_planned(key, run):
    code, _, err = run("quickstart", "--gpus", "2", "--card", "H100", f"--{key}", "full_shard")
    assert code == 2
    assert f"`{key}` is 'full_shard', and `plan` chooses how GPUs share a model; leave it out" in err


def test_what_fsdp_refuses_is_not_proposed(run):
    options = ("--gpus", "16", "--hosts", "2", "--card", "H100", "--save_on_each_node", "true")
    code, out, err = run("quickstart", *options)
    assert code == 0, err
    assert not any("FSDP2" in name for name in layouts_of(out))
    assert "`save_on_each_node` is true" in out


def test_a_rate_is_written_in_ascii():
    assert network_rate("400Gb/s") is not None
    assert network_rate("\uff14\uff10\uff10Gb/s") is None
