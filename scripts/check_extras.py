"""Installs the package alone and with each of its extras, in fresh environments, and runs what each is for.

    python -m scripts.check_extras --out benchmarks/extras.json

Each environment is made outside of the repository, from a copy of its tracked files and `constraints.txt`,
and is removed afterwards: about 2 GB and some minutes each. Of the install without extras it is checked that
it has no package but those that the core needs, directly or through others; that what an extra is for is
refused with a sentence that names the extra; and how long `compress --help` takes. Servers are those of the
tests, in this process. Exit code 1 if anything differs.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from scripts.bench_setup import markdown, write_results
from tests.support import mlflow_server, oci_server, s3_server
from tests.support.registries import free_port

ROOT = Path(__file__).parents[1]
CORE = "core"
HELP_LIMIT_S = 0.4
NUM_HELP = 15
COMMAND_S = 900.0
SERVE_S = 240.0
LEFT_OUT = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "HF_ENDPOINT", "HF_TOKEN")
TASKS_RECIPE = """\
version: 1
model: builtin://reference
stages:
  - {kind: quantize, scheme: W8A16, round: {kind: rtn}}
  - {kind: export, formats: compressed-tensors}
  - {kind: validate, tasks: [{kind: lm_eval, name: gsm8k, limit: 2}]}
"""
CLOSURE = r"""
import importlib.metadata as metadata, json, re, sys
from packaging.requirements import Requirement

def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()

there = {normal(each.metadata["Name"]): each for each in metadata.distributions()}
wanted, why = [("compress", "")], {}
while wanted:
    name, extra = wanted.pop()
    for text in there[name].requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            for each in ("", *requirement.extras):
                key = (normal(requirement.name), each)
                if key not in why and key[0] in there:
                    why[key] = name
                    wanted.append(key)
