"""Out of memory: what gives way, in which order, and that no bit of the result knows of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import compress.calibrate.observe as observe
import compress.calibrate.sequential as sequential
from compress.calibrate.layer_run import LayerRun
from compress.calibrate.samples import Samples
from compress.context import Context
from compress.errors import EnvironmentUnfit
from compress.methods.quantize.descent import Descent
from compress.methods.quantize.gptq import Gptq
from compress.quant.scheme import SCHEMES
from compress.stages.quantize.layers import quantization_passes
from compress.stages.quantize.spec import Quantize
from tests.support.tiny_decoder import QWEN3, tiny_arch, tiny_source, tiny_tokens

SPECS = {
    "at once": Quantize.model_validate(
        {"scheme": "W8A16", "smooth": {"kind": "awq", "num_ratios": 3}, "preset": "balanced"}
    ),
    "in turn": Quantize.model_validate({"scheme": "W8A16", "preset": "balanced"}),
}


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, done: int, total: int, note: str) -> None: ...

    def log(self, text: str) -> None:
        self.lines.append(text)


def run(out: Path, how: str) -> tuple[dict[str, bytes], list[str]]:
    out.mkdir()
    spec = SPECS[how]
    source = tiny_source(tiny_arch(QWEN3, dtype="bfloat16"))
    said = Said()
    sequential.run_sequential(
        source,
        tiny_tokens(source.arch, 5, 13),
        sequential.Compression(
            quantization_passes(spec, SCHEMES["W8A16"], torch.bfloat16),
            scheme=SCHEMES["W8A16"],
            true_sequential=spec.true_sequential,
        ),
        out,
        Context("cpu", 0, out, said),
        compute_dtype=torch.float32,
    )
    return {path.name: path.read_bytes() for path in out.iterdir()}, said.lines


def failing(work: Callable[..., Any], when: Callable[[int, tuple[Any, ...]], bool]) -> Callable[..., Any]:
    """`work` that runs out of memory in the calls that `when` picks by their number and arguments."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if when(calls, args):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nAnd more.")
        return work(*args, **kwargs)

    return call


@pytest.fixture(scope="module", params=SPECS)
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed(how: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    files, said = run(tmp_path_factory.mktemp("room") / "undisturbed", how)
    assert said == []
    return files


@pytest.mark.parametrize("call", [1, 3, 8])  # observing the first sample or a later one, replaying
def test_activations_give_way_first(
    call: int, how: str, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "forward", failing(observe.forward, lambda number, args: number == call))
    files, said = run(tmp_path / "out", how)
    assert files == undisturbed
    assert len(said) == 1
    assert "activations go to host memory" in said[0]


@pytest.mark.parametrize(("owner", "method"), [(Gptq, "round"), (Descent, "refine")])
def test_stacked_linears_are_rounded_one_by_one_when_activations_do_not_suffice(
    owner: type,
    method: str,
    how: str,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    largest = tiny_arch(QWEN3).layers[0].intermediate_size
    monkeypatch.setattr(
        owner, method, failing(getattr(owner, method), lambda number, args: args[1].shape[0] > largest)
    )
    files, said = run(tmp_path / "out", how)
    assert files == undisturbed
    assert ["host memory" in line for line in said] == [True] + [False] * (len(said) - 1)
    assert said[1:] == [
        f"out of memory rounding {names}: one linear at a time"
        for _ in range(3)
        for names in ("attn.q, attn.k, attn.v", "ffn.gate, ffn.up")
    ]


def test_when_nothing_is_left_to_give_way_the_error_says_what_to_do(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "forward", failing(observe.forward, lambda number, args: True))
    with pytest.raises(
        EnvironmentUnfit, match=r"observing a layer.*Tried to allocate 2 GiB\.\).*resumes"
    ) as stopped:
        run(tmp_path / "out", how)
    assert stopped.value.exit_code == 4
    assert "\n" not in str(stopped.value)


def test_what_is_replayed_already_is_not_replayed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = LayerRun.on_one_rank(torch.zeros(4, 2, 3))
    monkeypatch.setattr(
        observe, "forward", failing(lambda layer, x_1SD, tap, _: x_1SD + 1, lambda number, args: number == 3)
    )
    observe.replay_(None, run.samples, run)  # type: ignore[arg-type]
    assert run.samples.on_host
    assert torch.equal(run.samples[0:4], torch.ones(4, 2, 3))


def test_activations_for_which_a_device_has_no_room_start_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            raise torch.OutOfMemoryError("no room")
        return plain(*size, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    samples = Samples((2, 3, 4), torch.float32, torch.device("cpu"))
    samples[1:2] = torch.full((1, 3, 4), 7.0)
    assert samples.on_host
    assert not samples.move_to_host()
    assert torch.equal(samples[1:2], torch.full((1, 3, 4), 7.0))
