"""Text that somebody else wrote, made fit for a terminal and a log: what would move the cursor, change the
title or turn the reading direction is shown as an escape instead.
"""

import re

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f"  # invisible, bidirectional
    "\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\U0001d173-\U0001d17a"
    "\ud800-\udfff"  # halves of surrogate pairs, which a terminal's encoding cannot write
    "\U000e0000-\U000e007f]"  # tags
)


def printable(text: str) -> str:
    r"""Return `text` with control and formatting characters as escapes, such as `\x1b` or `\u202e`; tabs and
    newlines stay."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    r"""Return `text` as `printable` does, and newlines and tabs as escapes too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def printable_json(document: str) -> str:
    r"""Return JSON text of the same value, with the same characters as escapes of JSON, such as `\u202e`."""
    return _UNPRINTABLE.sub(lambda found: _escaped(found[0]), document)


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
