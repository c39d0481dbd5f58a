"""The quickstarts of alignment learn what they say, in fewer steps here than as they are shipped."""

import json
import re

import pytest

from liger_trainer.recipe.file import find_recipe, read_recipe
from liger_trainer.recipe.smoke import SORTING_KINDS, sorting
from liger_trainer.tools.cli import main


@pytest.mark.parametrize(
    ("name", "measure", "steps", "gain"),
    [("quickstart_dpo", "eval_rewards/accuracies", 40, 0.2), ("quickstart_grpo", "eval_reward", 60, 0.15)],
)
def test_it_rises(name, measure, steps, gain, tmp_path, capsys):
    warm_start = {**read_recipe(find_recipe(name))["warm_start"], "max_steps": 200}
    options = ["--warm_start", json.dumps(warm_start), "--max_steps", str(steps), "--use_cpu", "true"]
    assert main(["train", name, "--output_dir", str(tmp_path / "run"), *options]) == 0
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    values = [entry[measure] for entry in history if measure in entry]
    assert values[-1] > values[0] + gain
    shown = re.search(r"(?:mean reward|preference acc\.) +([\d.]+) → ([\d.]+) \(evaluation\)", capsys.readouterr().out)
    assert [float(value) for value in shown.groups()] == pytest.approx([values[0], values[-1]], abs=5e-4)


def test_the_task():
    rows = {kind: sorting(kind) for kind in SORTING_KINDS}
    prompts = {kind: [row["prompt"] for split in data.values() for row in split] for kind, data in rows.items()}
    assert prompts["demonstrations"] == prompts["preferences"] == prompts["prompts"]
    assert len(set(prompts["prompts"])) == 3024
    right = 0
    for shown, pair, asked in zip(*(rows[kind]["train"] for kind in SORTING_KINDS), strict=True):
        digits, sign = asked["prompt"][:4], asked["prompt"][4]
        assert asked["solution"] == pair["chosen"] == "".join(sorted(digits, reverse=sign == ">"))
        assert pair["rejected"] == pair["chosen"][::-1]
        assert shown["completion"] in (pair["chosen"], pair["rejected"])
        right += shown["completion"] == pair["chosen"]
    assert 0.45 < right / len(rows["prompts"]["train"]) < 0.55
