"""The wheel holds what `kvhost init` makes working copies from, inside the package itself.

All else is in pyproject.toml.
"""

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "kvhost"))
from _copied import files  # noqa: E402


class WithCopy(build_py):
    """Puts the files of a working copy into kvhost/_copy."""

    def run(self) -> None:
        super().run()
        top = Path(self.build_lib, "kvhost", "_copy")
        shutil.rmtree(top, ignore_errors=True)  # build/ may hold what an older version copied
        for name, path in files(HERE):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, top / name)


setup(cmdclass={"build_py": WithCopy})
