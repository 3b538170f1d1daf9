"""Resume points: they come back as they were written, or not at all."""

from pathlib import Path

import pytest
import torch

from compress.artifact.resume import ResumePoint, are_whole, digests
from compress.artifact.tensors import save_tensors
from compress.errors import StorageError

VALUE = {"rows": [{"name": "é", "loss": 0.1}, None], "done": True}
TENSORS = {
    "a": torch.arange(6, dtype=torch.int32).reshape(2, 3),
    "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
}


@pytest.fixture
def told() -> list[str]:
    return []


def test_a_value_and_tensors_come_back(tmp_path: Path, told: list[str]) -> None:
    point = ResumePoint(tmp_path / "a.json", told.append)
    assert point.load() is None
    point.save([1])
    point.save(VALUE)
    assert point.load() == VALUE
    tensors = ResumePoint(tmp_path / "a.safetensors", told.append)
    assert tensors.load_tensors() is None
    with pytest.raises(StorageError, match=r"a\.safetensors was changed"):
        tensors.saved_tensors()
    tensors.save_tensors(TENSORS)
    for found in (tensors.load_tensors(), tensors.saved_tensors()):
        assert found is not None
        assert found.keys() == TENSORS.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert told == []


def test_any_changed_bit_counts_as_not_there_and_is_told(tmp_path: Path, told: list[str]) -> None:
    value = tmp_path / "a.json"
    tensors = tmp_path / "a.safetensors"
    ResumePoint(value, told.append).save(VALUE)
    ResumePoint(tensors, told.append).save_tensors(TENSORS)
    for path in (value, tensors):
        whole = path.read_bytes()
        for position in range(len(whole)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
            point = ResumePoint(path, told.append)
            found = point.load() if path == value else point.load_tensors()
            assert found is None or found == VALUE or set(found) == set(TENSORS), position
            if found is None:
                assert told.pop() == f"{path} is damaged; this part of the stage is computed again"
            elif path == tensors:  # padding and the names of keys in the header's metadata hold nothing
                assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"digest": 1, "value": 1}', b"\xff", b"[" * 9999])
def test_what_is_no_resume_point_counts_as_not_there(content: bytes, tmp_path: Path, told: list[str]) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    assert ResumePoint(path, told.append).load() is None
    assert ResumePoint(path, told.append).load_tensors() is None
    assert len(told) == 2
    save_tensors(path, TENSORS)
    assert ResumePoint(path, told.append).load_tensors() is None


def test_files_that_a_point_vouches_for(tmp_path: Path, told: list[str]) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)
    stated = digests(tmp_path, "ab")
    assert are_whole(tmp_path, stated, told.append)
    (tmp_path / "b").write_text("c")
    assert not are_whole(tmp_path, stated, told.append)
    assert told == [f"{tmp_path / 'b'} is damaged; this part of the stage is computed again"]
    (tmp_path / "a").unlink()
    assert not are_whole(tmp_path, stated, told.append)
    assert len(told) == 1
