"""The survey of shapes: which are chosen, what they are cut to, and what its file keeps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from compress.models.arch import Arch
from compress.models.known import known_config
from scripts import bench_shapes
from scripts.bench_setup import read_arch

CONFIGS = Path(__file__).parents[2] / "golden" / "configs"


def arch(name: str) -> Arch:
    assert known_config(name)
    return read_arch(name)[1]


def test_one_shape_of_each_kind_is_chosen_and_the_typical_one() -> None:
    names = ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "gemma-3-12b")
    archs = {name: arch(name) for name in names}
    assert list(bench_shapes.chosen(archs)) == ["gemma-3-12b", "llama-3.1-8b", "llama-3.2-1b", "qwen3-8b"]


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "gemma-3-12b", "qwen3.5-35b-a3b", "nemotron-3-nano-30b-a3b"]
)
def test_a_shape_is_cut_to_one_layer_of_each_kind_at_least(name: str) -> None:
    whole = arch(name)
    few = bench_shapes.cut(whole, layers=2, params=1e12)
    assert few.layers == whole.layers[: few.num_layers]
    kinds = {bench_shapes.kind_of_layer(layer) for layer in whole.layers}
    assert {bench_shapes.kind_of_layer(layer) for layer in few.layers} == kinds
    assert few.num_layers >= 2
    assert few.vocab_size == bench_shapes.VOCAB


def test_where_the_first_layers_have_too_many_parameters_one_of_each_kind_is_left() -> None:
    whole = arch("deepseek-v2-lite")
    dense, experts = whole.layers[0], whole.layers[1]
    two = replace(whole, layers=(dense, dense, dense, *whole.layers[1:4]))
    limit = replace(two, layers=(dense, experts)).num_linear_params
    assert bench_shapes.cut(two, layers=8, params=limit).layers == (dense, experts)
    assert bench_shapes.cut(two, layers=8, params=limit - 1).layers == (dense, dense, dense)
    assert bench_shapes.cut(two, layers=8, params=1).layers == (dense,)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("llama-3.1-8b", "W4A16_G128"), ("gpt-oss-20b", "W4A16_G64"), ("phi-4", "W4A16_G128")],
)
def test_groups_are_the_largest_that_divide_all_inputs(name: str, scheme: str) -> None:
    assert bench_shapes.scheme_for(arch(name), "W4A16") == scheme
    assert bench_shapes.scheme_for(arch(name), "FP8_DYNAMIC") == "FP8_DYNAMIC"


def test_rows_of_other_shapes_stay_with_the_run_that_measured_them(tmp_path: Path) -> None:
    def document(commit: str, *shapes: str, refused: str | None = None) -> dict[str, object]:
        rows = [
            {"shape": shape, "scheme": "W4A16_G128"} | ({"refused": refused} if refused else {})
            for shape in shapes
        ]
        return {"commit": commit, "command": "python", "date": "2026-11-30", "rows": rows}

    def written(name: str, new: dict[str, object], kept: Path | None) -> list[tuple[str, str]]:
        bench_shapes.write_together(tmp_path / name, new, kept)
        rows = json.loads((tmp_path / name).read_text())["rows"]
        return [(row["shape"], row["commit"]) for row in rows]

    assert written("first", document("1", "a", "b", "c"), None) == [("a", "1"), ("b", "1"), ("c", "1")]
    second = written("second", document("2", "b", "d"), tmp_path / "first")
    assert second == [("a", "1"), ("c", "1"), ("b", "2"), ("d", "2")]
    late = document("3", "a", "e", refused=bench_shapes.NO_TIME)
    assert written("third", late, tmp_path / "second") == [*second, ("e", "3")]


@pytest.mark.slow
def test_shapes_are_measured_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = known_config("llama-3.2-1b") | {
        "hidden_size": 128,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "max_position_embeddings": 512,
        "rope_scaling": None,
    }
    unread = {"name": "unread", "config": config, "refused": "is not read"}
    (tmp_path / "rows.json").write_text(json.dumps([{"name": "small", "config": config}, unread]))
    out = tmp_path / "out.json"
    sizes = ["--layers", "1", "--batch-sizes", "1", "2", "--ttft-tokens", "2048"]
    argv = [str(tmp_path / "rows.json"), *sizes, "--schemes", "W4A16", "W2A4", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["bench_shapes", *argv])
    bench_shapes.main()
    rows = json.loads(out.read_text())["rows"]
    (refused,) = [row for row in rows if "refused" in row]
    measured = [row for row in rows if "refused" not in row]
    assert [(row["shape"], row["scheme"], row["batch_size"]) for row in measured] == [
        ("small", "W4A16_G128", 1),
        ("small", "W4A16_G128", 2),
    ]
    assert measured[0]["ttft_tokens"] == 512 - bench_shapes.OUTPUT_TOKENS
    assert measured[0]["ttft_ms_p50"] > 0
    assert measured[0]["floor_ms"] < measured[1]["floor_ms"]
    assert all(row["step_ms_p10"] <= row["step_ms_p50"] <= row["step_ms_p90"] for row in measured)
    assert "W2A4" in refused["refused"]
    assert "small (W2A4)" in capsys.readouterr().out
