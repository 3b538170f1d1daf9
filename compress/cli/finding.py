"""One line of the report of `compress doctor`."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "unfit"]


@dataclass(frozen=True)
class Finding:
    """The state of one thing. `unfit` means that the work cannot be done here until it is changed."""

    name: str
    status: Status
    value: str
    advice: str = ""
