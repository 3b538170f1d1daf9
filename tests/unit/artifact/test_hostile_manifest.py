"""Manifests whose fields have other types than readers index into: each is refused in one sentence, and
`inspect` shows every manifest that is not.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.manifest import MANIFEST_NAME, FileRecord, Manifest, TensorRecord, open_artifact
from compress.cli.inspect import as_text, describe
from compress.digest import canonical_json
from compress.errors import CompressError
from tests.support.hostile import make_fifo, refusal

DIGEST = f"sha256:{'a' * 64}"
ANY: tuple[Any, ...] = (None, "x", 3, -1, True, 0.5, [], [3], {}, {"a": 3}, [{"a": 3}], 10**30)
FILE = {"path": "model.safetensors", "size_bytes": 4, "digest": DIGEST}
TENSOR = {"name": "w", "dtype": "F32", "shape": [1], "file": "model.safetensors", "digest": DIGEST}
LAYER = {"num_heads": 4, "rope": {"kind": "default", "theta": 10000.0}}
SCHEME = {
    "name": "W8A16",
    "head": {"name": "W8A16"},
    "exceptions": [{"scheme": None, "linears": ["layers.0.attn.q"]}],
}
FACTS = {
    "format": "gptq",
    "kv_cache": {"format": "FP8_STATIC"},
    "draft": {"kind": "eagle3"},
    "mixed": {"budget": 1},
    "gates": [{"name": "kl"}],
    "warnings": ["slow"],
}
PROVENANCE = {"stage": "quantize", "key": "k", "parents": {"source": DIGEST}}
DEEP = [
    *(("files", [FILE | {name: value}]) for name in FILE for value in ANY),
    *(("tensors", [TENSOR | {name: value}]) for name in TENSOR for value in ANY),
    *(("layers", [LAYER | {"rope": value}]) for value in ANY if value is not None),
    *(("layers", [{"rope": LAYER["rope"] | {name: value}}]) for name in ("kind", "theta") for value in ANY),
    *(("scheme", SCHEME | {name: value}) for name in SCHEME for value in ANY),
    *(
        ("scheme", {"exceptions": [SCHEME["exceptions"][0] | {name: value}]})
        for name in ("scheme", "linears")
        for value in ANY
    ),
    *(("facts", FACTS | {name: value}) for name in FACTS for value in ANY),
    *(("facts", {"kv_cache": {"format": value}}) for value in ANY),
    *(("facts", {"draft": {"kind": value}}) for value in ANY),
    *(("provenance", PROVENANCE | {name: value}) for name in PROVENANCE for value in ANY),
    *(("provenance", {"parents": {"source": value}}) for value in ANY),
]
REFUSED = [
    ("files", [{"path": "../x", "size_bytes": 1, "digest": DIGEST}]),
    ("files", [FILE | {"path": "a\x1b[2Jb"}]),
    ("files", [FILE | {"path": "a\u202eb"}]),
    ("files", [FILE | {"path": "a\u009bb"}]),
    ("files", [FILE | {"size_bytes": True}]),
    ("files", [FILE | {"size_bytes": -1}]),
    ("files", [FILE | {"digest": "sha256:A"}]),
    ("files", [FILE | {"more": 1}]),
    ("tensors", [TENSOR | {"dtype": "F31"}]),
    ("tensors", [TENSOR | {"shape": [2**63]}]),
    ("tensors", [TENSOR | {"shape": [True]}]),
    ("layers", [LAYER | {"rope": {"kind": "default"}}]),
    ("scheme", {"exceptions": [{"linears": 3}]}),
    ("facts", {"mixed": 3}),
    ("facts", {"warnings": [3]}),
    ("facts", {"kv_cache": {"format": 3}}),
    ("provenance", {"parents": {"source": 3}}),
    ("provenance", {"stage": 3}),
    ("role", 3),
    ("schema_version", True),
    ("schema_version", 0.5),
]


def _right() -> dict[str, Any]:
    manifest = Manifest(
        "quantized",
        {"hidden_size": 4},
        (LAYER,),
        SCHEME,
        FACTS,
        PROVENANCE,
        (TensorRecord(**{**TENSOR, "shape": (1,)}),),
        (FileRecord(**FILE),),
    )
    return json.loads(manifest.to_bytes())


def _bytes(value: Mapping[str, Any]) -> bytes:
    """Return the form in which a manifest is written, so that only its types are wrong."""
    canonical = json.loads(canonical_json(value))
    return (json.dumps(canonical, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()


@pytest.mark.parametrize(("name", "value"), DEEP, ids=lambda value: repr(value)[:60])
def test_a_manifest_is_refused_or_can_be_shown(name: str, value: Any) -> None:
    data = _bytes(_right() | {name: value})
    try:
        manifest = Manifest.from_bytes(data)
    except CompressError:
        refusal(lambda: Manifest.from_bytes(data))
    else:
        json.dumps(describe(manifest, "target"))
        assert as_text(manifest, "target", list_tensors=True)


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=repr)
def test_a_field_of_another_type_is_refused(name: str, value: Any) -> None:
    assert Manifest.from_bytes(_bytes(_right())).role == "quantized"
    refusal(lambda: Manifest.from_bytes(_bytes(_right() | {name: value})), exit_codes=(5,))


@pytest.mark.parametrize("name", sorted(_right()))
@pytest.mark.parametrize("value", ANY, ids=repr)
def test_any_value_in_any_field_is_refused_or_can_be_shown(name: str, value: Any) -> None:
    test_a_manifest_is_refused_or_can_be_shown(name, value)


@pytest.mark.parametrize(
    "data",
    [b"", b"[" * 300_000, b"3", b'{"a": NaN}', b'{"a": "\\ud800"}', b'{"a": 1, "a": 1}', b"\xff"],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_json_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(data)
    assert MANIFEST_NAME in refusal(lambda: open_artifact(tmp_path), exit_codes=(5,))


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    make_fifo(tmp_path / MANIFEST_NAME)
    assert "is a FIFO" in refusal(lambda: open_artifact(tmp_path))