reached = {name for name, _ in why} | {"compress"}
reasons = {name: reason for (name, _), reason in why.items()}
json.dump({"there": sorted(there), "reached": sorted(reached), "why": reasons}, sys.stdout)
"""


class Failed(Exception):
    """A check of an environment did not hold; the message says which."""


@dataclass
class Environment:
    """A virtual environment with the package, and a directory for what its commands write."""

    path: Path
    place: Path
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str, exit_code: int = 0) -> str:
        """Run a program of the environment and return what it printed.

        Raises:
            Failed: it ended with another exit code.
        """
        done = subprocess.run(
            [str(self.path / "bin" / command[0]), *command[1:]],
            cwd=self.place,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if done.returncode != exit_code:
            words = (done.stderr or done.stdout).strip()[-600:]
            raise Failed(f"{' '.join(command)[:200]} ended with {done.returncode}, not {exit_code}: {words}")
        return done.stdout + done.stderr

    @property
    def environ(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        return {**inherited, "HOME": str(self.place), "HF_HUB_OFFLINE": "1", **self.variables}


@dataclass(frozen=True)
class Extra:
    """What an extra is for: the packages to import, and a real command. In an install without it, the command
    `refused` must end with exit code 4 and name the extra.
    """

    imports: tuple[str, ...]
    check: Callable[[Environment], str]
    refused: Callable[[Environment], tuple[str, ...]] | None = None

    def try_out(self, environment: Environment) -> dict[str, Any]:
        """Return what was imported and run."""
        environment.run("python", "-c", "import " + ", ".join(self.imports))
        return {"imports": list(self.imports), "command": self.check(environment)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--extra", action="append", help="only this one and the core; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="environments at a time, beside the core's")
    parser.add_argument("--commit", default=None, help="of the code that is tried")
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    args = parser.parse_args(argv)

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if unknown := sorted(set(declared) - set(EXTRAS)):
        parser.error(f"no check is known for the extras {', '.join(unknown)}; add them to EXTRAS.")
    wanted = [name for name in declared if not args.extra or name in args.extra]
    with ThreadPoolExecutor(args.jobs) as pool:
        others = [pool.submit(try_install, name, declared[name], EXTRAS[name].try_out) for name in wanted]
        core = try_install(CORE, [], lambda environment: check_core(environment, declared, others))
        rows = [core, *(each.result() for each in others)]
    for row in rows:
        row["added"] = sorted(set(row.get("packages", ())) - set(core.get("packages", ())))
        row["added_bytes"] = row.get("size_bytes", 0) - core.get("size_bytes", 0)
    facts = {"failed": sum(each["error"] is not None for each in rows), "help_limit_s": HELP_LIMIT_S}
    write_results(args.out, rows, device=torch.device("cpu"), commit=args.commit, facts=facts)
    print_table(rows)
    return 1 if any(each["error"] for each in rows) else 0


def try_install(
    name: str, requires: Sequence[str], check: Callable[[Environment], dict[str, Any]]
) -> dict[str, Any]:
    """Return what an install of one extra brought and did; `error` is None where everything holds."""
    row: dict[str, Any] = {"extra": name, "requires": list(requires), "error": None}
    with tempfile.TemporaryDirectory(prefix=f"extra-{name}-") as directory:
        try:
            began = time.monotonic()
            environment = install(name, Path(directory))
            row["install_s"] = round(time.monotonic() - began, 1)
            row |= contents(environment)
            began = time.monotonic()
            row |= check(environment)
            row["check_s"] = round(time.monotonic() - began, 1)
        except (Failed, subprocess.SubprocessError) as error:
            row["error"] = str(error)[-1000:]
    print({key: value for key, value in row.items() if key != "packages"}, file=sys.stderr, flush=True)
    return row


def install(name: str, root: Path) -> Environment:
    """Return a new environment with the package and one extra."""
    source, place = root / "source", root / "place"
    place.mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for file in filter(None, files.decode().split("\0")):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, source / file)
    subprocess.run([sys.executable, "-m", "venv", str(root / "venv")], check=True)
    environment = Environment(root / "venv", place)
    target = str(source) if name == CORE else f"{source}[{name}]"
    constraints = str(source / "constraints.txt")
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    environment.run("python", *pip, "-c", constraints, target)
    environment.run("python", "-m", "pip", "check", "--disable-pip-version-check")
    return environment


def contents(environment: Environment) -> dict[str, Any]:
    """Return the packages of an environment and its size."""
    listed = json.loads(
        environment.run("python", "-m", "pip", "list", "--format", "json", "--disable-pip-version-check")
    )
    packages = {normal(each["name"]): each["version"] for each in listed}
    size_bytes = sum(each.lstat().st_size for each in environment.path.rglob("*"))
    return {"num_packages": len(packages), "size_bytes": size_bytes, "packages": packages}


def check_core(
    environment: Environment, declared: Mapping[str, list[str]], others: Sequence["Future[Any]"]
) -> dict[str, Any]:
    """Return what was found of an install without extras; `compress --help` is timed after the others.

    Raises:
        Failed: it has a package that the core does not need, an extra is missing without a word, or
            `compress --help` takes too long.
    """
    found = json.loads(environment.run("python", "-c", CLOSURE))
    if strays := set(found["there"]) - set(found["reached"]) - {"pip", "setuptools"}:
        raise Failed(f"the core install has packages that it does not need: {', '.join(sorted(strays))}")
    shared = {}
    for extra, requirements in declared.items():
        for requirement in requirements:
            name = normal(re.match(r"[A-Za-z0-9._-]+", requirement)[0])  # type: ignore[index]
            if name in found["there"]:
                shared[f"{extra}: {name}"] = f"the core's {found['why'][name]} needs it"
    refusals = {}
    for extra in declared:
        refused = EXTRAS[extra].refused
        if refused is not None:
            words = environment.run(*refused(environment), exit_code=4)
            if f"[{extra}]" not in words:
                raise Failed(f"without the extra {extra} the error does not name it: {words[-300:]}")
            refusals[extra] = words.strip().splitlines()[-1]
    artifact = str(make_artifact(environment.place))
    environment.run("compress", "push", artifact, "layout://registry/model:stable")
    environment.run("compress", "verify", "layout://registry/model:stable")
    environment.run(
        "compress", "plan", str(environment.path.parent / "source/recipes/quickstart.yaml"), "--offline"
    )
    wait(others)
    timing = time_help(environment)
    if timing["cpu_s"]["median"] > HELP_LIMIT_S:
        raise Failed(f"compress --help takes {timing['cpu_s']} seconds of processor time")
    return {"shared_with_core": shared, "refusals": refusals, "help": timing, "command": "push, verify, plan"}


def time_help(environment: Environment) -> dict[str, Any]:
    """Return wall and processor seconds of `compress --help`, after two runs that compile and warm up. A
    machine that has nothing else to do waits for the processor time.
    """
    walls, cpus = [], []
    for number in range(NUM_HELP + 2):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        environment.run("compress", "--help")
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        if number >= 2:
            walls.append(wall)
            cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {"runs": NUM_HELP, "wall_s": spread(walls), "cpu_s": spread(cpus), "load": os.getloadavg()[0]}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return minimum, median and maximum."""
    ends = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {name: round(value, 3) for name, value in ends.items()}


