"""Imports point down only, and the parts that run on a bare GPU image import nothing that image lacks."""

import ast
import subprocess
import sys
from pathlib import Path

from tests.support.of_all import of_all

ROOT = Path(__file__).parents[2]
BARE = ("runtime", "kernels", "models", "quant", "artifact/tensors.py")
BARE_PACKAGES = {"torch", "triton", "numpy", "safetensors", "compress"} | sys.stdlib_module_names
TORCH_FREE = ("recipe", "registry", "artifact/manifest.py", "plugins.py", "digest.py", "errors.py")


def python_files(names: tuple[str, ...]) -> list[Path]:
    places = [ROOT / "compress" / name for name in names]
    return [
        path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))
    ]


def packages_imported(nodes: list[ast.AST]) -> set[str]:
    absolute = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.partition(".")[0] for name in absolute + plain}


def test_the_layers_of_the_architecture_are_kept() -> None:
    """By a process of its own: the linter's configuration of logging disables all other loggers."""
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", lint, "--config", "pyproject.toml", "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@of_all(python_files(BARE))
def test_code_for_the_bare_gpu_image_imports_only_what_is_there(path: Path) -> None:
    assert packages_imported(list(ast.walk(ast.parse(path.read_text())))) <= BARE_PACKAGES


@of_all(python_files(TORCH_FREE))
def test_code_for_quick_commands_does_not_import_torch(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert "torch" not in packages_imported(list(tree.body))
