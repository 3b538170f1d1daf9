"""A file that is written a tensor at a time has the bytes of one that is written at once."""

from pathlib import Path

import pytest
import torch

from compress.artifact.tensor_stream import Form, tensor_stream
from compress.artifact.tensors import DTYPES, load_tensors, save_tensors
from compress.errors import UnsupportedFormat


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}
    for name, dtype in DTYPES.items():
        bits = torch.randint(0, 2, (3, 16), generator=generator, dtype=torch.uint8)
        found[f"b.{name}"] = bits.view(dtype)
    return found


def forms(of: dict[str, torch.Tensor]) -> dict[str, Form]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in of.items()}


def test_bytes_do_not_depend_on_the_order_of_writing(tmp_path: Path) -> None:
    given = tensors()
    save_tensors(tmp_path / "whole.safetensors", given)
    for number, names in enumerate((list(given), list(reversed(given)))):
        path = tmp_path / f"{number}.safetensors"
        with tensor_stream(path, forms(given)) as stream:
            for name in names:
                stream.write(name, given[name])
        assert path.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert torch.equal(load_tensors(path)["scalar"], given["scalar"])


def test_a_tensor_that_is_missing_or_another_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    stated = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
    with pytest.raises(ValueError, match="'b' was stated and not written"):  # noqa: SIM117
        with tensor_stream(path, stated) as stream:
            stream.write("a", torch.zeros(2))
    for wrong in (torch.zeros(3), torch.zeros(2, dtype=torch.float16)):
        with pytest.raises(ValueError, match="stated as"), tensor_stream(path, stated) as stream:
            stream.write("a", wrong)
    with pytest.raises(ValueError, match="stated as None"), tensor_stream(path, stated) as stream:
        stream.write("c", torch.zeros(2))
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_without_a_place_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UnsupportedFormat, match="'a' has dtype"),
        tensor_stream(tmp_path / "x.safetensors", {"a": (torch.complex128, (2,))}),
    ):
        pass
