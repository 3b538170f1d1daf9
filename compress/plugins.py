"""Plug-in sets: a package whose modules register themselves by name, so that one more method, kernel or
format is one more file.

`ROUNDERS = PluginSet("rounder", "compress.methods.quantize")` finds its members by importing every module of
that package once, on first use; a third party adds members through the entry-point group `group`, by default
the package's name. Nobody keeps a list.
"""

import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar

from compress.errors import EnvironmentUnfit, UsageError, did_you_mean

T = TypeVar("T")
M = TypeVar("M")


def installed_version(package: str) -> str | None:
    """Version of an installed distribution; None when it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_extra(package: str, *, extra: str, needed_by: str) -> None:
    """Check that an optional package is installed, without importing it; `needed_by` names in the plural what
    uses it.

    Raises:
        EnvironmentUnfit: it is not; the error names the extra.
    """
    if importlib.util.find_spec(package) is None:
        raise EnvironmentUnfit(
            f"{needed_by} need the package {package}, which is not installed.",
            hint=f"Install it with: pip install 'compress[{extra}]'.",
        )


class PluginSet(Generic[T]):
    """Named members of one kind, found in one package.

    Raises:
        UsageError: from `get`, for a name nobody registered.
    """

    def __init__(self, noun: str, package: str, *, group: str | None = None) -> None:
        self.noun = noun
        self.package = package
        self.group = group or package
        self._members: dict[str, T] = {}
        self._loaded = False

    def add(self, name: str, member: T) -> None:
        if name in self._members:
            raise ValueError(f"{self.noun} '{name}' is registered twice")
        self._members[name] = member

    def register(self, name: str) -> Callable[[M], M]:
        """Decorator form of `add`."""

        def decorate(member: M) -> M:
            self.add(name, member)  # type: ignore[arg-type]
            return member

        return decorate

    def get(self, name: str) -> T:
        self._load()
        if name not in self._members:
            raise UsageError(f"unknown {self.noun} '{name}'.{did_you_mean(name, self._members)}")
        return self._members[name]

    def names(self) -> list[str]:
        self._load()
        return sorted(self._members)

    def items(self) -> list[tuple[str, T]]:
        self._load()
        return sorted(self._members.items())

    def _load(self) -> None:
        if self._loaded:
            return
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        for entry_point in importlib.metadata.entry_points(group=self.group):
            entry_point.load()
        self._loaded = True
