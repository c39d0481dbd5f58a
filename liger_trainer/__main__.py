"""``python -m liger_trainer RECIPE.yaml [--key value ...]`` trains; anything else is the ``liger-trainer`` command."""

import sys

from liger_trainer.cli import main, run_recipe_file

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].endswith((".yaml", ".yml")):
        sys.exit(run_recipe_file(sys.argv[1], sys.argv[2:]))
    sys.exit(main())
