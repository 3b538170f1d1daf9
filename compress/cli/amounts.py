"""Amounts on the command line: a size such as `200GB`, an age such as `30d`."""

import re
from collections.abc import Mapping

from compress.errors import UsageError

_NUMBER_AND_UNIT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)")
_SIZES: Mapping[str, int] = {
    "": 1,
    "b": 1,
    **{unit: 1000 ** (power + 1) for power, unit in enumerate(("kb", "mb", "gb", "tb", "pb"))},
    **{unit: 1024 ** (power + 1) for power, unit in enumerate(("kib", "mib", "gib", "tib", "pib"))},
}
_AGES: Mapping[str, float] = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def size_of(text: str, option: str) -> int:
    """Return a size in bytes: `200GB` in powers of 1000, `200GiB` in powers of 1024.

    Raises:
        UsageError: it is no size.
    """
    found = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if found is None or found[2].lower() not in _SIZES:
        raise UsageError(
            f"{option} {text} is no size.",
            where=option,
            hint="Write a number and a unit, such as 200GB or 1.5TiB.",
        )
    return round(float(found[1]) * _SIZES[found[2].lower()])


def age_of(text: str, option: str) -> float:
    """Return an age in seconds: a number of minutes, hours, days or weeks.

    Raises:
        UsageError: it is no age.
    """
    found = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if found is None or found[2] not in _AGES:
        raise UsageError(
            f"{option} {text} is no age.", where=option, hint="Write a number and m, h, d or w, such as 30d."
        )
    return float(found[1]) * _AGES[found[2]]
