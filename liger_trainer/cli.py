"""The command line, under the name that recipes run: `__import__("liger_trainer.cli").cli.run_yaml(...)`."""

from liger_trainer.tools.cli import main as main
from liger_trainer.tools.cli import run_recipe_file as run_recipe_file
from liger_trainer.tools.cli import run_yaml as run_yaml
