"""Rows of the interop matrix, and the result file that holds them.

A row is what one program answered of one case: verdict, numbers and quoted refusal, with the commit and date
at which it was asked. It has a digest of everything that the answer depends on: the names and bytes of the
checkpoint's files, the question (dtype, prompts, number of tokens), the versions of the packages that read
them, and `METHOD`. A row whose digest is that of the case as it is written now need not be asked again. What
this runtime computes is held by the tests of each commit; here it is asked again where its files or version
changed.

The file is replaced after each case. A case in it that is no longer planned is left out.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from compress.artifact.atomic import write_atomic
from scripts.bench_setup import write_results
from scripts.check_interop import LIMITS, Question
from scripts.interop_cases import Case

METHOD = 1
"""Increase it where programs are asked or compared in another way, so that all of them are asked again."""
AGREES = "agrees"
DIFFERS = "computes something else"
REFUSES = "refuses"
NO_ANSWER = "no answer"
BY_RULE = "refused by rule"
NO_KERNEL = "not on this CPU"
NOT_ASKED = (BY_RULE, NO_KERNEL)
"""Verdicts without a question: the format states that the program does not load it, or this CPU cannot."""
MAX_MEAN, MAX_SINGLE = LIMITS["float16"]
Key = tuple[str, bool, str, str, bool, str]
Row = dict[str, Any]


@dataclass(frozen=True)
class Numbers:
    """How a program's log probabilities differ from those of its own arithmetic done plainly.

    `num_logprobs` are compared, of prompts and of the tokens that it wrote; of its `num_tokens` written ones
    `num_equal` are the likeliest by the plain arithmetic, too. `mean` and `worst` are in nats.
    """

    num_logprobs: int
    num_tokens: int
    num_equal: int
    mean: float
    worst: float

    @property
    def agree(self) -> bool:
        return self.mean <= MAX_MEAN and self.worst <= MAX_SINGLE


@dataclass(frozen=True)
class Result:
    """A row of the table: what a program answered, beside what the format states of it.

    `reason` quotes a refusal, or states why the program was not asked; `apart` is the mean difference from
    this runtime.
    """

    case: Case
    program: str
    verdict: str
    loads: bool
    note: str
    dtype: str | None = None
    version: str | None = None
    reason: str | None = None
    numbers: Numbers | None = None
    apart: float | None = None
    digest: str | None = None

    @property
    def well(self) -> bool:
        """Whether the program does what the format states; one that was not asked does."""
        if self.verdict == NO_ANSWER:
            return False
        return self.verdict in NOT_ASKED or (self.verdict == AGREES) == self.loads

    @property
    def text(self) -> str:
        """The verdict as the last column of the table has it."""
        found = self.verdict if self.reason is None else f"{self.verdict}: {self.reason}"
        if self.verdict in NOT_ASKED or (self.well and self.loads):
            return found
        if self.well:
            return f"{found}; as stated ({self.note})"
        return f"WRONG: {found}; stated: {'loads' if self.loads else 'does not load'} ({self.note})"

    def line(self) -> str:
        """Return the row of a Markdown table."""
        measured = self.numbers
        numbers = ["", ""] if measured is None else [f"{measured.mean:.6f}", f"{measured.worst:.4f}"]
        cells = [
            self.case.family_shown,
            self.case.form,
            self.case.scheme_shown,
            f"{self.program} {self.version or ''}".strip(),
            self.dtype or "",
            *numbers,
            "" if self.apart is None else f"{self.apart:.4f}",
            self.text,
        ]
        return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"

    def row(self) -> Row:
        """Return the result as a row of the file, without what it has none of; infinities become null."""
        case = self.case
        numbers = {} if self.numbers is None else asdict(self.numbers)
        row = {
            "family": case.family,
            "pruned": case.pruned,
            "format": case.form,
            "scheme": case.scheme,
            "dense_experts": case.dense_experts,
            "program": self.program,
            "version": self.version,
            "dtype": self.dtype,
            "verdict": self.verdict,
            "as_stated": self.well,
            "loads": self.loads,
            "note": self.note,
            "reason": self.reason,
            **numbers,
            "from_us": self.apart,
            "digest": self.digest,
        }
        return {
            name: finite(value)
            for name, value in row.items()
            if value is not None and (value is not False or name not in ("pruned", "dense_experts"))
        }

    @staticmethod
    def of(row: Mapping[str, Any], case: Case) -> "Result":
        """Return the result that a row holds, of a case as it is written now."""
        numbers = None
        if "num_logprobs" in row:
            values = {name: row[name] for name in Numbers.__dataclass_fields__}
            numbers = Numbers(**{name: math.inf if each is None else each for name, each in values.items()})
        claim = case.claim(row["program"])
        return Result(
            case,
            row["program"],
            row["verdict"],
            claim.loads,
            claim.note,
            row.get("dtype"),
            row.get("version"),
            row.get("reason"),
            numbers,
            row.get("from_us"),
            row.get("digest"),
        )


def finite(value: Any) -> Any:
    """Return a number with six significant digits, null for one that is none, and anything else as it is."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def key_of(case: Case, program: str) -> Key:
    """Return what separates a row from all others."""
    return case.family, case.pruned, case.form, case.scheme, case.dense_experts, program


