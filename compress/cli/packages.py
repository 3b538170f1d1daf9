"""Findings about installed packages: whether their versions fulfil what `compress` requires, and whether they
are builds for one CUDA. Only metadata is read.
"""

import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping

from compress.cli.finding import Finding

_VERSIONS_SHOWN = ("transformers", "compressed-tensors", "safetensors")
_REPLACED = ("auto-gptq", "autoawq")


def requirements(version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """Yield the installed packages that miss a declared requirement, or one line when all are right, and the
    versions people ask for.
    """
    try:
        declared = importlib.metadata.requires("compress") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "requirements",
            "note",
            "unknown",
            "compress runs from a source tree; `pip install -e .` lets doctor check its needs.",
        )
        declared = []
    wrong = []
    for line in (line for line in declared if "extra ==" not in line):
        package, wanted = parse_requirement(line)
        found = version_of(package)
        if found is None or not satisfies(found, wanted):
            wrong.append(
                Finding(
                    package,
                    "unfit",
                    found or "missing",
                    f"needs {wanted or 'any version'}: pip install '{package}{wanted}'",
                )
            )
    if declared and not wrong:
        yield Finding("requirements", "ok", "all present in the versions needed")
    shown = {finding.name for finding in wrong}
    yield from wrong
    for package in _VERSIONS_SHOWN:
        if package not in shown:
            found = version_of(package)
            yield Finding(
                package,
                "ok" if found else "unfit",
                found or "missing",
                "" if found else f"pip install {package}",
            )


def parse_requirement(line: str) -> tuple[str, str]:
    """Return `name>=1,<2; marker` as (name, `>=1,<2`)."""
    match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?([^;)]*)", line)
    assert match, line
    return match[1], match[2].replace(" ", "")


def satisfies(version: str, wanted: str) -> bool:
    """Return whether a version fulfils comparisons such as `>=2.9,<2.14`, by its release numbers alone
    (`2.13.0+cpu` counts as 2.13.0).
    """
    compare: Mapping[str, Callable[[int], bool]] = {
        ">=": lambda sign: sign >= 0,
        "<=": lambda sign: sign <= 0,
        ">": lambda sign: sign > 0,
        "<": lambda sign: sign < 0,
        "==": lambda sign: sign == 0,
        "!=": lambda sign: sign != 0,
    }
    for operator, bound in re.findall(r"(>=|<=|==|!=|>|<)([0-9.]+)", wanted):
        found = _release(version)
        limit = _release(bound)
        width = max(len(found), len(limit))
        left = found + (0,) * (width - len(found))
        right = limit + (0,) * (width - len(limit))
        if not compare[operator]((left > right) - (left < right)):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def triton(version_of: Callable[[str], str | None]) -> Finding:
    """Return the finding about triton, which only GPUs need."""
    version = version_of("triton")
    if version:
        return Finding("triton", "ok", version)
    return Finding(
        "triton",
        "note",
        "missing",
        "CUDA builds of torch bring it; without a GPU it is not needed (the torch reference kernels run).",
    )


def vision_and_audio(version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """Yield findings about torchvision and torchaudio. Nothing here needs them, and built for another CUDA
    than torch they break the import of transformers.

    Metadata alone decides: importing the wrong build is the very failure looked for.
    """
    torch_build = build_of(version_of("torch"))
    for package in ("torchvision", "torchaudio"):
        version = version_of(package)
        if version is None:
            continue
        if build_of(version) == torch_build:
            yield Finding(
                package, "note", version, "Not needed here, and easily outdated when torch changes."
            )
        else:
            reason = (
                f"Built for {build_of(version)} while torch is built for {torch_build}: with it "
                "transformers fails to import."
            )
            yield Finding(package, "unfit", version, f"{reason} Remove it: pip uninstall {package}")


def build_of(version: str | None) -> str:
    """Return the local part of a version: `2.13.0+cpu` is `cpu`; without one, the index's default build."""
    return (version or "").partition("+")[2] or "the default build"


def replaced_packages(version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """Yield findings about archived packages that people look for, with the reason why nothing needs them."""
    for package in _REPLACED:
        version = version_of(package)
        reason = "Archived, and cannot be imported with transformers 5; nothing here needs it."
        advice = f"{reason} Remove it: pip uninstall {package}" if version else reason
        yield Finding(package, "note" if version else "ok", version or "absent, as it should be", advice)
