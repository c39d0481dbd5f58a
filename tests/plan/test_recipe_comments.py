"""Recipes of full fine-tuning fit the memory that their comments name, and learn."""

import re

import pytest

from liger_trainer.plan.estimate import estimate
from liger_trainer.recipe.file import find_recipe, read_recipe, shipped_recipes
from liger_trainer.tools.cli.argument_types import memory_size
from liger_trainer.tools.planning.inputs import read_inputs
from liger_trainer.tools.planning.report import make_plan
from tests.plan.cases import GIB, cluster

FULL = sorted(
    name
    for name in shipped_recipes()
    if not name.startswith("quickstart") and not read_recipe(find_recipe(name)).get("use_peft")
)


@pytest.mark.parametrize("name", FULL)
def test_no_recipe_trains_half_precision_weights(name):
    """At 1e-5, the highest learning rate among them, AdamW changes a tenth of bf16 weights."""
    values = read_recipe(find_recipe(name))
    assert values["learning_rate"] <= 1e-5
    if values.get("fp16"):  # for cards without bf16: fp32 weights under autocast
        assert (values["dtype"], values["bf16"], values["optim"]) == ("float32", False, "adamw_torch_fused")
        return
    assert values["dtype"] == "bfloat16"
    with_fp32_copy = values.get("accelerate_config") == "zero3"
    assert values["optim"] == ("adamw_torch_fused" if with_fp32_copy else "liger_adamw")
    assert values["bf16"] is with_fp32_copy, "accelerate's FSDP2 would make the weights of liger_adamw fp32"


CLAIM = re.compile(r"^# (?:One|(?P<gpus>\d+) x) (?P<size>\d+ GB)(?: GPU)?, (?P<gib>\d+) GiB", re.MULTILINE)
MORE = re.compile(
    r"^# On (?:one|(?P<gpus>\d+) x) (?P<size>\d+ GB)(?: GPU)?, (?P<gib>\d+) GiB(?: a GPU)?: .*?(?P<options>--.*)$",
    re.MULTILINE,
)


@pytest.mark.parametrize("name", [name for name in FULL if "zero3" not in name])  # ZeRO-3 is not planned
def test_the_memory_that_a_recipe_names(name):
    text = find_recipe(name).read_text(encoding="utf-8")
    claims = [*CLAIM.finditer(text), *MORE.finditer(text)]
    assert len(claims) == 1 + len(re.findall("^# On .* GiB", text, re.MULTILINE))
    for claim in claims:
        gpus = int(claim["gpus"] or 1)
        options = (claim.groupdict().get("options") or "").split()
        inputs = read_inputs(name, options, gpus)
        plan = make_plan(inputs, cluster(gpus), memory_size(claim["size"].replace(" ", "")))
        assert estimate(inputs.run, plan.written.setting).total / GIB == pytest.approx(int(claim["gib"]), abs=1)
        assert plan.written.fits


ONE = re.compile(r"^# One (?P<size>\d+ GB) GPU\b", re.MULTILINE)


@pytest.mark.parametrize(
    "name", [name for name in shipped_recipes() if not name.startswith("quickstart") and name not in FULL]
)
def test_adapters_fit_the_card_that_a_recipe_names(name):
    (size,) = ONE.findall(find_recipe(name).read_text(encoding="utf-8"))
    assert make_plan(read_inputs(name, []), cluster(1), memory_size(size.replace(" ", ""))).written.fits
