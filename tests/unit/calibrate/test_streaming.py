"""Layers are read ahead and written behind: never more than one of each, and no error is lost in a thread."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import compress.calibrate.sequential as sequential
from compress.artifact.tensors import load_tensors, save_tensors
from compress.calibrate.streaming import LayerPrefetcher, LayerWriter
from compress.context import Context
from compress.errors import StorageError
from compress.models.weights import Weights, WeightSource
from compress.quant.scheme import SCHEMES
from compress.stages.quantize.layers import quantization_passes
from compress.stages.quantize.spec import Quantize
from tests.support.tiny_decoder import QWEN3, tiny_arch, tiny_source, tiny_tokens

CPU = torch.device("cpu")


def test_the_next_layer_is_read_while_this_one_is_worked_on() -> None:
    read: list[int] = []
    reached = threading.Event()

    def load(idx: int) -> Weights:
        read.append(idx)
        if idx == 1:
            reached.set()
        return {"w": torch.full((1,), float(idx))}

    with LayerPrefetcher(load, CPU) as layers:
        assert float(layers.take(0)["w"]) == 0  # type: ignore[arg-type]
        layers.start(1)
        assert reached.wait(10)
        layers.start(1)
        assert read == [0, 1]
        assert float(layers.take(1)["w"]) == 1  # type: ignore[arg-type]
        assert read == [0, 1]


def test_one_file_at_a_time_is_written() -> None:
    free = threading.Event()
    order = list[str]()

    def slow() -> None:
        free.wait(10)
        order.append("first")

    with LayerWriter() as disk:
        disk.write(slow)
        threading.Timer(0.05, free.set).start()
        disk.write(lambda: order.append("second"))
        assert order[0] == "first"
        disk.wait()
    assert order == ["first", "second"]


def test_two_files_at_a_time_are_written_and_no_third_begins_before_the_first_is_there() -> None:
    free = threading.Event()
    order = list[str]()

    def slow() -> None:
        free.wait(10)
        order.append("first")

    with LayerWriter(at_once=2) as disk:
        disk.write(slow)
        disk.write(lambda: order.append("second"))
        while not order:
            threading.Event().wait(0.001)
        threading.Timer(0.05, free.set).start()
        disk.write(lambda: order.append("third"))
        assert order[:2] == ["second", "first"]
        disk.wait()
    assert order == ["second", "first", "third"]


def test_the_first_error_of_a_file_is_raised_where_the_caller_waits() -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    with LayerWriter(at_once=2) as disk:
        disk.write(full)
        disk.write(lambda: None)
        with pytest.raises(OSError, match="No space left"):
            disk.wait()


def run(out: Path, source: WeightSource) -> Any:
    out.mkdir(exist_ok=True)
    spec = Quantize.model_validate({"scheme": "W8A16", "round": {"kind": "rtn"}})
    passes = quantization_passes(spec, SCHEMES["W8A16"], torch.bfloat16)
    tokens = tiny_tokens(source.arch, 3, 13)
    ctx = Context("cpu", 0, out)
    return sequential.run_sequential(
        source,
        tokens,
        sequential.Compression(passes, scheme=SCHEMES["W8A16"]),
        out,
        ctx,
        compute_dtype=torch.float32,
    )


def test_a_layer_that_cannot_be_read_stops_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_source(tiny_arch(QWEN3, dtype="bfloat16"))
    layer = source.layer

    def damaged(idx: int) -> Weights:
        if idx == 1:
            raise StorageError("the shard is gone.")
        return layer(idx)

    monkeypatch.setattr(source, "layer", damaged)
    with pytest.raises(StorageError, match="shard is gone"):
        run(tmp_path, source)
    assert sorted(path.name for path in tmp_path.glob("layer-*.safetensors")) == ["layer-00000.safetensors"]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_layer_that_cannot_be_written_stops_the_run_before_the_next(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = sequential.store_layer
    source = tiny_source(tiny_arch(QWEN3, dtype="bfloat16"))

    def full(out: Path, idx: int, *args: Any) -> None:
        if idx == failing:
            raise OSError(28, "No space left on device")
        store(out, idx, *args)

    monkeypatch.setattr(sequential, "store_layer", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, source)
    assert len(list(tmp_path.glob("layer-*.safetensors"))) == failing
    monkeypatch.undo()
    run(tmp_path, source)
    run(tmp_path / "undisturbed", source)
    for path in (tmp_path / "undisturbed").iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_a_file_that_became_shorter_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    from compress.artifact.tensors import TensorFiles

    path = tmp_path / "model.safetensors"
    save_tensors(path, {"w": torch.zeros(1000)})
    files = TensorFiles(path)
    with path.open("r+b") as stream:
        stream.truncate(2000)
    with pytest.raises(StorageError, match="shorter"):
        files.get("w")
    with pytest.raises(StorageError, match="truncated"):
        load_tensors(path)
