"""The parts of a key: they are the key, and two keys differ where their parts do."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.artifact.key_parts import KeyParts
from compress.artifact.workspace import Workspace
from compress.errors import StorageError

LEAVES = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | st.sampled_from(["", "a", "1"])
SPECS = st.dictionaries(
    st.sampled_from("abc"), LEAVES | st.dictionaries(st.sampled_from("xy"), LEAVES), max_size=3
)
DIGESTS = st.dictionaries(st.sampled_from(["source", "dense"]), st.sampled_from(["sha256:a", "sha256:b"]))
PARTS = st.builds(
    KeyParts,
    stage=st.just("quantize"),
    version=st.integers(1, 2),
    spec=SPECS,
    inputs=DIGESTS,
    seed=st.integers(0, 1),
    extra=DIGESTS,
    machine=st.sampled_from(["", "x86"]),
)


@given(PARTS)
def test_parts_are_read_back_by_their_key(parts: KeyParts) -> None:
    assert KeyParts.from_bytes(parts.to_bytes(), parts.key) == parts


@given(PARTS, PARTS)
def test_keys_are_equal_where_no_part_differs(ours: KeyParts, theirs: KeyParts) -> None:
    if ours.key == theirs.key:
        assert ours.differences(theirs) == ()
    else:
        assert len(ours.differences(theirs)) == len(theirs.differences(ours)) > 0


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"version": 4}, "stage version (4, was 3)"),
        ({"seed": 1}, "seed (1, was 0)"),
        ({"spec": {"scheme": {"group_size": 64}, "head": None}}, "scheme.group_size (64, was 128)"),
        ({"spec": {"scheme": {"group_size": 128}}}, "head (left out, was null)"),
        ({"inputs": {"source": "sha256:bb"}}, "input source"),
        ({"extra": {"data": "sha256:bb"}}, "content of data"),
        ({"machine": "cuda_sm90"}, "kind of machine (cuda_sm90, was x86)"),
    ],
)
def test_each_part_that_differs_is_named(change: dict[str, Any], phrase: str) -> None:
    spec = {"scheme": {"group_size": 128}, "head": None}
    before = KeyParts("quantize", 3, spec, {"source": "sha256:aa"}, 0, {"data": "sha256:aa"}, "x86")
    assert replace(before, **change).differences(before) == (phrase,)


def test_parts_of_another_key_are_refused() -> None:
    parts = KeyParts("quantize", 1, {}, {}, 0)
    other = replace(parts, seed=1)
    with pytest.raises(StorageError, match="another digest"):
        KeyParts.from_bytes(other.to_bytes(), parts.key)
    with pytest.raises(StorageError, match="another digest"):
        KeyParts.from_bytes(parts.to_bytes() + b" ", parts.key)


def test_a_damaged_file_of_parts_counts_as_none_and_is_written_again(tmp_path: Any) -> None:
    workspace = Workspace(tmp_path)
    parts = KeyParts("quantize", 1, {"a": 1}, {}, 0, {}, "x86")
    workspace.describe_key(parts)
    assert workspace.parts_of(parts.key) == parts
    (file,) = (tmp_path / "parts").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert workspace.parts_of(parts.key) is None
    workspace.describe_key(parts)
    assert workspace.parts_of(parts.key) == parts
