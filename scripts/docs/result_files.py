"""Result files under `benchmarks/`: their rows, grouped by the run that measured them,
and a line that states how they were measured.

A table on a page holds rows of one run only: one command at one commit. Files whose rows come from several
runs name commit, command and, where it is another, date in the rows; `ResultFile.runs` separates them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
Row = Mapping[str, Any]
_OF_A_RUN = ("commit", "command", "date")


@dataclass(frozen=True)
class Run:
    """Rows that one command measured at one commit, and the facts of the file that apply to them."""

    path: str
    facts: Mapping[str, Any]
    rows: tuple[Row, ...]

    def where(self, **wanted: Any) -> list[Row]:
        """Return the rows whose keys have exactly these values."""
        return [row for row in self.rows if all(row.get(key) == value for key, value in wanted.items())]

    def one(self, **wanted: Any) -> Row:
        """Return the only row with these values.

        Raises:
            LookupError: there is no such row, or there are several.
        """
        found = self.where(**wanted)
        if len(found) != 1:
            raise LookupError(f"{self.path} has {len(found)} rows with {wanted}, and one is needed")
        return found[0]

    @property
    def commit(self) -> str:
        """The first ten digits of the commit that was measured."""
        return str(self.facts["commit"])[:10]

    @property
    def hardware(self) -> str:
        """The device, its driver, and the host where they are stated."""
        driver = f" (driver {self.facts['driver']})" if self.facts.get("driver") else ""
        host = self.facts.get("host") or {}
        cores = f", {host['cores']} cores" if host.get("cores") else ""
        cpu = "" if host.get("cpu") in (None, self.facts["device"]) else f"; host {host['cpu']}"
        return f"{self.facts['device']}{driver}{cpu}{cores}"

    @property
    def versions(self) -> str:
        """The versions of Python, torch and what else decides the numbers."""
        stated = {**self.facts["versions"]}
        for row in self.rows:
            stated |= {key: value for key, value in (row.get("versions") or {}).items() if key not in stated}
        return ", ".join(f"{name} {version}" for name, version in stated.items() if version)

    @property
    def measured(self) -> str:
        """The line under a table with the origin of its numbers."""
        return self.measured_at([self.commit])

    def measured_at(self, commits: Sequence[str]) -> str:
        """Return that line for rows that come from several commits."""
        stated = ("commit " if len(commits) == 1 else "commits ") + ", ".join(f"`{each}`" for each in commits)
        return (
            f"<small>Measured {self.facts['date']} on {self.hardware}; {self.versions}; "
            f"{stated}; file `{self.path}`; command `{self.facts['command']}`.</small>"
        )


@dataclass(frozen=True)
class ResultFile:
    """One file of results."""

    path: Path

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """Everything the file states but its rows."""
        return {key: value for key, value in self._document.items() if key != "rows"}

    @property
    def stated(self) -> frozenset[str]:
        """The keys of the file."""
        return frozenset(self._document)

    @cached_property
    def runs(self) -> list[Run]:
        """The runs that the rows come from, the file's own first."""
        own = tuple(self.facts[name] for name in _OF_A_RUN)
        groups: dict[tuple[str, ...], list[Row]] = {own: []}
        for row in self._document["rows"]:
            key = tuple(row.get(name, self.facts[name]) for name in _OF_A_RUN)
            groups.setdefault(key, []).append(row)
        name = self.path.relative_to(ROOT).as_posix()
        return [
            Run(name, {**self.facts, **dict(zip(_OF_A_RUN, key, strict=True))}, tuple(rows))
            for key, rows in groups.items()
            if rows
        ]

    @property
    def run(self) -> Run:
        """The only run of the file.

        Raises:
            LookupError: rows of several runs are in it.
        """
        if len(self.runs) != 1:
            raise LookupError(f"{self.path} holds {len(self.runs)} runs")
        return self.runs[0]

    @cached_property
    def _document(self) -> Mapping[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8"))


def result_file(name: str) -> ResultFile:
    """Return the file `benchmarks/<name>.json`."""
    return ResultFile(BENCHMARKS / f"{name}.json")
