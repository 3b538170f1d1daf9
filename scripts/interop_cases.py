"""The checkpoints of the interop matrix: tiny models of every family, and the formats and schemes in which
each is written.

Models are random, of two layers, with every width a multiple of 128 (vLLM's CPU kernels want 32, groups of
the formats 128). A dense family and a mixture are written in every scheme by every format that takes it, and
without a scheme by the formats that have a graph; other families in a few. Four families are also there as
pruning leaves them: half the KV groups, three quarters of the FFN, in 4 bits; a Qwen2 keeps its heads,
because vLLM takes their dimension from the hidden size. Each mixture is also there with experts in 16 bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from compress.export import FORMATS, Consumer, GraphFormat, OneScaleFormat
from compress.export.format_writer import write_format
from compress.models.arch import Arch
from compress.models.family import family_of
from compress.models.overrides import linear_names
from compress.models.pruning import Widths, resized
from compress.models.random_source import RandomSource
from compress.models.weights import dense
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import DENSE, SCHEMES, QuantizedWeight
from scripts.interop_families import ALL_FORMATS, FAMILIES, MIXTURES, SMALL, STACKED

CPU = torch.device("cpu")
EVERY_SCHEME = ("llama", "qwen3_moe")
"""The families that are written in every scheme by every format that takes it."""
WRITTEN = (
    ("compressed-tensors", "W4A16_G128"),
    ("compressed-tensors", "W4A16_G128_ASYM"),
    ("compressed-tensors", "FP8_DYNAMIC"),
    ("compressed-tensors", "INT8_DYNAMIC"),
    ("fp8", "FP8_BLOCK"),
    ("awq", "W4A16_G128_ASYM"),
    ("gptq", "W4A16_G128"),
    ("onnx", "W4A16_G128"),
    ("onnx", "W4A16_G64_ASYM"),
    ("onnx", "W4A16_G32"),
    ("onnx", "W8A16"),
    ("onnx", "INT8_DYNAMIC"),
    ("onnx-float16", "W4A16_G128_ASYM"),
    ("onnx-float16", "W8A16"),
)
"""How the other families of `ALL_FORMATS` are written."""
FEW = (WRITTEN[0], WRITTEN[2], WRITTEN[3], WRITTEN[4], WRITTEN[6])
GRAPHS = (WRITTEN[8], WRITTEN[10], WRITTEN[12])
"""How the families beside those are written: the first where they hold experts apart, the second where they
have none."""
DENSE_EXPERTS = ("compressed-tensors", "FP8_DYNAMIC")
"""How every mixture is written once more, with experts in 16 bits."""
GRAPH_READERS = ("onnxruntime", "onnxruntime_genai")
CONSUMERS = {
    "compress": ("compress runtime",),
    "vllm": ("vLLM on a CPU", "vLLM"),
    "transformers": ("transformers",),
    "onnxruntime": ("ONNX Runtime",),
    "onnxruntime_genai": ("ONNX Runtime GenAI",),
}
"""Program -> its names among the consumers of a format, the most specific first."""


@dataclass(frozen=True)
class Case:
    """A model of a family as one format writes it; `scheme` is `dense` for one without codes."""

    family: str
    form: str
    scheme: str
    path: Path
    pruned: bool = False
    dense_experts: bool = False

    @property
    def scheme_shown(self) -> str:
        return f"{self.scheme}, dense experts" if self.dense_experts else self.scheme

    @property
    def family_shown(self) -> str:
        return f"{self.family}, pruned" if self.pruned else self.family

    @property
    def arch(self) -> Arch:
        """The model's shape, as pruning leaves it where it is pruned."""
        arch = arch_of(self.family)
        if not self.pruned:
            return arch
        heads = (4, 2) if self.family == "qwen2" else (2, 1)
        return resized(arch, Widths(*heads, 384, 2))

    @property
    def schemes(self) -> ModelScheme | None:
        """The schemes of all linears; None for a model without codes."""
        if self.scheme == DENSE:
            return None
        linears = linear_names(self.arch) if self.dense_experts else ()
        exceptions = tuple((name, None) for name in linears if is_expert(name))
        return ModelScheme(SCHEMES[self.scheme], exceptions=exceptions)

    def claim(self, program: str) -> Consumer:
        """Return what the format states of a program that may load the checkpoint.

        Raises:
            LookupError: the format states nothing of it.
        """
        scheme = self.schemes
        if scheme is None:
            return Consumer(program, loads=True, note="a checkpoint without codes, and a graph")
        stated = {each.name: each for each in FORMATS.get(self.form).consumers(self.arch, scheme)}
        for name in CONSUMERS[program]:
            if name in stated:
                return stated[name]
        raise LookupError(f"{self.form} states nothing of {program}")

    def is_for(self, program: str) -> bool:
        """Return whether the format is one of those that a program is made to read."""
        if program == "compress":
            return True
        return (program in GRAPH_READERS) == isinstance(FORMATS.get(self.form), GraphFormat)


