"""Mixed precision through the commands: planned, chosen, cut, resumed, exported, shown in the report."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from compress.artifact.manifest import open_artifact
from compress.export import open_checkpoint
from compress.models.linear_groups import LINEAR_GROUPS
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from tests.support.tiny_run import NUM_LAYERS, RECIPE

Command = Callable[..., tuple[int, str, str]]
CHOICES = ["W4A16_G128", "FP8_STATIC", "W8A16", "dense"]


def stages(
    budget: dict[str, Any], *, schemes: list[str] = CHOICES, form: str = "compressed-tensors", **changes: Any
) -> list[dict[str, Any]]:
    calibrate, _, _, validate = RECIPE["stages"]
    scheme = {"kind": "mixed", "schemes": schemes, "budget": budget, "num_samples": 3}
    quantize = {"kind": "quantize", "scheme": scheme, "round": {"kind": "rtn"}, **changes}
    return [calibrate, quantize, {"kind": "export", "formats": [form]}, {**validate, "gates": {}}]


def test_a_budget_of_bytes_is_kept_and_explained(
    recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    path = recipe(
        stages=stages(
            {"size_ratio": 0.6},
            overrides={"layers.1.ffn.down": "dense", "layers.0.attn.[qkv]": "INT8_DYNAMIC"},
        )
    )
    code, out, err = command("plan", path, "--json")
    assert code == 0, err
    planned = {stage["kind"]: stage for stage in json.loads(out)["stages"]}
    assert any(
        "size_ratio 0.6" in note and "W4A16_G128, FP8_STATIC, W8A16, dense" in note
        for note in planned["quantize"]["notes"]
    )
    code, out, err = command("run", path, "--run-dir", work / "run", "--json")
    assert code == 0, err
    quantized, exported = (
        open_artifact(work / "run" / "artifacts" / name) for name in ("quantize", "export")
    )
    mixed = quantized.manifest.facts["mixed"]
    assert exported.manifest.scheme is not None
    scheme = ModelScheme.from_json(exported.manifest.scheme)
    opened = open_checkpoint(exported.path)
    dense_bytes = 2 * opened.arch.num_linear_params
    assert len(mixed["units"]) == NUM_LAYERS * len(LINEAR_GROUPS)
    spent = 0
    for row in mixed["units"]:
        linears = [f"layers.{row['layer']}.{linear}" for linear in LINEAR_GROUPS[row["projection"]].linears]
        expected = SCHEMES.get(row["scheme"])
        assert all(scheme.for_linear(linear) == opened.schemes.get(linear) == expected for linear in linears)
        spent += row["bytes"][row["scheme"]]
    assert scheme.for_linear("layers.1.ffn.down") is None
    assert scheme.for_linear("layers.0.attn.q") == SCHEMES["INT8_DYNAMIC"]
    assert mixed["chosen"]["cost"] == pytest.approx(spent / dense_bytes, abs=1e-6)
    assert spent <= 0.6 * dense_bytes
    on_disk = sum(file.size_bytes for file in exported.manifest.files if file.path.endswith(".safetensors"))
    assert on_disk < planned["export"]["disk_bytes"] * 1.02
    assert all(row["kl"][name] > 0 for row in mixed["units"] for name in row["kl"] if name != "dense")
    assert mixed["chosen"]["kl"] <= mixed["uniform"]["W4A16_G128"]["kl"]
    page = (work / "run" / "evidence" / "report.html").read_text()
    assert "Why these schemes" in page
    assert 'class="plot mixed"' in page
    assert "W4A16_G128 everywhere" in page
    report = json.loads((work / "run" / "evidence" / "report.json").read_text())
    assert report["mixed"] == mixed
    code, out, err = command("resume", work / "run", "--json")
    assert code == 0, err
    assert all(stage["cached"] for stage in json.loads(out)["stages"])
    code, out, _ = command("inspect", quantized.path)
    assert code == 0
    assert "size_ratio 0.6" in out
    assert '"units"' not in out


@pytest.mark.parametrize("budget", [{"size_gb": 0.0008}, {"size_ratio": 0.6}])
def test_a_budget_of_a_float32_model_counts_the_bytes_that_are_written(
    budget: dict[str, float], recipe: Callable[..., Path], command: Command, work: Path, model_dir: Path
) -> None:
    wide = work / "float32"
    shutil.copytree(model_dir, wide)
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    tensors = {name: each.float() for name, each in load_file(wide / "model.safetensors").items()}
    save_file(tensors, wide / "model.safetensors")
    path = recipe(stages=stages(budget, schemes=["W4A16_G128", "W8A16", "dense"])[:-1], model=str(wide))
    planned = json.loads(command("plan", path, "--json")[1])["stages"]
    code, _, err = command("run", path, "--run-dir", work / "run")
    assert code == 0, err
    exported = work / "run" / "artifacts" / "export"
    sizes = {name: each.nbytes for name, each in load_file(exported / "model.safetensors").items()}
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    linears = sum(size for name, size in sizes.items() if "_proj." in name and "weight_shape" not in name)
    allowed = open_checkpoint(exported).arch.num_linear_params * 2 * 0.6
    if "size_gb" in budget:
        allowed = 800_000 - sizes["model.embed_tokens.weight"]
    assert 0.9 * allowed < linears <= allowed
    (export,) = [stage for stage in planned if stage["kind"] == "export"]
    assert linears + sizes["model.embed_tokens.weight"] <= export["disk_bytes"] + norms


@pytest.mark.slow
def test_a_cut_run_chooses_again_what_it_had_chosen(
    recipe: Callable[..., Path], command: Command, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(stages=stages({"size_ratio": 0.6})[:2])
    assert command("run", path, "--workspace", work / "a", "--run-dir", work / "a-run")[0] == 0

    def cut(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr("compress.stages.quantize.layers.run_sequential", cut)
        assert command("run", path, "--workspace", work / "b", "--run-dir", work / "b-run")[0] != 0

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("sensitivities are measured once")

    monkeypatch.setattr("compress.stages.budget.choose.visit_gradients", never)
    assert command("run", path, "--workspace", work / "b", "--run-dir", work / "b-run")[0] == 0
    assert (
        len({open_artifact(work / run / "artifacts" / "quantize").digest for run in ("a-run", "b-run")}) == 1
    )


@pytest.mark.parametrize(
    "budget", [{"latency_ratio": 0.999, "device": "NVIDIA H200"}, {"latency_us": 1e6, "rows": 4}]
)
@pytest.mark.one_in(3)
def test_a_budget_of_time_counts_the_kernels_of_the_device(
    budget: dict[str, Any], recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    path = recipe(stages=stages(budget, schemes=["W4A16_G128", "FP8_DYNAMIC"]))
    code, _, err = command("run", path, "--run-dir", work / "run")
    assert code == 0, err
    mixed = open_artifact(work / "run" / "artifacts" / "quantize").manifest.facts["mixed"]
    assert mixed["times_from"] == (["bytes"] if "device" in budget else ["measured"])
    assert all(us > 0 for row in mixed["units"] for us in row["us"].values())
    assert mixed["chosen"]["cost"] <= mixed["limit"]
    assert "µs" in (work / "run" / "evidence" / "report.html").read_text()


@pytest.mark.parametrize(
    ("budget", "changes", "message"),
    [
        ({"size_ratio": 0.2}, {}, r"cost 0\.2\d+ of what they do in 16 bits, and 0\.200 is allowed"),
        ({"size_gb": 0.00001}, {}, r"cost 0\.2\d+ .* and 0\.000 is allowed \(0\.000 GB go to embedding"),
        (
            {"latency_ratio": 0.5, "device": "NVIDIA H200"},
            {},
            r"cost 0\.9\d+ of what they do in 16 bits, and 0\.500 is",
        ),
        ({"size_ratio": 0.5, "latency_us": 1}, {}, "size_ratio and latency_us are given"),
        ({}, {}, "none is given"),
        ({"size_gb": 1, "rows": 4}, {}, "size_gb is a budget of bytes"),
        ({"latency_us": 1, "device": "NVIDIA H20"}, {}, "Did you mean 'NVIDIA H200'"),
        (
            {"size_ratio": 0.5},
            {"overrides": {"*.ffn.up": "dense"}},
            r"layers\.0\.ffn\.gate, layers\.0\.ffn\.up read one input",
        ),
        ({"size_ratio": 0.5}, {"schemes": ["dense", "W4A16_G12"]}, "unknown scheme 'W4A16_G12'"),
        ({"size_ratio": 0.5}, {"schemes": ["W8A16"]}, "two or more"),
        ({"size_ratio": 0.5}, {"form": "gptq"}, r"\[weight-only\]"),
        ({"size_ratio": 0.5}, {"form": "awq", "schemes": ["W4A16_G128", "W4A16_G32"]}, r"\[one-scheme\]"),
    ],
)
def test_what_cannot_be_chosen_is_refused_by_the_plan(
    budget: dict[str, Any],
    changes: dict[str, Any],
    message: str,
    recipe: Callable[..., Path],
    command: Command,
) -> None:
    code, _, err = command("plan", recipe(stages=stages(budget, **changes)))
    assert code == 2
    assert re.search(message, err), err


def test_a_packed_format_takes_what_mixes_one_scheme_with_dense_linears(
    recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    path = recipe(stages=stages({"size_gb": 0.00085}, schemes=["W4A16_G128", "dense"], form="gptq")[:-1])
    code, _, err = command("run", path, "--run-dir", work / "run")
    assert code == 0, err
    exported = open_artifact(work / "run" / "artifacts" / "export")
    assert exported.size_bytes < 1.1e6
    assert 0 < len(open_checkpoint(exported.path).schemes) < 7 * NUM_LAYERS
