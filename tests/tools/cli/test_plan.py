"""`liger-trainer plan` on shipped recipes, offline, and its messages for mistakes."""

import socket
from pathlib import Path

import pytest
import torch
import yaml

from liger_trainer.packed.formats import bytes_of_weights
from liger_trainer.plan.parameters import count_parameters
from liger_trainer.recipe.file import find_recipe, read_recipe, shipped_recipes
from liger_trainer.recipe.known_models import PUBLISHED
from liger_trainer.recipe.model import model_class, published_config
from liger_trainer.tools.cli import main

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "labelled-rows.md"
SMALL = '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, \
"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256}'


def run(capsys, *arguments):
    code = main(["plan", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_every_shipped_recipe_as_a_tiny_model(capsys, recipe):
    code, out, err = run(capsys, recipe, "--gpus", "2", "--gpu_memory", "80GB", "--smoke")
    assert code == 0, err
    assert f"liger-trainer train {recipe} --accelerate_config" in out
    for strategy in ("DDP", "FSDP2"):
        assert strategy in out
    assert ("ZeRO-2" in out) is (read_recipe(find_recipe(recipe)).get("optim") != "liger_adamw"), "which refuses it"


@pytest.fixture
def no_network(monkeypatch):
    """A Hub that is asked for is an error, whatever the environment says."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: pytest.fail("asks the network"))
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: pytest.fail("asks the network"))


@pytest.mark.parametrize("recipe", ["llama3_8b_sft", "gemma3_4b_dpo_qlora", "qwen3_30b_a3b_grpo"])
def test_shipped_recipes_need_no_network(capsys, no_network, recipe):
    code, out, err = run(capsys, recipe, "--gpus", "8", "--gpu_memory", "80GB")
    assert code == 0, err
    name = yaml.safe_load(find_recipe(recipe).read_text(encoding="utf-8"))["model_name_or_path"]
    assert f"The sizes of {name} are those packaged with liger_trainer; the Hub was not asked." in out


@pytest.mark.parametrize(
    ("recipe", "counted"),
    [("gemma4_e2b_sft_lora", (20, 35, 70)), ("gemma4_e4b_sft_lora", (18, 42, 42)), ("llama3_8b_sft_lora", None)],
)
def test_layers_that_run_on_labelled_tokens_alone(capsys, no_network, recipe, counted):
    code, out, err = run(capsys, recipe, "--gpus", "1", "--gpu_memory", "80GB")
    assert code == 0, err
    assert ("share keys" in out) is (counted is not None)
    if counted is not None:
        last, layers, share = counted
        assert f"The last {last} of {layers} layers share keys, and have {share}% of the products" in " ".join(
            out.split()
        )
        (row,) = (line for line in GUIDE.read_text(encoding="utf-8").splitlines() if f"| {last} of {layers} |" in line)
        assert f"| {share} % | {share // 2} % |" in row


def test_the_sizes_of_every_shipped_recipe_are_there():
    recipes = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in shipped_recipes().values()]
    assert {recipe.get("model_name_or_path") for recipe in recipes} - {None} == set(PUBLISHED)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("google/gemma-3-4b-it", 4_300_079_472),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-VL-4B-Instruct", 4_437_815_808),
        ("Qwen/Qwen3.5-9B", 9_653_104_368 - 243_290_624),
        ("google/gemma-4-E2B-it", 5_123_178_051 - 18_880_547),
        ("google/gemma-4-E4B-it", 7_996_156_490 - 55_055_658),
        ("openai/gpt-oss-20b", 20_914_757_184),
    ],
)
def test_the_sizes_are_those_that_were_published(name, parameters):
    """The totals are those of the models' pages on the Hub, without what transformers does not load.

    Those are the layer of Qwen3.5 that predicts further tokens, and of Gemma 4 buffers, and keys and values of layers
    that take those of earlier ones.
    """
    config = published_config(name)
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    assert config.dtype == torch.bfloat16
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_the_bytes_of_glm_are_those_of_its_files():
    """The files hold one layer more, which predicts further tokens, with an embedding and a head of its own."""
    config = published_config("unsloth/GLM-4.7-Flash-FP8-Dynamic")
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    last = sum(each.numel() for each in model.model.layers[-1].parameters()) + 2 * config.hidden_size**2
    own = 2 * config.vocab_size * config.hidden_size
    plain = 2 * (sum(each.numel() for each in model.parameters()) + last + own)
    assert plain / 2**30 == pytest.approx(58.16, abs=0.01)  # as published in bf16
    packed = count_parameters(model, packed=bytes_of_weights(config.quantization_config)).total.bytes
    scales = 2 * sum(each.shape[:-1].numel() for each in model.model.parameters() if each.dim() > 1)  # one for each row
    assert (packed + last + 2 * own + scales) / 2**30 == pytest.approx(30.29, abs=0.02)  # as published in FP8


def test_a_folder_or_another_revision_is_read():
    assert published_config("Qwen/Qwen3-30B-A3B", "v2") is None
    assert published_config("Qwen/Qwen3-14B") is None


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ("--gpus 1", True),
        ("--gpus 1 --accelerate_config fsdp2", True),
        ("--gpus 2", True),
        ("--gpus 1 --optim adamw_bnb_8bit", True),
        ("--gpus 1 --optim liger_adamw", False),
        ("--gpus 2 --accelerate_config fsdp2", True),
        ("--gpus 2 --accelerate_config fsdp2 --bf16 true", False),
        ("--gpus 2 --accelerate_config zero3", False),
        ("--gpus 1 --dtype float32", False),
        ("--gpus 1 --learning_rate 1e-3", False),
        ("--gpus 1 --use_peft true --lora_target_modules q_proj v_proj", False),
        ("--gpus 1 --use_peft true --lora_target_modules q_proj", False),
    ],
)
def test_updates_that_rounding_would_lose(capsys, options, noted):
    recipe = ("quickstart", "--model_config", SMALL, "--dtype", "bfloat16", "--learning_rate", "1e-5")
    code, out, err = run(capsys, *recipe, "--gpu_memory", "24GiB", *options.split())
    assert code == 0, err
    words = "at `learning_rate: 1e-05` changes at most 15.5 % of weights in bfloat16"
    assert (words in " ".join(out.split())) == noted
    assert ("set `optim: liger_adamw`, or train fp32 weights" in " ".join(out.split())) == noted


def test_one_gpu_and_a_configuration(capsys):
    code, out, _ = run(capsys, "quickstart", "--gpus", "1", "--gpu_memory", "24GiB", "--model_config", SMALL)
    assert code == 0
    assert "one GPU, no checkpointing" in out
    assert "--accelerate_config single_gpu" in out
    assert "FSDP2" not in out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "attention: liger_trainer's, without masks"),
        (["--attn_implementation", "flash_attention_2"], "attention: flash_attention_2"),
        (["--attn_implementation", "eager"], "attention: eager, which keeps the scores of all pairs of tokens"),
        (
            ["--liger_kernel_config", '{"attention": false}'],
            "attention: torch's SDPA, with a mask in layers with a window",
        ),
        (["--liger_kernel_config", '{"attention": false}', "--max_length", "512"], "attention: torch's SDPA"),
    ],
)
def test_the_attention_that_is_assumed(capsys, options, line):
    code, out, err = run(capsys, "gemma3_4b_sft_lora", "--gpus", "1", "--max_length", "2048", *options)
    assert code == 0, err
    assert line in out.splitlines()


def test_attention_that_is_left_to_the_launch(capsys, tmp_path):
    launch = tmp_path / "launch.yaml"
    launch.write_text("distributed_type: FSDP\nparallelism_config:\n  parallelism_config_cp_size: 2\n")
    code, out, err = run(capsys, "llama3_8b_sft", "--gpus", "2", "--accelerate_config", str(launch))
    assert code == 0, err
    assert "attention: torch's SDPA" in out.splitlines()
    assert "Sequences are planned whole, although the launch splits sequences with `cp_size=2`" in out


def test_forwards_of_fewer_tokens_are_not_planned(capsys):
    for options, noted in (([], False), (["--tokens_per_micro_batch", "4096"], True)):
        code, out, err = run(capsys, "llama3_8b_dpo_lora", "--gpus", "1", *options)
        assert code == 0, err
        assert ("`tokens_per_micro_batch` is not counted" in out) is noted


def test_no_tensor_is_allocated(capsys, monkeypatch):
    sizes = []
    real = torch.nn.Parameter.__new__
    monkeypatch.setattr(
        torch.nn.Parameter,
        "__new__",
        lambda cls, data=None, requires_grad=True: sizes.append(data.device.type) or real(cls, data, requires_grad),
    )
    assert run(capsys, "quickstart", "--gpus", "1", "--gpu_memory", "24GB")[0] == 0
    assert set(sizes) == {"meta"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "0"], "'0' is not a whole number of 1 or more"),
        (["--gpus", "1", "--gpu_memory", "abc"], "'abc' is not a size"),
        (["--gpus", "1", "--gpu_memory", "32"], "'32' is 32 bytes; give a size with its unit, such as 80GB or 24GiB"),
        ([], "--gpus"),
    ],
)
def test_bad_options(capsys, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "quickstart", *arguments])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        ("quickstrat", [], "quickstart"),
        ("quickstart", ["--learning_rat", "1"], "did you mean `learning_rate`"),
        ("llama3_8b_sft", ["--model_name_or_path", "./nowhere"], "there is no folder './nowhere'"),
        ("quickstart", ["--liger_kernel_config", '{"rop": true}'], "did you mean 'rope'"),
        ("quickstart", ["--model_config", "{bad"], "`model_config` is '{bad', which is not JSON"),
        ("quickstart", ["--model_config", '{"hidden_size": 8}'], "`model_config` has no `model_type`"),
        ("quickstart_dpo", ["--max_length", "0"], "`max_length` is 0; it must be 2 or more"),
    ],
)
def test_mistakes_are_named(capsys, recipe, options, words):
    code, _, err = run(capsys, recipe, "--gpus", "1", "--gpu_memory", "80GB", *options)
    assert code == 2
    assert words in err
    assert "Traceback" not in err


def test_a_length_is_needed(capsys, tmp_path):
    recipe = tmp_path / "endless.yaml"
    recipe.write_text(find_recipe("quickstart_dpo").read_text().replace("max_length: 32", "max_length: null"))
    code, _, err = run(capsys, str(recipe), "--gpus", "1", "--gpu_memory", "80GB")
    assert code == 2
    assert "`max_length` is not set" in err


def test_a_model_that_fits_nowhere(capsys):
    code, out, err = run(capsys, "quickstart", "--gpus", "1", "--gpu_memory", "1MB", "--model_config", SMALL)
    assert code == 2
    assert "too big" in out
    assert "The least is one GPU" in err
    assert "take GPUs of at least" in err


def test_the_table_of_activation_memory(capsys):
    code, out, err = run(capsys, "llama3_8b_sft", "--gpus", "1", "--gpu_memory", "80GB")
    assert code == 0, err
    below = out.partition("activation_memory: one GPU, checkpointing, batch 1 × 4")[2]
    assert below.index("1.00 ×") < below.index("4GiB") < below.index("auto, ")


def test_a_budget_that_fits_nowhere(capsys):
    options = ["--gpus", "1", "--gpu_memory", "72GB", "--activation_memory", "60GiB"]
    code, _, err = run(capsys, "llama3_8b_sft", *options)
    assert code == 2
    assert "Nothing fits on 1 × 67.1 GiB with `activation_memory: 60GiB`; give a smaller size, or 'auto'" in err
