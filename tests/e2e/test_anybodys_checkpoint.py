"""`compress validate` of checkpoints that this package did not make: no manifest, the same evidence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.manifest import MANIFEST_NAME
from compress.data.model_tokens import read_tokens
from compress.export import FORMATS
from compress.pipeline import resolve_source
from tests.support.foreign_checkpoint import mean_kl, save_with_transformers, write_packed
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_run import RECIPE

Command = Callable[..., tuple[int, str, str]]
SIZES = {"num_samples": 4, "seq_len": 32}
SAMPLES = ("--num-samples", 4, "--seq-len", 32)


def report_of(
    command: Command, candidate: Path, source: Path, *more: object, code: int = 0
) -> dict[str, Any]:
    out = Path("proofs") / candidate.name
    options = (*SAMPLES, "--no-latency", "--out", out, *more)
    found, _, err = command("validate", candidate, "--against", source, *options)
    assert found == code, err
    assert {each.name for each in out.iterdir()} == {
        "README.md", "evidence.json", "report.html", "report.json",
    }  # fmt: skip
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def expected_kl(source: Path, candidate: Path) -> float:
    tokens, _ = read_tokens(
        resolve_source(str(source)), "builtin://python-eval", seed=None, offline=True, **SIZES
    )
    return mean_kl(source, candidate, tokens.tokens_NS)


def test_a_checkpoint_that_transformers_saved_is_measured_as_transformers_measures_it(
    command: Command, model_dir: Path, work: Path
) -> None:
    dense = save_with_transformers(model_dir, work / "dense", noise=0.05)
    report = report_of(command, dense, model_dir, "--gate", "size_ratio=3")
    assert report["accuracy"]["kl_mean"]["value"] == pytest.approx(expected_kl(model_dir, dense), rel=1e-3)
    artifact = report["artifact"]
    assert (artifact.get("scheme"), artifact["foreign"]) == (None, True)
    assert report["title"].endswith("in dense weights")
    assert report["verdict"]["passed"] is True


def test_the_terminal_and_the_json_document_show_the_numbers_of_the_report(
    command: Command, model_dir: Path, work: Path
) -> None:
    dense = save_with_transformers(model_dir, work / "dense", noise=0.05)
    options = (*SAMPLES, "--no-latency", "--gate", "top1=0.5", "--gate", "size_ratio=3")
    shown = {}
    for form, words in (("text", ()), ("json", ("--json",))):
        words = ("--against", model_dir, *options, "--out", form, *words)
        code, shown[form], err = command("validate", dense, *words)
        assert code == 0, err
    report = json.loads((work / "text" / "report.json").read_text())
    document = json.loads(shown["json"])
    assert document["gates"] == report["gates"]
    assert document["accuracy"] == {
        name: report["accuracy"][name] for name in ("ppl_ratio", "kl_mean", "top1")
    }
    found = report["accuracy"]["kl_mean"]
    ends = f"{found['lower']:.4g} to {found['upper']:.4g}"
    lines = shown["text"].splitlines()
    assert f"accuracy  kl_mean  {found['value']:.4g}, {ends}" in lines
    (gate,) = (each for each in report["gates"] if each["name"] == "size_ratio")
    assert f"gate      pass  size_ratio <= 3  {gate['value']:.4g}, bound {gate['bound']:.4g}" in lines
    assert lines[-1] == "report    text/report.html"


@pytest.mark.parametrize(("method", "scheme"), [("gptq", "W4A16_G128"), ("awq", "W4A16_G128_ASYM")])
def test_a_checkpoint_that_another_writer_packed_is_measured_by_what_its_codes_mean(
    method: str, scheme: str, command: Command, model_dir: Path, work: Path
) -> None:
    packed = write_packed(method, model_dir, work / method, dense_twin=work / "twin")
    report = report_of(command, packed, model_dir, "--gate", "kl_mean=1e-9", code=3)
    found = report["accuracy"]["kl_mean"]["value"]
    assert found == pytest.approx(expected_kl(model_dir, work / "twin"), rel=1e-3)
    assert (report["artifact"]["scheme"], report["artifact"]["format"]) == (scheme, method)
    assert report["verdict"]["passed"] is False
    assert "checkpoint compared with" in (work / "proofs" / method / "README.md").read_text()


@pytest.mark.slow
def test_every_format_proves_the_same_with_its_manifest_and_without(
    command: Command, recipe: Callable[..., Path], work: Path
) -> None:
    model_dir = write_tiny_model(work / "model", head_dim=64)  # so that keys fill blocks of 128 x 128
    calibrate = RECIPE["stages"][0]
    for name, form in FORMATS.items():
        scheme = {"fp8": "FP8_BLOCK", "awq": "W4A16_G128_ASYM"}.get(name, "W4A16_G128")
        quantize = {"kind": "quantize", "scheme": scheme, "round": {"kind": "rtn"}}
        stages = [calibrate, quantize, {"kind": "export", "formats": [name]}]
        code, _, err = command("run", recipe(model=str(model_dir), stages=stages), "--run-dir", work / name)
        assert code == 0, err
        exported = work / name / "artifacts" / "export"
        bare = work / f"bare-{name}"
        shutil.copytree(exported, bare, ignore=shutil.ignore_patterns(MANIFEST_NAME))
        with_manifest = report_of(command, shutil.copytree(exported, work / f"whole-{name}"), model_dir)
        without = report_of(command, bare, model_dir)
        assert without["accuracy"] == with_manifest["accuracy"]
        own, other = without["artifact"], with_manifest["artifact"]
        for key in ("scheme", "format", "sizes", "source_digest"):
            assert own[key] == other[key], (name, key)
        assert own["format"] == name == form.quant_method


def test_a_checkpoint_of_another_tokenizer_or_nothing_at_all_is_refused(
    command: Command, model_dir: Path, work: Path
) -> None:
    other = shutil.copytree(model_dir, work / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[:2]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = (*SAMPLES, "--no-latency", "--out", work / "proof")
    (work / "empty").mkdir()
    (work / "pickled").mkdir()
    (work / "pickled" / "pytorch_model.bin").write_bytes(b"no")
    for path, reason in (
        (other, "another tokenizer"),
        (work / "empty", "no config.json"),
        (work / "pickled", "a pickle"),
        (work / "missing", "does not exist"),
    ):
        code, _, err = command("validate", path, "--against", model_dir, *options)
        assert code == 2, err
        assert reason in err
        assert not (work / "proof").exists()
