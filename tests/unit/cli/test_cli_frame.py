"""The command line's frame: exit codes, where output goes, what may be imported, and the commands that need
no pipeline.
"""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

import compress
import compress.stages
from compress.artifact.manifest import open_artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.cli import app as app_module
from compress.cli.app import main
from compress.cli.init import PRESETS
from compress.cli.output import duration_text, progress, size_text, table
from compress.cli.validate import _gates
from compress.errors import (
    CompressError,
    EnvironmentUnfit,
    GateFailed,
    Interrupted,
    LockHeld,
    StorageError,
    UsageError,
)
from compress.export import FORMATS
from compress.pipeline import build_steps
from compress.recipe import Spec, load_cases, load_recipe, parse_model_ref

HEAVY = ("torch", "numpy", "pydantic", "ruamel", "transformers", "rich.progress", "matplotlib")


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """One artifact with a hand-made safetensors file: 6 bf16 elements and 3 bytes."""

    def build(out: ArtifactWriter) -> None:
        header = json.dumps(
            {
                "a.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
                "b.codes": {"dtype": "U8", "shape": [3], "data_offsets": [12, 15]},
            }
        ).encode()
        (out.path / "model.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + bytes(range(15))
        )
        (out.path / "config.json").write_text("{}")
        layers = [{"num_heads": 4}, {"num_heads": 4}, {"num_heads": 3}]
        out.describe(role="quantized", layers=layers, scheme={"name": "W4A16_G128"})

    return (
        Workspace(tmp_path / "workspace")
        .commit("k" * 8, "quantize", {"model": "sha256:" + "0" * 64}, build)
        .path
    )


def stdout_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    return document


def python(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, timeout=60, **options
    )


# -------------------------------------------------------------------------------------------------------
# start-up


def loaded_after(code: str) -> set[str]:
    done = python("-c", f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)")
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_help_imports_nothing_heavy() -> None:
    modules = loaded_after("from compress.cli.app import main\nassert main(['--help']) == 0")
    assert sorted(modules & set(HEAVY)) == []
    assert "compress.cli.inspect" in modules
    assert len(modules) < 600


def test_artifact_commands_import_nothing_heavy(artifact: Path, tmp_path: Path) -> None:
    ref = f"layout://{tmp_path}/registry/m:t"
    calls = [
        ["push", str(artifact), ref],
        ["inspect", ref],
        ["inspect", str(artifact)],
        ["pull", ref, str(tmp_path / "copy")],
        ["verify", ref],
    ]
    modules = loaded_after(
        "from compress.cli.app import main\n" + "\n".join(f"assert main({call!r}) == 0" for call in calls)
    )
    assert (
        sorted(modules & set(HEAVY) - {"pydantic"}) == []
    )  # recent versions of typer convert arguments with it


