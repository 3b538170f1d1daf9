"""`constraints.txt` pins what the package asks for, at versions the package accepts, and nothing that ties it
to one machine.
"""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"([A-Za-z0-9._-]+)==([0-9][0-9A-Za-z.]*)")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    matches = {line: PIN.fullmatch(line) for line in lines if line and not line.startswith("#")}
    assert not [line for line, match in matches.items() if match is None], (
        "only NAME==VERSION lines, without options or local versions"
    )
    return {canonicalize_name(match[1]): match[2] for match in matches.values() if match}


def test_every_direct_dependency_is_pinned_inside_the_range_that_the_package_states() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pins()
    for requirement in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["dev"]]):
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_cuda_packages_are_left_to_torch_and_media_packages_stay_out() -> None:
    unwanted = ("nvidia-", "cuda-", "triton", "torchvision", "torchaudio")
    asked = {"triton", "nvidia-cuda-nvrtc"}
    assert {name for name in pins() if name.startswith(unwanted)} == asked, (
        "the compilers that the dev extra asks for, and no more"
    )


def test_the_package_itself_pins_nothing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    assert [line for line in every if "==" in line] == []
