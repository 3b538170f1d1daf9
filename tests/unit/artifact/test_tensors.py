"""Tensor files against the safetensors library: equal bytes when writing, equal tensors when reading."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.artifact.tensors import DTYPES, INDEX_NAME, ShardWriter, TensorFiles, load_tensors, save_tensors
from compress.errors import StorageError, UnsupportedFormat, UsageError


def _every_dtype() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), 'quote"größe': torch.ones(1)}
    for name, dtype in DTYPES.items():
        high = 2 if dtype == torch.bool else 256
        tensors[f"z.{name}"] = torch.randint(0, high, (3, 16), generator=generator, dtype=torch.uint8).view(
            dtype
        )
        tensors[f"a.{name}"] = torch.randint(0, high, (8,), generator=generator, dtype=torch.uint8).view(
            dtype
        )
    return tensors


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*bits)


def test_bytes_equal_those_of_the_reference_implementation(tmp_path: Path) -> None:
    tensors = _every_dtype()
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    save_tensors(tmp_path / "ours.safetensors", dict(reversed(tensors.items())))
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_views_ties_and_transposes_are_written_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"base": base, "tied": base, "rows": base[1:], "transposed": base.T, "step": base[:, ::2]}
    save_tensors(tmp_path / "x.safetensors", tensors)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(_same_bits(loaded[name], tensors[name]) for name in tensors)


def test_reading_agrees_with_the_reference_implementation(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(_every_dtype(), path)
    theirs = load_file(path)
    for source in (path, tmp_path):
        ours = load_tensors(source)
        assert ours.keys() == theirs.keys()
        assert all(_same_bits(ours[name], theirs[name]) for name in theirs)
    files = TensorFiles(path)
    assert all(
        (files.shape(name), files.dtype(name)) == (tuple(theirs[name].shape), theirs[name].dtype)
        for name in theirs
    )
    assert load_tensors(path, ["scalar"]).keys() == {"scalar"}


def test_a_tensor_that_was_read_can_be_changed_without_changing_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_tensors(path, {"w": torch.zeros(4)})
    load_tensors(path)["w"].fill_(7)
    assert torch.equal(load_tensors(path)["w"], torch.zeros(4))


def test_an_unwritable_dtype_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_tensors(path, {"w": torch.zeros(4)})
    with pytest.raises(UnsupportedFormat, match="'q'"):
        save_tensors(path, {"q": torch.zeros(4, dtype=torch.complex128)})
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_tensors(path).keys() == {"w"}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_by_name_and_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not even a pickle")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UnsupportedFormat, match=rf"{name} is a pickle.*save_pretrained"):
            TensorFiles(path)


def test_a_pointer_of_git_lfs_is_not_called_another_format(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")
    with pytest.raises(StorageError, match=r"model\.safetensors is a Git LFS pointer.*`git lfs pull`"):
        TensorFiles(tmp_path).names()


def test_a_pickle_beside_safetensors_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    save_tensors(tmp_path / "model.safetensors", {"w": torch.zeros(1)})
    assert TensorFiles(tmp_path).names() == ["w"]


def test_shards_hold_every_tensor_once_within_the_limit(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.full((10 + i,), float(i)) for i in range(20)} | {"huge": torch.ones(500)}
    writer = ShardWriter(tmp_path, max_shard_bytes=256)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    written = writer.finish()
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in written}
    index = json.loads((tmp_path / INDEX_NAME).read_bytes())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    seen: dict[str, torch.Tensor] = {}
    for path in written[:-1]:
        shard = load_file(path)
        assert sum(tensor.nbytes for tensor in shard.values()) <= 256 or len(shard) == 1
        assert all(index["weight_map"][name] == path.name for name in shard)
        assert not seen.keys() & shard.keys()
        seen |= shard
    assert seen.keys() == tensors.keys()
    assert all(_same_bits(tensor, seen[name]) for name, tensor in load_tensors(tmp_path).items())


def test_one_shard_has_the_plain_name_and_a_copy_of_what_was_added(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    tensor = torch.ones(3)
    writer.add("w", tensor)
    tensor.zero_()
    assert writer.finish() == [tmp_path / "model.safetensors"]
    assert torch.equal(load_tensors(tmp_path)["w"], torch.ones(3))


def test_what_a_pipeline_asks_for_wrongly_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint"):
        TensorFiles(tmp_path / "absent")
    with pytest.raises(UnsupportedFormat, match="no safetensors"):
        TensorFiles(tmp_path)
    save_tensors(tmp_path / "model.safetensors", {"weight": torch.zeros(1)})
    with pytest.raises(UsageError, match="Did you mean 'weight'"):
        load_tensors(tmp_path, ["wieght"])


@pytest.mark.parametrize(
    ("weight_map", "error"),
    [
        ({"w": "../model.safetensors"}, UnsupportedFormat),
        ({"w": "weights.bin"}, UnsupportedFormat),
        ({"w": "model-00002-of-00002.safetensors"}, StorageError),
        ({"v": "model-00001-of-00001.safetensors"}, StorageError),
        (["w"], UnsupportedFormat),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, weight_map, error) -> None:
    save_tensors(tmp_path / "model-00001-of-00001.safetensors", {"w": torch.zeros(1)})
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(error):
        TensorFiles(tmp_path)


def test_a_tensor_in_a_shard_counts_though_the_index_leaves_it_out(tmp_path: Path) -> None:
    """It is what `transformers` loads: all tensors of the files that the index names."""
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    save_tensors(tmp_path / shards[0], {"w": torch.ones(1), "left_out": torch.full((1,), 3.0)})
    save_tensors(tmp_path / shards[1], {"v": torch.zeros(1), "w": torch.zeros(1)})
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"w": shards[0], "v": shards[1]}}))
    found = load_tensors(tmp_path)
    assert {name: float(tensor) for name, tensor in found.items()} == {"left_out": 3, "v": 0, "w": 1}
    save_tensors(tmp_path / shards[1], {"v": torch.zeros(1), "left_out": torch.zeros(1)})
    with pytest.raises(UnsupportedFormat, match=r"'left_out' in .*00001.* and in .*00002"):
        TensorFiles(tmp_path)


def test_the_index_of_an_earlier_save_does_not_matter(tmp_path: Path) -> None:
    """`transformers` removes the shards of an earlier save and leaves their index."""
    shard = tmp_path / "model-00001-of-00001.safetensors"
    save_tensors(tmp_path / "model.safetensors", {"w": torch.ones(1)})
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"w": shard.name}}))
    assert torch.equal(load_tensors(tmp_path)["w"], torch.ones(1))
    save_tensors(shard, {"w": torch.zeros(1)})
    with pytest.raises(UnsupportedFormat, match="Remove the one that is out of date"):
        TensorFiles(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    assert torch.equal(load_tensors(tmp_path)["w"], torch.ones(1))


def test_a_numbered_shard_that_is_absent_is_named_without_an_index(tmp_path: Path) -> None:
    for number in (1, 3):
        save_tensors(tmp_path / f"model-{number:05d}-of-00003.safetensors", {f"w{number}": torch.ones(1)})
    with pytest.raises(StorageError, match=r"lacks the shard 'model-00002-of-00003\.safetensors'"):
        TensorFiles(tmp_path)
    save_tensors(tmp_path / "model-00002-of-00003.safetensors", {"w2": torch.ones(1)})
    assert TensorFiles(tmp_path).names() == ["w1", "w2", "w3"]
