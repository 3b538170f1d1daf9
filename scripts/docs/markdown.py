"""Markdown tables and the spelling of numbers in them."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, align: str = "") -> str:
    """Return a Markdown table; `align` has one letter a column, `l` or `r`, and is all `l` by default."""
    marks = {"l": "---", "r": "---:"}
    lines = [header, [marks[each] for each in align or "l" * len(header)], *rows]
    if any(len(line) != len(header) for line in lines):
        raise ValueError(f"a row of the table {list(header)} has another number of cells")
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def fixed(value: float, digits: int = 0) -> str:
    """Return a number with `digits` decimals and commas between thousands."""
    return f"{value:,.{digits}f}"


def significant(value: float, digits: int = 3) -> str:
    """Return a number with that many significant digits and no exponent."""
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    if "e" in text:
        exponent = int(text.partition("e")[2])
        text = f"{value:.{max(0, digits - 1 - exponent)}f}"
    whole, dot, rest = text.partition(".")
    return f"{int(whole):,}{dot}{rest}" if abs(value) >= 1000 else text


def gigabytes(num_bytes: float, digits: int = 1) -> str:
    """Return a size in units of 10^9 bytes."""
    return f"{num_bytes / 1e9:.{digits}f} GB"


def bold(text: str, when: bool = True) -> str:
    """Return the text in bold where the condition holds."""
    return f"**{text}**" if when else text


def signed_percent(ratio: float, digits: int = 1) -> str:
    """Return a ratio as a change: 1.08 is `+8.0 %`."""
    return f"{100 * (ratio - 1):+.{digits}f} %"
