"""Build step: the recipes of `recipes/` travel inside the package as `compress/recipes/`, so that
`compress init` finds them.

Everything else about the build is in pyproject.toml. An editable install needs no copy: there `compress init`
reads `recipes/` beside the package.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RECIPES = sorted((Path(__file__).parent / "recipes").glob("*.yaml"))


class BuildWithRecipes(build_py):
    """Copies the package and the recipes."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._recipes().items():
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        copied = [] if self.editable_mode else map(str, self._recipes().values())
        return [*super().get_outputs(include_bytecode), *copied]

    def _recipes(self) -> dict[Path, Path]:
        return {path: Path(self.build_lib, "compress", "recipes", path.name) for path in RECIPES}


setup(cmdclass={"build_py": BuildWithRecipes})
