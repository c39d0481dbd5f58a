"""Recipes: one YAML file describes a training run."""

from liger_trainer.recipe.file import RecipeError as RecipeError
from liger_trainer.recipe.load import Recipe as Recipe
from liger_trainer.recipe.load import build_recipe as build_recipe
from liger_trainer.recipe.load import load_recipe as load_recipe