def normal(name: str) -> str:
    """Return the name of a package as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def make_artifact(place: Path) -> Path:
    """Return a small artifact."""

    def build(writer: ArtifactWriter) -> None:
        (writer.path / "weights.bin").write_bytes(bytes(range(256)) * 4000)
        writer.describe(role="checkpoint")

    return (
        Workspace(place / "workspace").commit(Workspace.key("extra", 1, {}, {}, 0), "extra", {}, build).path
    )


def there_and_back(environment: Environment, url: str) -> str:
    """Push an artifact, verify it and pull it."""
    environment.run("compress", "push", str(make_artifact(environment.place)), f"{url}/model:stable")
    environment.run("compress", "verify", f"{url}/model:stable")
    environment.run("compress", "pull", f"{url}/model:stable", str(environment.place / "pulled"))
    return "push, verify and pull of " + url.partition("://")[0] + "://"


def check_oci(environment: Environment) -> str:
    return there_and_back(environment, f"oci://{oci_server.start(oci_server.Oci())}/org")


def check_s3(environment: Environment) -> str:
    environment.variables |= s3_server.environment(s3_server.start(s3_server.Store()))
    return there_and_back(environment, f"s3://{s3_server.BUCKET}/team")


def check_mlflow(environment: Environment) -> str:
    """Push with the weights in an OCI registry, whose client MLflow's brings."""
    store = f"oci://{oci_server.start(oci_server.Oci())}/org"
    return there_and_back(environment, f"mlflow+{mlflow_server.start(mlflow_server.Tracking())}/{store}")


def check_eval(environment: Environment) -> str:
    environment.run(*plan_tasks(environment))
    return "plan of a recipe with a task of lm-eval"


def plan_tasks(environment: Environment) -> tuple[str, ...]:
    (environment.place / "tasks.yaml").write_text(TASKS_RECIPE)
    return ("compress", "plan", "tasks.yaml")


def check_serve(environment: Environment) -> str:
    """Serve the bundled model, complete a prompt, and end by SIGTERM."""
    port = free_port()
    command = [str(environment.path / "bin/compress"), "serve", "builtin://reference", "--port", str(port)]
    with (environment.place / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=environment.place, env=environment.environ, stdout=log, stderr=log
        )
    try:
        until = time.monotonic() + SERVE_S
        while not healthy(port):
            if process.poll() is not None or time.monotonic() > until:
                raise Failed("compress serve: " + (environment.place / "serve.log").read_text()[-600:])
            time.sleep(0.5)
        models = json.loads(fetch(f"http://127.0.0.1:{port}/v1/models"))
        body = {"model": models["data"][0]["id"], "prompt": "def add(a, b):", "max_tokens": 4}
        text = json.loads(fetch(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode()))
        if text["usage"]["completion_tokens"] != 4 or b"num_requests" not in fetch(
            f"http://127.0.0.1:{port}/metrics"
        ):
            raise Failed(f"compress serve answered {text}")
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    return f"serve: a completion, /metrics, and SIGTERM with exit code {process.returncode}"


def healthy(port: int) -> bool:
    with contextlib.suppress(urllib.error.URLError, OSError):
        fetch(f"http://127.0.0.1:{port}/health")
        return True
    return False


