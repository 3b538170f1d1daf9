"""Checkpoint formats that other programs load: one file a format, holding its codec, its config and the known limits of its consumers.

The same file reads the format back, so that somebody else's checkpoint and our own artifact come in through one door (`open_checkpoint`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.errors import UnsupportedFormat
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, CanonicalStore
from compress.models.checkpoint import Checkpoint
from compress.models.weights import WeightSource
from compress.plugins import PluginSet
from compress.quant.codec import ForeignCodec
from compress.quant.scheme import ModelScheme


@dataclass(frozen=True)
class Consumer:
    """Whether a program loads the result, as far as its sources and our tests say; `note` holds the condition or the reason."""

    name: str
    loads: bool
    note: str


@dataclass(frozen=True)
class Rule:
    """A limit that would make the written checkpoint wrong or unloadable."""

    name: str
    problem: str


class ExportFormat(Protocol):
    """`quant_method` is the name in a checkpoint's `quantization_config`."""

    @property
    def quant_method(self) -> str: ...

    @property
    def codec(self) -> ForeignCodec: ...

    def quantization_config(self, scheme: ModelScheme, *, head: str, ignore: Iterable[str] = ()) -> dict[str, Any]:
        """The `quantization_config` of `config.json`. `head` is the head's disk module, `ignore` names linears of layers left dense."""

    def broken_rules(self, arch: Arch, scheme: ModelScheme) -> list[Rule]:
        """Why this model in this scheme must not be written in this format; empty when it may."""

    def consumers(self, arch: Arch, scheme: ModelScheme) -> list[Consumer]:
        """Who loads the result."""


FORMATS: PluginSet[ExportFormat] = PluginSet("export format", "compress.export")


def codecs() -> Mapping[str, ForeignCodec]:
    """Codecs of every format by `quant_method`."""
    return {each.quant_method: each.codec for _, each in FORMATS.items()}


def open_checkpoint(path: Path) -> Checkpoint:
    """A Hugging Face directory, dense or quantized in any format known here."""
    return Checkpoint(path, codecs=codecs())


def open_weights(path: Path) -> WeightSource:
    """The weights at `path`, in whichever store: an artifact of an earlier stage or a Hugging Face directory.

    Raises:
        UsageError: no model lies there.
        UnsupportedArch, UnsupportedFormat: it is not understood wholly.
    """
    if (path / MANIFEST_NAME).exists() and (path / OUTER_NAME).exists():
        return CanonicalStore(open_artifact(path))
    return open_checkpoint(path)


def check_rules(name: str, arch: Arch, scheme: ModelScheme) -> None:
    """Refuse before anything is written.

    Raises:
        UnsupportedFormat: naming every broken rule.
    """
    broken = FORMATS.get(name).broken_rules(arch, scheme)
    if broken:
        reasons = " ".join(f"[{rule.name}] {rule.problem}" for rule in broken)
        raise UnsupportedFormat(f"scheme {scheme.name} cannot be exported as {name}: {reasons}")
