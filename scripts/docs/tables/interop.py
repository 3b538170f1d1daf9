"""Tables of other programs: which families they compute as our files state, and which they refuse."""

from collections import defaultdict
from functools import cache
from pathlib import Path

from scripts.docs.markdown import bold, fixed, table
from scripts.docs.result_files import ResultFile, Row, Run, result_file
from scripts.interop_cases import in_turns
from scripts.interop_families import FAMILIES
from scripts.interop_matrix import PROGRAMS
from scripts.interop_results import AGREES, NO_KERNEL, Key, key_in, planned

TITLES = {
    "compress": "this runtime",
    "vllm": "vLLM",
    "transformers": "transformers",
    "onnxruntime": "ONNX Runtime",
    "onnxruntime_genai": "ONNX Runtime GenAI",
}
NAMED = 4
"""Families that a row of the reasons names, at most."""


def file() -> ResultFile:
    """Return the result file of the interop matrix."""
    return result_file("interop")


@cache
def rows_planned() -> tuple[Key, ...]:
    """Return the keys of all rows that a whole run has."""
    return tuple(planned(in_turns(list(FAMILIES), Path()), PROGRAMS))


@cache
def rows() -> tuple[Row, ...]:
    """Return the rows of the file that a whole run has now."""
    wanted = frozenset(rows_planned())
    return tuple(row for run in file().runs for row in run.rows if key_in(row) in wanted)


def num_rows() -> tuple[int, int]:
    """Return how many rows the file holds, and how many a whole run has."""
    return len(rows()), len(rows_planned())


def num_cases() -> tuple[int, int]:
    """Return how many cases (checkpoints) the file holds, and how many a whole run has."""
    return len({key_in(row)[:-1] for row in rows()}), len({key[:-1] for key in rows_planned()})


def num_families() -> tuple[int, int]:
    """Return of how many families the file holds a case, and how many there are."""
    return len({row["family"] for row in rows()}), len(FAMILIES)


def programs() -> str:
    """Return the table of programs: what they were asked, and how far they are from their own arithmetic."""
    header = ["program", "version", "rows", "in the file", "agree", "refused", "no kernel here", "wrong"]
    header += ["largest mean", "largest single", "same token"]
    lines = []
    for program in PROGRAMS:
        own = [row for row in rows() if row["program"] == program]
        agreeing = [row for row in own if row["verdict"] == AGREES]
        refused = [row for row in own if row["as_stated"] and not row["loads"]]
        without = [row for row in own if row["verdict"] == NO_KERNEL]
        wrong = [row for row in own if not row["as_stated"]]
        num_tokens = sum(row["num_tokens"] for row in agreeing)
        num_equal = sum(row["num_equal"] for row in agreeing)
        versions = file().facts["programs"].get(program, {"": "–"})
        lines.append(
            [
                TITLES[program],
                next(iter(versions.values())),
                fixed(sum(key[-1] == program for key in rows_planned())),
                fixed(len(own)),
                fixed(len(agreeing)),
                fixed(len(refused)),
                fixed(len(without)),
                bold(fixed(len(wrong)), bool(wrong)),
                f"{max((row['mean'] for row in agreeing), default=0):.4f}",
                f"{max((row['worst'] for row in agreeing), default=0):.3f}",
                f"{100 * num_equal / num_tokens:.1f} %" if num_tokens else "–",
            ]
        )
    return table(header, lines, align="llrrrrrrrrr")


def families() -> str:
    """Return the table of families: for each program the checkpoints that it computes, of those in the
    file."""
    agree: dict[tuple[str, str], int] = defaultdict(int)
    held: dict[tuple[str, str], int] = defaultdict(int)
    whole: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows():
        held[row["family"], row["program"]] += 1
        agree[row["family"], row["program"]] += row["verdict"] == AGREES
    for key in rows_planned():
        whole[key[0], key[-1]] += 1

    def cell(family: str, program: str) -> str:
        at = (family, program)
        if not held[at]:
            return "…" if whole[at] else "–"
        return f"{agree[at]} / {held[at]}" + (" …" if held[at] < whole[at] else "")

    lines = [[f"`{each}`", *(cell(each, program) for program in PROGRAMS)] for each in sorted(FAMILIES)]
    return table(["family", *(TITLES[program] for program in PROGRAMS)], lines, align="lrrrrr")


def reasons() -> str:
    """Return the table of reasons for which programs refuse checkpoints, or are not asked about them."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows():
        if row["verdict"] == NO_KERNEL:
            found[row["program"], f"on this CPU: {row['reason']}"].append(row["family"])
        elif row["as_stated"] and not row["loads"]:
            note = row["note"].replace(f"model_type {row['family']}", "such `model_type`")
            found[row["program"], note].append(row["family"])
    order = sorted(found.items(), key=lambda each: (PROGRAMS.index(each[0][0]), -len(set(each[1])), each[0]))
    lines = []
    for (program, reason), several in order:
        names = sorted(set(several))
        shown = ", ".join(f"`{name}`" for name in names[:NAMED])
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        lines.append([TITLES[program], reason.replace("|", "\\|"), shown + more, fixed(len(several))])
    return table(["program", "reason", "families", "rows"], lines, align="lllr")


def wrong() -> str:
    """Return the table of rows in which a program does not do what the format states, or a sentence that
    there are none."""
    found = [row for row in rows() if not row["as_stated"]]
    if not found:
        return "None of the rows in the file."
    lines = [
        [
            f"`{row['family']}`",
            row["format"],
            f"`{row['scheme']}`",
            TITLES[row["program"]],
            f"{row['verdict']}{': ' + row['reason'] if 'reason' in row else ''}".replace("|", "\\|"),
            "loads" if row["loads"] else f"does not load: {row['note']}",
        ]
        for row in found
    ]
    return table(["family", "format", "scheme", "program", "found", "stated"], lines)


def measured() -> str:
    """Return the line with the origin of the rows, of all runs that they come from."""
    runs = file().runs
    dates = sorted({str(run.facts["date"]) for run in runs})
    facts = {**file().facts, "date": " to ".join(dict.fromkeys((dates[0], dates[-1])))}
    return Run(runs[0].path, facts, ()).measured_at(list(dict.fromkeys(run.commit for run in runs)))
