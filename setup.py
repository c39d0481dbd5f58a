"""The one thing that pyproject.toml cannot say: a file that goes beside the package, into site-packages."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

AS_LIGER = Path("liger_trainer/liger/liger_trainer_as_liger.pth")


class BuildWithStartupFile(build_py):
    """Copies the file with which `LIGER_TRAINER_AS_LIGER=1` works in every process."""

    def run(self) -> None:
        """Builds the modules, then copies the file."""
        super().run()
        # The modules of an editable install stay where they are, and the rest goes where it would be installed.
        folder = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        self.copy_file(str(AS_LIGER), str(Path(folder) / AS_LIGER.name))


setup(cmdclass={"build_py": BuildWithStartupFile})
