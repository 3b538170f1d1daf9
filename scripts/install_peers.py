"""Install the tools that `bench_quality.py --peers` measures beside this project, into the environment of the
Python that runs this.

    python3.11 -m venv .venv-peers && .venv-peers/bin/python -m scripts.install_peers

One set of versions that live together, some 2.5 GB: 0.14 of llm-compressor wants an older transformers than
this project's tests use, hence an environment of their own. autoawq comes last and without its requirements:
its build asks for the torch that is installed, and its metadata for a build of triton that CPU machines lack.
"""

import subprocess
import sys
import time

TOGETHER = (
    "torch==2.13.0",
    "transformers==5.17.0",
    "llmcompressor==0.14.0.1",
    "auto-round==0.15.1",
    "gptqmodel==7.6.0",
    "nvidia-modelopt==0.47.0",
    "requests",  # modelopt imports it and does not say so
)
ALONE = ("triton==3.7.1", "autoawq==0.2.9")


def pip_install(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments],
        check=True,
    )


def main() -> None:
    if sys.prefix == sys.base_prefix:
        sys.exit("run this with the Python of a virtual environment: it installs some 2.5 GB beside it.")
    started_s = time.perf_counter()
    pip_install("setuptools", "wheel")
    pip_install(*TOGETHER)
    pip_install("--no-deps", "--no-build-isolation", *ALONE)
    print(f"installed in {time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
