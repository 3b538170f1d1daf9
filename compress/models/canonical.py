"""The project's own store of weights between stages: one safetensors file per layer under canonical names,
plus the outer weights.

Layout of an artifact with this store: `outer.safetensors`, `layer-00000.safetensors`, ... ; `arch` in the
manifest; `scheme` in the manifest when linears are quantized (leaves of `quant/codec.py`), with the
head's inside it when the head is quantized, and that of each linear which has another scheme or none. A
layer's file is also a resume point: it is complete or absent. The manifest's `facts` name the format of a
quantized KV cache, and the layers hold its scales if it has static ones.
"""

from pathlib import Path

from torch import Tensor

from compress.artifact.manifest import Artifact
from compress.artifact.tensors import load_tensors, save_tensors
from compress.errors import UnsupportedFormat
from compress.models.arch import Arch
from compress.models.weights import UNTOUCHED, Weights
from compress.quant.codec import CanonicalCodec
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import QuantizedWeight, Schemes

OUTER_NAME = "outer.safetensors"
_CODEC = CanonicalCodec()


def layer_name(layer_idx: int) -> str:
    return f"layer-{layer_idx:05d}.safetensors"


def save_weights(path: Path, weights: Weights) -> None:
    """Write one file of the store."""
    save_tensors(path, encoded(weights))


def encoded(weights: Weights) -> dict[str, Tensor]:
    """Return the tensors of a file of the store."""
    tensors: dict[str, Tensor] = {}
    for name, value in weights.items():
        if isinstance(value, QuantizedWeight):
            module = name.removesuffix(".weight")
            tensors.update({f"{module}.{leaf}": tensor for leaf, tensor in _CODEC.encode(value).items()})
        else:
            tensors[name] = value
    return tensors


def load_weights(
    path: Path, schemes: Schemes | None, *, prefix: str = ""
) -> dict[str, Tensor | QuantizedWeight]:
    """Inverse of `save_weights`; `prefix` is what `schemes` has before the names of the file
    (`layers.3.`)."""
    tensors = load_tensors(path)
    weights: dict[str, Tensor | QuantizedWeight] = {}
    for name in [each for each in tensors if each.endswith(".scale") and not each.startswith(UNTOUCHED)]:
        module = name.removesuffix(".scale")
        scheme = None if schemes is None else schemes.for_linear(prefix + module)
        if scheme is None:
            raise UnsupportedFormat(
                f"{path} holds quantized weights of {module} and its artifact states no scheme for them."
            )
        leaves = {leaf: tensors.pop(f"{module}.{leaf}") for leaf in _CODEC.leaves(scheme)}
        weights[f"{module}.weight"] = _CODEC.decode(leaves, scheme)
    return weights | tensors


def stated_kv_format(artifact: Artifact) -> str | None:
    """Return the format of the KV cache that an artifact is to be served with, None if its manifest names
    none."""
    stated: str | None = artifact.manifest.facts.get("kv_cache", {}).get("format")
    return stated


class CanonicalStore:
    """An artifact with this layout as a `WeightSource`."""

    def __init__(self, artifact: Artifact) -> None:
        if artifact.manifest.arch is None:
            raise UnsupportedFormat(
                f"{artifact.path} is not an artifact with weights: its manifest states no arch."
            )
        self._path = artifact.path
        self._arch = Arch.from_json(artifact.manifest.arch, artifact.manifest.layers)
        scheme = artifact.manifest.scheme
        self.scheme = None if scheme is None else ModelScheme.from_json(scheme)
        self.kv_format = stated_kv_format(artifact)

    @property
    def arch(self) -> Arch:
        return self._arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return load_weights(self._path / OUTER_NAME, self.scheme)

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return load_weights(self._path / layer_name(layer_idx), self.scheme, prefix=f"layers.{layer_idx}.")
