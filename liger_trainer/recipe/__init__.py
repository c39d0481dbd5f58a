"""Recipes: one YAML file describes a training run.

A run goes through these modules in order:

- `schema`: the keys of a recipe, and what each ``trainer`` stands for; `keys` lists them
- `file`: finds and reads recipe files and accelerate configurations
- `load`, `checks`, `smoke`: a checked `Recipe` from a file and the command line; ``--smoke`` makes it small
- `output`: ``output_dir``, the checkpoint to resume from, and the summary at the end
- `data`: the data (keys of data and columns) and the tokenizer; the built-in data are in `smoke`
- `model`, `experts`, `known_models`, `families`: the model, its configuration, and its experts
- `rewards`: reward functions and reward models
- `build`: the trainer, and the checks of it before it trains
- `run`: all of this as steps
"""

from liger_trainer.recipe.file import RecipeError as RecipeError
from liger_trainer.recipe.load import Recipe as Recipe
from liger_trainer.recipe.load import build_recipe as build_recipe
from liger_trainer.recipe.load import load_recipe as load_recipe
