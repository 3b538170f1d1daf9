"""The optional packages of registries: each belongs to an extra, and is imported when it is first used."""

import importlib.util

from compress.errors import EnvironmentUnfit


def check_extra(package: str, *, extra: str) -> None:
    """Check that the package which a registry needs is installed, without importing it.

    Raises:
        EnvironmentUnfit: it is not; the error names the extra.
    """
    if importlib.util.find_spec(package) is None:
        raise EnvironmentUnfit(
            f"registries of this kind need the package {package}, which is not installed.",
            hint=f"Install it with: pip install 'compress[{extra}]'.",
        )
