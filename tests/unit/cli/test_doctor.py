"""`compress doctor` judges the machine and the installed packages."""

import json
from pathlib import Path

import pytest

from compress.cli import doctor, packages
from compress.cli.app import main


def test_doctor_reports_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--workspace", str(tmp_path / "not" / "yet"), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert (
        document["fit"]
        == (code == 0)
        == all(finding["status"] != "unfit" for finding in document["findings"])
    )
    names = {finding["name"] for finding in document["findings"]}
    assert {"python", "torch", "transformers", "cpu", "disk", "auto-gptq"} <= names


def test_doctor_ends_with_4_when_something_required_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = doctor.installed_version
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: None if name == "safetensors" else installed(name)
    )
    assert main(["doctor"]) == 4
    assert "not fit: safetensors" in capsys.readouterr().out


def test_a_file_in_the_place_of_the_workspace_is_unfit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        assert main(["doctor", "--workspace", str(tmp_path / place)]) == 4
        assert f"{tmp_path}/file is a file, and no directory" in capsys.readouterr().out


def test_torchvision_of_another_build_is_unfit() -> None:
    def judged(**versions: str) -> list[str]:
        return [finding.status for finding in packages.vision_and_audio(versions.get)]

    assert judged(torch="2.13.0+cpu") == []
    assert judged(torch="2.13.0+cpu", torchvision="0.28.0") == ["unfit"]
    assert judged(torch="2.13.0+cpu", torchvision="0.28.0+cu130", torchaudio="2.13.0+cpu") == [
        "unfit",
        "note",
    ]
    assert judged(torch="2.13.0", torchvision="0.28.0") == ["note"]


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("2.13.0+cpu", ">=2.9,<2.14", True),
        ("2.14.0", ">=2.9,<2.14", False),
        ("2.9", ">=2.9.0", True),
        ("5.3.1", ">=5.3,<6", True),
        ("4.57.0", ">=5.3,<6", False),
        ("1", "", True),
        ("1.0", "==1", True),
        ("1.0", "!=1", False),
    ],
)
def test_version_comparison(version: str, wanted: str, expected: bool) -> None:
    assert packages.satisfies(version, wanted) is expected


def test_requirement_lines_are_split() -> None:
    assert packages.parse_requirement("torch<2.14,>=2.9") == ("torch", "<2.14,>=2.9")
    assert packages.parse_requirement('ruamel.yaml (>= 0.18) ; python_version > "3"') == (
        "ruamel.yaml",
        ">=0.18",
    )
    assert packages.parse_requirement("name[extra]>=1") == ("name", ">=1")


def test_cpu_features_come_from_the_flags_line() -> None:
    assert "amx_bf16" in doctor.cpu("processor: 0\nflags\t\t: fpu avx2 amx_bf16\nbugs: avx512f\n").value
    assert doctor.cpu("flags : fpu avx2\n").status == "note"
    assert "avx512f" not in doctor.cpu("flags : fpu\nbugs: avx512f\n").value