def key_in(row: Mapping[str, Any]) -> Key:
    """Return the same of a row of the file."""
    pruned, dense = row.get("pruned", False), row.get("dense_experts", False)
    return row["family"], pruned, row["format"], row["scheme"], dense, row["program"]


def digest_of(case: Case, question: Question, versions: Mapping[str, str]) -> str:
    """Return a digest of everything that the answer to a question depends on; see the head of this file."""
    asked = {name: each for name, each in asdict(question).items() if name not in ("model", "timeout_s")}
    found = hashlib.sha256(json.dumps([METHOD, asked, dict(versions)], sort_keys=True).encode())
    for path in sorted(each for each in case.path.rglob("*") if each.is_file()):
        content = path.read_bytes()
        found.update(f"\n{path.relative_to(case.path).as_posix()} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()[:16]


class Results:
    """The rows of a result file; without a path they are held and not written."""

    def __init__(self, path: Path | None, *, commit: str | None, date: str) -> None:
        self._path = path
        self._commit = commit
        self._date = date
        stored = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {"rows": []}
        self._rows: dict[Key, Row] = {key_in(row): row for row in stored["rows"]}
        self._versions: dict[str, Any] = stored.get("programs", {})

    def kept(self, case: Case, program: str, digest: str) -> Result | None:
        """Return what the program answered of the same files before, None where it has to be asked."""
        row = self._rows.get(key_of(case, program))
        return None if row is None or row.get("digest") != digest else Result.of(row, case)

    def answered(self, case: Case, program: str) -> bool:
        """Return whether the file holds an answer of the program, of these files or of others."""
        return "digest" in self._rows.get(key_of(case, program), {})

    def put(self, result: Result, *, asked: bool) -> None:
        """Hold a result in place of an earlier one, whose commit and date stay unless a program was asked."""
        key, row = key_of(result.case, result.program), result.row()
        before = self._rows.get(key, {})
        origin = {"commit": self._commit, "date": self._date}
        if not asked and before.get("verdict") == result.verdict:
            origin = {name: before[name] for name in origin}
        self._rows[key] = {**row, **origin}

    def save(
        self, planned: Iterable[Key], versions: Mapping[str, Mapping[str, str]], facts: Mapping[str, Any]
    ) -> None:
        """Replace the file, with the rows that are planned in their order, and with the versions of the
        packages of each program that was asked in this run, or in an earlier one."""
        if self._path is None:
            return
        rows = [self._rows[key] for key in planned if key in self._rows]
        device = torch.device("cpu")
        facts = {"programs": {**self._versions, **versions}, **facts}
        document = write_results(None, rows, device=device, commit=self._commit, facts=facts)
        write_atomic(self._path, text_of(document).encode())


def text_of(document: Mapping[str, Any]) -> str:
    """Return a result file with a line for each row, so that two of them can be compared by lines."""
    rows = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in document["rows"])
    head = json.dumps({**document, "rows": []}, indent=1, allow_nan=False)
    return head.replace('"rows": []', f'"rows": [\n{rows}\n ]') + "\n"


def planned(cases: Iterable[Case], programs: Iterable[str]) -> Iterator[Key]:
    """Yield the keys of all rows that cases have."""
    names = tuple(programs)
    for case in cases:
        yield from (key_of(case, program) for program in names if case.is_for(program))
