"""The parts of a key: everything that decides a result of a stage, so that a miss can be explained and an
entry from another machine can be compared with its key.

    canonical JSON of {stage, version, spec, inputs, seed, extra}  -> SHA-256 -> key, as hexadecimal digits
    key in a workspace: <hex>.<machine>, where `machine` is the kind of machine that decides the last bits

A file of parts needs no digest of its own: the key that it is found under is one.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from compress.digest import canonical_json, digest_bytes
from compress.errors import StorageError
from compress.untrusted.fields import Fields
from compress.untrusted.parse import Malformed, parse_json

MAX_PARTS_BYTES = 1 << 20
_NAMES = ("stage", "version", "spec", "inputs", "seed", "extra")
_MAX_SHOWN = 40
_LEFT_OUT = object()


@dataclass(frozen=True)
class KeyParts:
    """The parts of one key. `inputs` maps port names to artifact digests; `extra` has what decides the result
    besides the recipe, such as the digest of a data file or the device of a latency measurement.
    """

    stage: str
    version: int
    spec: Mapping[str, Any]
    inputs: Mapping[str, str]
    seed: int
    extra: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""

    def to_bytes(self) -> bytes:
        """Return the canonical JSON that the key is the digest of; the kind of machine is not in it."""
        return canonical_json({name: getattr(self, name) for name in _NAMES})

    @property
    def digest(self) -> str:
        """The digest of all parts but the kind of machine, `sha256:<hex>`."""
        return digest_bytes(self.to_bytes())

    @property
    def key(self) -> str:
        """The name of the entry in a workspace."""
        hexadecimal = self.digest.removeprefix("sha256:")
        return f"{hexadecimal}.{self.machine}" if self.machine else hexadecimal

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> "KeyParts":
        """Return the parts of a key from their file.

        Raises:
            StorageError: the bytes are not the parts of that key.
        """
        hexadecimal, _, machine = key.partition(".")
        where = f"the parts of the key {key}"
        if digest_bytes(data) != f"sha256:{hexadecimal}":
            raise StorageError(f"{where} have another digest than the key.")
        try:
            value = Fields(parse_json(data), where, StorageError)
        except Malformed as error:
            raise StorageError(f"{where} are damaged: {error}.") from None
        texts = {name: value.fields(name) for name in ("inputs", "extra")}
        return cls(
            value.text("stage"),
            value.integer("version", 0, 1 << 31),
            value.mapping("spec"),
            {name: texts["inputs"].text(name) for name in texts["inputs"]},
            value.integer("seed", 0, 2**63 - 1),
            {name: texts["extra"].text(name) for name in texts["extra"]},
            machine,
        )

    def differences(self, other: "KeyParts") -> tuple[str, ...]:
        """Return what is different in another key of the same stage, one phrase each, this key's value first;
        nothing where the keys are equal.
        """
        found = []
        if self.version != other.version:
            found.append(f"stage version ({self.version}, was {other.version})")
        if self.seed != other.seed:
            found.append(f"seed ({self.seed}, was {other.seed})")
        if self.machine != other.machine:
            found.append(f"kind of machine ({self.machine or 'none'}, was {other.machine or 'none'})")
        found += [f"input {name}" for name in _changed(self.inputs, other.inputs)]
        found += [f"content of {name.replace('_', ' ')}" for name in _changed(self.extra, other.extra)]
        ours = dict(_leaves(self.spec))
        theirs = dict(_leaves(other.spec))
        for name in _changed(ours, theirs):
            now = _shown(ours.get(name, _LEFT_OUT))
            was = _shown(theirs.get(name, _LEFT_OUT))
            found.append(f"{name} ({now}, was {was})")
        return tuple(found)


def _changed(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    names = sorted(ours.keys() | theirs.keys())
    return [name for name in names if ours.get(name, _LEFT_OUT) != theirs.get(name, _LEFT_OUT)]


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings under its dotted path."""
    for name, each in value.items():
        if isinstance(each, Mapping) and each:
            yield from _leaves(each, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", each


def _shown(value: Any) -> str:
    if value is _LEFT_OUT:
        return "left out"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