@pytest.mark.parametrize("command", sorted(app_module.COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert str(app_module.COMMANDS[command].__doc__).split()[0] in capsys.readouterr().out


def test_convert_names_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--help"]) == 0
    words = set(re.split(r"[^a-z0-9-]+", capsys.readouterr().out))
    assert set(FORMATS.names()) <= words


def test_version_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"compress {compress.__version__}\n", "")


# -------------------------------------------------------------------------------------------------------
# errors


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (UsageError("what, where"), 2),
        (GateFailed("what, where"), 3),
        (EnvironmentUnfit("what, where"), 4),
        (StorageError("what, where"), 5),
        (FileNotFoundError(2, "what, where", "name"), 5),
        (LockHeld("what, where"), 75),
        (Interrupted("what, where", signal_number=15), 143),
        (CompressError("what, where"), 1),
        (ZeroDivisionError("what, where\nmore"), 1),
    ],
)
def test_an_error_is_one_paragraph_and_its_exit_code(
    error: Exception, exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setitem(app_module.COMMANDS, "fail", fail)
    assert main(["fail"]) == exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert "what, where" in err
    assert len(err.splitlines()) == 1
    assert ("--debug" in err) == isinstance(error, ZeroDivisionError)
    assert main(["fail", "--debug"]) == exit_code
    assert "Traceback" in capsys.readouterr().err


def test_interruption_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(app_module.COMMANDS, "interrupt", interrupt)
    assert main(["interrupt"]) == 130


def test_usage_errors_are_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspcet"]) == 2
    assert main(["inspect"]) == 2
    assert main(["inspect", "x", "--jsn"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "inspect" in err


def test_a_reader_that_left_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "compress.cli", "init", "--list"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (5, "")


# ------------------------------------------------------------------------------------------------------- init
# and schema


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_recipe(preset: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "recipe.yaml"
    assert main(["init", str(path), "--preset", preset]) == 0
    recipe, *_ = load_cases(path)
    parse_model_ref(recipe.model)
    assert "quantize" in [stage.kind for stage in recipe.stages]
    assert build_steps(recipe)
    assert "calib_data/" not in path.read_text(), "an installed package has no such file"


def test_init_keeps_an_existing_file_unless_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("mine")
    assert main(["init", str(path)]) == 2
    assert path.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main(["init", str(path), "--force"]) == 0
    assert load_recipe(path).model == "builtin://reference"


def test_init_names_the_nearest_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "r.yaml"), "--preset", "quikstart"]) == 2
    assert "Did you mean 'quickstart'?" in capsys.readouterr().err
    assert main(["init", "--list"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(PRESETS)


def test_schema_covers_the_registered_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Quantize(Spec):
        scheme: Literal["W4A16_G128"]

    monkeypatch.setattr(
        compress.stages, "STAGES", {"quantize": SimpleNamespace(spec=Quantize)}, raising=False
    )
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$defs"]["stage:quantize"]["properties"]["kind"] == {"const": "quantize"}


# -------------------------------------------------------------------------------------------------------
# artifacts


def test_inspect_sums_what_the_manifest_says(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(artifact), "--json"]) == 0
    document = stdout_json(capsys)
    assert document["digest"] == open_artifact(artifact).digest
    assert document["size_bytes"] == sum(
        file.stat().st_size for file in artifact.iterdir() if file.name != "compress.json"
    )
    assert document["by_dtype"] == {
        "BF16": {"tensors": 1, "elements": 6, "size_bytes": 12},
        "U8": {"tensors": 1, "elements": 3, "size_bytes": 3},
    }
    assert document["manifest"]["role"] == "quantized"
    assert main(["inspect", str(artifact), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "W4A16_G128" in text
    assert "a.weight" in text
    assert "0-1  num_heads=4" in text  # equal layers share a line


def test_an_artifact_survives_the_way_through_a_registry(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ref = f"layout://{tmp_path}/registry/model:candidate"
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    (evidence / "report.json").write_text("{}")
    assert main(["push", str(artifact), ref, "--alias", "best", "--evidence", str(evidence), "--json"]) == 0
    pushed = stdout_json(capsys)
    assert pushed["tags"] == ["latest", "candidate", "best"]
    digest = open_artifact(artifact).digest
    for spelled in (ref, ref.replace("candidate", "best"), pushed["ref"]):
        assert main(["inspect", spelled, "--json"]) == 0
        assert stdout_json(capsys)["digest"] == digest
    assert main(["pull", ref, str(tmp_path / "copy"), "--evidence", str(tmp_path / "proof"), "--json"]) == 0
    assert stdout_json(capsys)["artifact_digest"] == digest
    assert (tmp_path / "proof" / "report.json").read_text() == "{}"
    for target in (ref, str(tmp_path / "copy")):
        assert main(["verify", target, "--json"]) == 0
        assert stdout_json(capsys)["artifact_digest"] == digest
    assert main(["push", str(artifact), pushed["ref"]]) == 2


def test_verify_finds_one_changed_byte(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ref = f"layout://{tmp_path}/registry/model"
    assert main(["push", str(artifact), ref]) == 0
    blobs = tmp_path / "registry" / "blobs" / "sha256"
    for path in (
        artifact / "model.safetensors",
        next(file for file in blobs.iterdir() if file.read_bytes().endswith(bytes(range(15)))),
    ):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    capsys.readouterr()
    for target in (str(artifact), ref):
        assert main(["verify", target]) == 5
        out, err = capsys.readouterr()
        assert out == ""
        assert "model.safetensors" in err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_directory_that_is_no_artifact_is_a_usage_error(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert "compress.json" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------
# output


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_progress_without_a_terminal_is_a_line_now_and_then() -> None:
    out = io.StringIO()
    clock = Clock()
    with progress("quantize", stream=out, peak_bytes=lambda: 3 << 30, clock=clock) as report:
        for layer in range(32):
            clock.now_s += 1.0
            report.update(layer + 1, 32, f"layer {layer}")
    lines = out.getvalue().splitlines()
    assert lines[0] == "quantize 1/32 layer 0: 1s elapsed, 31s left, peak 3.00 GiB"
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, 6, 11, 16, 21, 26, 31, 32]
    assert "\r" not in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    with progress("quantize", stream=out, peak_bytes=lambda: 1 << 20) as report:
        report.update(1, 2, "layer 0")
        report.update(2, 2, "layer 1")
    text = out.getvalue()
    assert "2/2" in text
    assert "layer 1" in text
    assert "1.00 MiB" in text
    assert "\x1b[3" not in text  # NO_COLOR: no colours, whatever else moves


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 << 10, "10.0 KiB"),
        (1023 << 10, "1023 KiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (3 << 50, "3072 TiB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


def test_durations_and_tables() -> None:
    assert [duration_text(seconds) for seconds in (0.4, 59.6, 61, 3600, 7260)] == [
        "0s",
        "1m00s",
        "1m01s",
        "1h00m",
        "2h01m",
    ]
    assert table([("a", 1), ("bbb", 22)], right=(1,)) == "a     1\nbbb  22"
    assert table([]) == ""


@pytest.mark.parametrize(
    "gates", [("ppl_ratio=1", "ppl_ratio=5"), ("a@cpu=1", "a@cpu=2"), ("a@cpu=1", "a=2"), ("a=2", "a@cpu=1")]
)
def test_a_limit_that_is_given_twice_is_refused(gates: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="has a limit already"):
        _gates(list(gates))


def test_limits_of_several_devices_are_one_gate() -> None:
    assert _gates(["a@cpu=1", "a@cuda-sm90=2", "b=3"]) == {"a": {"cpu": 1.0, "cuda-sm90": 2.0}, "b": 3.0}
