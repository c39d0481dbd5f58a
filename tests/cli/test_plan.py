"""`liger-trainer plan` on shipped recipes, offline, and what it says to mistakes."""

import pytest
import torch

from liger_trainer.cli import main
from liger_trainer.recipe_file import find_recipe, shipped_recipes

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
    for strategy in ("DDP", "ZeRO-2", "FSDP2"):
        assert strategy in out


def test_one_gpu_and_a_configuration(capsys):
    code, out, _ = run(capsys, "quickstart", "--gpus", "1", "--gpu_memory", "24GiB", "--model_config", SMALL)
    assert code == 0
    assert "one GPU, no checkpointing" in out
    assert "--accelerate_config single_gpu" in out
    assert "FSDP2" not in out


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
        (["--gpus", "1", "--gpu_memory", "abc"], "'abc' is no size"),
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
        ("quickstart_dpo", ["--max_length", "0"], "`max_length` is 0; it must be 1 or more"),
    ],
)
def test_mistakes_are_named(capsys, recipe, options, words):
    code, _, err = run(capsys, recipe, "--gpus", "1", "--gpu_memory", "80GB", *options)
    assert code == 2
    assert words in err
    assert "Traceback" not in err


def test_a_length_is_needed(capsys, tmp_path):
    recipe = tmp_path / "endless.yaml"
    shipped = find_recipe("quickstart_dpo").read_text(encoding="utf-8")
    recipe.write_text(f"{shipped}\nmax_length: null\n", encoding="utf-8")
    code, _, err = run(capsys, str(recipe), "--gpus", "1", "--gpu_memory", "80GB")
    assert code == 2
    assert "`max_length` is not set" in err


def test_what_fits_nowhere_says_what_would(capsys):
    code, out, err = run(capsys, "quickstart", "--gpus", "1", "--gpu_memory", "1MB", "--model_config", SMALL)
    assert code == 2
    assert "too big" in out
    assert "The least is one GPU" in err
    assert "take GPUs of at least" in err