class DenseExperts(RandomSource):
    """Random weights of which the routed experts have no codes."""

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return {
            name: dense(value).to(torch.bfloat16) if is_expert(name) else value
            for name, value in super().layer(layer_idx).items()
        }


class OneScale(RandomSource):
    """Random weights of which each linear has one scale for all its rows."""

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return {name: with_one_scale(value) for name, value in super().layer(layer_idx).items()}


def with_one_scale(value: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
    """Return a weight whose scales are all its first one; a dense one as it is."""
    if not isinstance(value, QuantizedWeight):
        return value
    return replace(value, scale_OG=value.scale_OG[:1, :1].expand_as(value.scale_OG).contiguous())


def is_expert(name: str) -> bool:
    return "moe.experts." in name


@cache
def arch_of(family: str) -> Arch:
    """Return the shape of the tiny model of a family."""
    own = FAMILIES[family]
    spelled = family_of({"model_type": family, **own}).spelled
    common = {name: value for name, value in SMALL.items() if spelled.get(name) not in own}
    config = {**common, "model_type": family, **own}
    return family_of(config).read_config(config)


def every_scheme(family: str) -> Iterator[tuple[str, str]]:
    """Yield each format and scheme in which the rules of the format let the family be written."""
    arch = arch_of(family)
    for form, member in FORMATS.items():
        if isinstance(member, GraphFormat):
            if member.broken_facts(arch):
                continue
            yield form, DENSE
        for name, scheme in SCHEMES.items():
            if not member.broken_rules(arch, ModelScheme(scheme)):
                yield form, name


def holds(family: str, form: str, scheme: str) -> bool:
    """Return whether a format can hold a family in a scheme."""
    member, arch = FORMATS.get(form), arch_of(family)
    if isinstance(member, GraphFormat) and member.broken_facts(arch):
        return False
    return not member.broken_rules(arch, ModelScheme(SCHEMES[scheme]))


def cases_of(family: str, directory: Path) -> Iterator[Case]:
    """Yield the checkpoints of a family, in folders of a directory."""
    written: list[tuple[str, str]] = []
    if family in EVERY_SCHEME:
        written += every_scheme(family)
    elif family in ALL_FORMATS:
        written += WRITTEN
    else:
        written += [] if family in STACKED else [each for each in FEW if holds(family, *each)]
        written += [] if family in MIXTURES else [each for each in GRAPHS if holds(family, *each)]
    for form, scheme in written:
        yield Case(family, form, scheme, directory / f"{family}-{form}-{scheme}")
    if family in MIXTURES:
        yield Case(family, *DENSE_EXPERTS, directory / f"{family}-dense-experts", dense_experts=True)
    if family in ALL_FORMATS:
        yield Case(family, *WRITTEN[0], directory / f"{family}-pruned", pruned=True)


def in_turns(families: Sequence[str], directory: Path) -> Iterator[Case]:
    """Yield the checkpoints of families, the first of each before the second of any: a run that is
    interrupted has asked about all families."""
    for turn in zip_longest(*(cases_of(family, directory) for family in families)):
        yield from (case for case in turn if case is not None)


def write(case: Case) -> None:
    """Write the checkpoint of a case, with random weights."""
    drawn: type[RandomSource] = DenseExperts if case.dense_experts else RandomSource
    scheme = SCHEMES.get(case.scheme)
    form = FORMATS.get(case.form)
    if scheme is not None and isinstance(form, OneScaleFormat) and form.takes_one_scale(scheme):
        drawn = OneScale
    source = drawn(case.arch, device=CPU, dtype=torch.bfloat16, scheme=scheme)
    case.path.mkdir()
    write_format(case.form, case.path, source, case.schemes)