def fetch(url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


def check_sign(environment: Environment) -> str:
    """Sign an artifact with a key, and verify it with the key's other half."""
    for command in (
        ["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "signing.pem"],
        ["ec", "-in", "signing.pem", "-pubout", "-out", "signing.pub"],
    ):
        subprocess.run(["openssl", *command], cwd=environment.place, check=True, capture_output=True)
    artifact = str(make_artifact(environment.place))
    environment.run("compress", "sign", artifact, "--key", "signing.pem")
    environment.run("compress", "push", artifact, "layout://registry/model:stable")
    environment.run("compress", "verify", "layout://registry/model:stable", "--key", "signing.pub")
    return "sign, push and verify with a key"


def check_onnx(environment: Environment) -> str:
    """Write the bundled model as an ONNX decoder."""
    environment.run("compress", "convert", "builtin://reference", "--to", "onnx", "--out", "decoder")
    if not (environment.place / "decoder" / "model.onnx").is_file():
        raise Failed("compress convert wrote no model.onnx")
    return "convert --to onnx"


def check_modelopt(environment: Environment) -> str:
    """Have modelopt find the scales of the bundled model."""
    source = environment.path.parent / "source"
    script = (
        "import torch; from safetensors.torch import save_file; "
        "save_file({'tokens': torch.arange(64).view(2, 32)}, 'tokens.safetensors'); "
        "from compress.pipeline import resolve_source; print(resolve_source('builtin://reference').path)"
    )
    model = environment.run("python", "-c", script).strip()
    environment.run(
        "python",
        str(source / "scripts/modelopt_scales.py"),
        model,
        "tokens.safetensors",
        "scales.safetensors",
    )
    return "scripts/modelopt_scales.py"


def check_docs(environment: Environment) -> str:
    source = environment.path.parent / "source"
    environment.variables |= {"NO_MKDOCS_2_WARNING": "1"}
    environment.run(
        "mkdocs", "build", "--strict", "-f", str(source / "mkdocs.yml"), "-d", str(environment.place / "site")
    )
    if not (environment.place / "site" / "index.html").is_file():
        raise Failed("mkdocs built no index.html")
    return "mkdocs build --strict"


def check_dev(environment: Environment) -> str:
    source = environment.path.parent / "source"
    environment.run(
        "python",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(source),
        str(source / "tests/repo/test_layers.py"),
    )
    environment.run("ruff", "check", str(source / "compress"))
    return "pytest of the layers, ruff"


EXTRAS: dict[str, Extra] = {
    "dev": Extra(
        ("pytest", "hypothesis", "xdist", "mypy", "grimp", "compressed_tensors", "triton"), check_dev
    ),
    "docs": Extra(("mkdocs", "material"), check_docs),
    "oci": Extra(
        ("requests",), check_oci, lambda _: ("compress", "pull", "oci://127.0.0.1:9/org/model", "out")
    ),
    "s3": Extra(("boto3",), check_s3, lambda _: ("compress", "pull", "s3://models/team/model", "out")),
    "mlflow": Extra(
        ("mlflow",), check_mlflow, lambda _: ("compress", "pull", "mlflow+http://127.0.0.1:9/model", "out")
    ),
    "sign": Extra(("model_signing",), check_sign),
    "onnx": Extra(
        ("onnx",),
        check_onnx,
        lambda _: ("compress", "convert", "builtin://reference", "--to", "onnx", "--out", "refused"),
    ),
    "modelopt": Extra(("modelopt.torch.quantization",), check_modelopt),
    "eval": Extra(("lm_eval",), check_eval, plan_tasks),
    "serve": Extra(
        ("starlette", "uvicorn", "httptools", "uvloop", "prometheus_client"),
        check_serve,
        lambda _: ("compress", "serve", "builtin://reference"),
    ),
}


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    print(
        markdown(
            ["extra", "packages", "MiB", "more packages than the core", "more MiB", "what ran", "error"],
            [
                [
                    each["extra"],
                    str(each.get("num_packages", "")),
                    f"{each.get('size_bytes', 0) / 2**20:,.0f}",
                    str(len(each.get("added", []))),
                    f"{each.get('added_bytes', 0) / 2**20:,.1f}",
                    str(each.get("command", "")),
                    str(each["error"] or ""),
                ]
                for each in rows
            ],
        )
    )


if __name__ == "__main__":
    sys.exit(main())
