"""From one checkpoint format to another: the same codes, scales and dense weights, bit for bit, under other names.

Nothing is quantized or rounded here. A weight that the other format cannot say is refused before anything is written, and the result
appears by one rename of a complete directory.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from compress.artifact.atomic import sync_directory
from compress.artifact.context import Progress, SilentProgress
from compress.artifact.manifest import MANIFEST_NAME, Artifact, open_artifact
from compress.artifact.workspace import ArtifactWriter, Workspace
from compress.errors import UnsupportedFormat, UsageError
from compress.export import FORMATS, open_weights, write_format
from compress.models.arch import Arch
from compress.models.canonical import CanonicalStore
from compress.models.checkpoint import Checkpoint
from compress.models.weights import WeightSource
from compress.quant.scheme import ModelScheme, QuantizedWeight
from compress.registry.model_source import ModelSource

CONVERT_VERSION = 1


def convert(source: ModelSource, name: str, directory: Path, *, progress: Progress | None = None) -> Artifact:
    """Write a quantized model, an artifact or anybody's checkpoint, as the new `directory` in the format called `name`.

    Raises:
        UsageError: no such format, or the directory is there and not empty.
        UnsupportedFormat: the model is dense, is not understood wholly, or cannot be said exactly in that format.
    """
    FORMATS.get(name)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} exists and is not an empty directory; name a new one.")
    weights = open_weights(source.path)
    scheme, dense = stated_scheme(weights)
    digest = open_artifact(source.path).digest if (source.path / MANIFEST_NAME).exists() else source.digest

    def build(out: ArtifactWriter) -> None:
        write_format(name, out.path, Watched(weights, progress or SilentProgress()), scheme, ignore=dense)
        for file in source.text_files():
            shutil.copyfile(file, out.path / file.name)
        arch, layers = weights.arch.to_json()
        shapes = [{"scheme": scheme.layers.name, **layer} for layer in layers]
        kv_cache = {} if weights.kv_format is None else {"kv_cache": {"format": weights.kv_format}}
        out.describe(role="checkpoint", arch=arch, layers=shapes, scheme=scheme.to_json(), facts={"format": name, **kv_cache})

    parents = {"source": digest}
    key = Workspace.key("convert", CONVERT_VERSION, {"to": name}, parents, 0)
    with _neighbour(directory) as temporary:
        built = Workspace(temporary).commit(key, "convert", parents, build)
        os.rename(built.path, directory)
    sync_directory(directory.parent)
    return open_artifact(directory)


def stated_scheme(weights: WeightSource) -> tuple[ModelScheme, list[str]]:
    """The scheme of a quantized model, and the disk names of linears in its layers that are dense all the same.

    Raises:
        UnsupportedFormat: it is dense, or its layers have several schemes, which no recipe of this project makes.
    """
    if isinstance(weights, CanonicalStore) and weights.scheme is not None:
        return weights.scheme, []
    schemes = dict(weights.schemes) if isinstance(weights, Checkpoint) else {}
    head = schemes.pop("head", None)
    if not schemes:
        raise UnsupportedFormat("the linears of this model's layers are dense: there are no codes to convert. `compress run` makes some.")
    if len(several := sorted({scheme.name for scheme in schemes.values()})) > 1:
        raise UnsupportedFormat(f"the layers of this model have several schemes ({', '.join(several)}); one for all of them is converted.")
    assert isinstance(weights, Checkpoint)
    linears = [f"layers.{idx}.{linear}" for idx, layer in enumerate(weights.arch.layers) for linear in layer.linears]
    dense = [weights.family.to_disk(linear) for linear in linears if linear not in schemes]
    return ModelScheme(next(iter(schemes.values())), head), dense


@dataclass(frozen=True)
class Watched:
    """A source that says which layer is being read."""

    source: WeightSource
    progress: Progress

    @property
    def arch(self) -> Arch:
        return self.source.arch

    @property
    def kv_format(self) -> str | None:
        return self.source.kv_format

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self.source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        self.progress.update(layer_idx + 1, self.arch.num_layers, f"layer {layer_idx}")
        return self.source.layer(layer_idx)


@contextmanager
def _neighbour(directory: Path) -> Iterator[Path]:
    """A directory on the same file system, gone at the end whatever happens."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.parent / f".{directory.name}.{secrets.token_hex(4)}.tmp"
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
