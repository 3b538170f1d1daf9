"""Choice of a checkpoint's linears by the names and shapes of its tensors, for models that the decoder does
not support.

A linear is a matrix `<module>.weight` [O, I] in 16 or 32 bits, or one of a stack of experts. It stays dense
where its name or its shape is that of an embedding, an output head, a router, a norm or a convolution, where
it is stored input x output (GPT-2), and where it is small. `include` and `ignore` change the choice by shell
patterns over module names, with `{a,b}` for alternatives; `ignore` decides last.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from compress.artifact.header import BITS_OF_DTYPE, TensorHeader
from compress.errors import UnsupportedFormat, UsageError, did_you_mean
from compress.models.overrides import alternatives
from compress.models.stacked_experts import Stacked, stacked_matrices
from compress.untrusted.fields import Fields

WEIGHT = ".weight"
FLOATS = ("BF16", "F16", "F32")
"""Dtypes of weights that are rounded, as safetensors files name them."""
MIN_SIZE = 32
"""Least number of rows and of columns of a matrix that is worth rounding."""
MAX_ROUTER_ROWS = 1024
MAX_VOCAB = 1 << 24
_TEXT_CONFIGS = ("text_config", "llm_config", "decoder")
"""Keys under which configs of models for several media state those of their language model."""
INPUT_FIRST = "stored input x output"
CODE_LEAVES = frozenset(
    {"qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_inv", "weight_shape", "absmax"}
)
"""Last parts of names that only tensors of quantized checkpoints have."""
_EMBEDDING = re.compile(r"embed|^(emb|wte|wpe|shared|relative_attention_bias|codebook|lookup_table)$")
_HEAD = re.compile(r"lm_head")
_OUTER_HEAD = re.compile(r"^(embed_out|output|head|heads|score|classifier|qa_outputs|cls|out_head)$")
"""Parts of names that mean a head outside of the numbered layers alone."""
_NORM = re.compile(r"norm|^ln(_|\d|$)")
_ROUTER = re.compile(r"router|^wg$")
_CONVOLUTION = re.compile(r"conv")
_ADAPTER = re.compile(r"lora_|adapter")
_STATE_GATE = re.compile(r"^in_proj_(a|b|ba)$")
"""Projections to the decay and the step of each head of a gated delta network (arXiv 2412.06464)."""
_NUMBER = re.compile(r"\d+")
_BOUNDARY = re.compile(r"[^\w*]")


@dataclass(frozen=True)
class Choice:
    """One matrix, or stack of matrices, of a checkpoint. `reason` is why it stays dense, None where it is
    quantized; `stacked` is where it lies if it is one of a stack."""

    module: str
    shape: tuple[int, ...]
    dtype: str
    reason: str | None
    stacked: Stacked | None = None

    @property
    def tensor(self) -> str:
        """Name of the tensor in the checkpoint that has it."""
        return self.module + WEIGHT if self.stacked is None else self.stacked.tensor

    @property
    def experts(self) -> str | None:
        """The module whose stacks have this matrix; None where it is a tensor."""
        return None if self.stacked is None else self.stacked.tensor.rpartition(".")[0]

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense matrix."""
        return _product(self.shape) * BITS_OF_DTYPE[self.dtype] // 8

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns, O and I."""
        assert len(self.shape) == 2, "a stack of matrices"
        return self.shape[0], self.shape[1]


def choose_linears(
    headers: Iterable[TensorHeader],
    *,
    vocab_size: int | None,
    include: Sequence[str] = (),
    ignore: Sequence[str] = (),
    tied: bool = False,
) -> list[Choice]:
    """Return the choice for every tensor of at least two dimensions, and every matrix of a stack of experts,
    sorted by name.

    `vocab_size` identifies heads by their rows. `tied`: the config ties the head to the embedding, so that a
    head stays dense in any case.

    Raises:
        UnsupportedFormat: the checkpoint is quantized already; names a tensor.
        UsageError: a pattern matches no matrix, includes one that is stored input x output, or parts a stack.
    """
    by_name = {header.name: header for header in headers}
    for header in by_name.values():
        _refuse_codes(header)
    stored_input_first = {
        name.removesuffix(WEIGHT) for name, each in by_name.items() if _is_input_first(each, by_name)
    }
    choices = [
        Choice(
            name.removesuffix(WEIGHT),
            each.shape,
            each.dtype,
            _reason(each, vocab_size=vocab_size, input_first=stored_input_first, by_name=by_name),
        )
        for name, each in sorted(by_name.items())
        if len(each.shape) >= 2 and name.endswith(WEIGHT)
    ]
    choices = sorted((*choices, *_of_stacks(by_name)), key=lambda each: each.module)
    choices = _included(choices, include, input_first=stored_input_first, tied=tied)
    choices = _ignored(choices, ignore)
    _check_stacks(choices)
    return choices


def _of_stacks(by_name: Mapping[str, TensorHeader]) -> list[Choice]:
    """Return the choice for every matrix of a stack of experts. What one of them is, all are."""
    return [
        Choice(
            name.removesuffix(WEIGHT),
            header.shape,
            header.dtype,
            _reason(header, vocab_size=None, input_first=(), by_name=by_name),
            stacked,
        )
        for name, (header, stacked) in stacked_matrices(by_name).items()
    ]


def stated_vocab_size(config: Mapping[str, Any]) -> int | None:
    """Return the size of the vocabulary that a config states, also inside the config of its language model;
    None where it states none.

    Raises:
        UnsupportedFormat: it states something else than a number.
    """
    stated = Fields(config, "config.json", UnsupportedFormat)
    if stated.has("vocab_size"):
        return stated.integer("vocab_size", 1, MAX_VOCAB)
    for name in _TEXT_CONFIGS:
        inner = config.get(name)
        if isinstance(inner, Mapping) and inner.get("vocab_size") is not None:
            return stated.fields(name).integer("vocab_size", 1, MAX_VOCAB)
    return None


def other_matrices(headers: Iterable[TensorHeader]) -> list[TensorHeader]:
    """Return the tensors of at least two dimensions that are no `<module>.weight` and no stack of experts;
    they stay as they are."""
    by_name = {each.name: each for each in headers}
    stacks = {stacked.tensor for _, stacked in stacked_matrices(by_name).values()}
    return [
        each
        for name, each in sorted(by_name.items())
        if len(each.shape) >= 2 and not name.endswith(WEIGHT) and name not in stacks
    ]


def template(module: str) -> str:
    """Return a module's name with `*` for each part that is a number."""
    return ".".join("*" if _NUMBER.fullmatch(part) else part for part in module.split("."))


def targets(modules: Collection[str], others: Collection[str]) -> list[str]:
    """Return names that a `quantization_config` may list for exactly these modules and none of `others`:
    regular expressions (`re:...`) for modules that differ in numbers alone, full names elsewhere.

    A program may have the layers under another prefix than the checkpoint (`model.layers` for
    `backbone.layers`), so an expression leaves it open where none of `others` ends alike.
    """
    taken = {template(other) for other in others}
    ends_of_forms = {end for form in taken for end in _ends(form)}
    ends_of_others = {end for other in others for end in _ends(other)}
    layers_of_others: dict[str, set[str]] = {}
    for other in others:
        layers_of_others.setdefault(template(other), set()).add(_layer_number(other))
    found: set[str] = set()
    layers: dict[str, set[str]] = {}
    for module in modules:
        form = template(module)
        if "*" not in form:
            found.add(module)
        elif form not in taken:
            end = _without_prefix(form)
            found.add(_expression(form) if end in ends_of_forms else _expression(end, is_open=True))
        elif _layer_number(module) in layers_of_others[form]:
            end = _without_prefix(module)
            found.add(module if end in ends_of_others else _expression(end, is_open=True))
        else:
            layers.setdefault(form, set()).add(_layer_number(module))
    for form, numbers in layers.items():
        is_open = not any(_without_prefix(form) in _ends(other) for other in taken - {form})
        some = "|".join(sorted(numbers, key=int))
        found.add(_expression(_without_prefix(form) if is_open else form, is_open=is_open, layers=some))
    return sorted(found)


def _expression(form: str, *, is_open: bool = False, layers: str = "") -> str:
    """Return a regular expression of a template or name, of any prefix if it `is_open`; `layers` are the
    numbers that its first one may be."""
    parts = [re.escape(part).replace(r"\-", "-") if part != "*" else r"\d+" for part in form.split(".")]
    if layers:
        parts[parts.index(r"\d+")] = f"({layers})"
    return f"re:{'.*' + chr(92) + 'b' if is_open else ''}{(chr(92) + '.').join(parts)}$"


def _ends(name: str) -> list[str]:
    """Return a name and its ends from each boundary of a word on."""
    return [name, *(name[match.end() :] for match in _BOUNDARY.finditer(name))]


def _layer_number(module: str) -> str:
    return next((part for part in module.split(".") if _NUMBER.fullmatch(part)), "")


def _without_prefix(form: str) -> str:
    """Return a template or name from the part before its first number on: `layers.*.mlp.up_proj`."""
    parts = form.split(".")
    first = next((idx for idx, part in enumerate(parts) if part == "*" or _NUMBER.fullmatch(part)), 0)
    return ".".join(parts[max(first - 1, 0) :])


def matches(pattern: str, module: str) -> bool:
    """Return whether a shell pattern names a module or its weight."""
    return any(
        fnmatchcase(name, each) for each in alternatives(pattern) for name in (module, module + WEIGHT)
    )


def _reason(
    header: TensorHeader,
    *,
    vocab_size: int | None,
    input_first: Collection[str],
    by_name: Mapping[str, TensorHeader],
) -> str | None:
    """Return why a tensor stays dense by itself, None where it looks like the weight of a linear."""
    module = header.name.removesuffix(WEIGHT)
    parts = module.split(".")
    last = parts[-1]
    rows = header.shape[0]
    columns = header.shape[-1]
    is_outer = not _is_in_layer(parts)
    reasons = (
        (len(header.shape) > 2, "convolution" if _any(_CONVOLUTION, parts) else "more than two dimensions"),
        (header.dtype not in FLOATS, f"dtype {header.dtype}"),
        (_any(_NORM, parts[-1:]), "norm"),
        (_any(_CONVOLUTION, parts), "convolution"),
        (_any(_EMBEDDING, parts) and last != "embed_out", "embedding"),
        (_any(_HEAD, parts) or (is_outer and (rows == vocab_size or _any(_OUTER_HEAD, parts))), "head"),
        (_any(_ROUTER, parts) or _is_gate(last, rows, columns), "router"),
        (_any(_ADAPTER, parts), "adapter"),
        (last == "dt_proj", "step sizes of a state-space model, which reads the weight itself"),
        (_any(_STATE_GATE, parts[-1:]), "gates of a state, a number for each head"),
        (module in input_first or _is_square_beside(header, input_first, by_name), INPUT_FIRST),
        (min(rows, columns) < MIN_SIZE, f"fewer than {MIN_SIZE} rows or columns"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def _is_gate(last: str, rows: int, columns: int) -> bool:
    """Return whether a module of this name and shape is a router of experts, and no gate of an FFN."""
    return (last == "gate" or last.endswith("_gate")) and rows <= MAX_ROUTER_ROWS and rows < columns


def _is_in_layer(parts: Sequence[str]) -> bool:
    return any(_NUMBER.fullmatch(part) for part in parts)


def _is_input_first(header: TensorHeader, by_name: Mapping[str, TensorHeader]) -> bool:
    """Return whether the bias has an entry for each column of the matrix instead of each row."""
    bias = by_name.get(header.name.removesuffix(WEIGHT) + ".bias")
    if bias is None or not header.name.endswith(WEIGHT) or len(header.shape) != 2 or len(bias.shape) != 1:
        return False
    return bias.shape[0] == header.shape[1] != header.shape[0]


def _is_square_beside(
    header: TensorHeader, input_first: Collection[str], by_name: Mapping[str, TensorHeader]
) -> bool:
    """Return whether a square matrix, whose bias does not show its orientation, has a sibling that is stored
    input x output."""
    if not input_first or len(set(header.shape)) != 1:
        return False
    if header.name.removesuffix(WEIGHT) + ".bias" not in by_name:
        return False
    layer = _layer_of(header.name)
    return any(_layer_of(each) == layer for each in input_first)


def _layer_of(name: str) -> tuple[str, ...]:
    """Return the parts of a name up to its first number, without the number."""
    parts = name.split(".")
    numbered = next((idx for idx, part in enumerate(parts) if _NUMBER.fullmatch(part)), len(parts) - 2)
    return tuple(parts[: max(numbered, 0)])


def _included(
    choices: Sequence[Choice], patterns: Sequence[str], *, input_first: Collection[str], tied: bool
) -> list[Choice]:
    found = list(choices)
    for pattern in patterns:
        _check_matches("include", pattern, choices)
        for idx, each in enumerate(found):
            if each.reason is None or not matches(pattern, each.module):
                continue
            if each.module in input_first:
                raise UsageError(
                    f"include: the pattern '{pattern}' matches {each.module}, which is stored input x output "
                    "(its bias has an entry for each column). Formats of codes store output x input, so it "
                    "stays dense: narrow the pattern."
                )
            if len(each.shape) == 2 and each.dtype in FLOATS:
                reason = "head, tied to the embedding" if tied and each.reason == "head" else None
                found[idx] = replace(each, reason=reason)
    return found


def _ignored(choices: Sequence[Choice], patterns: Sequence[str]) -> list[Choice]:
    for pattern in patterns:
        _check_matches("ignore", pattern, choices)
    return [
        replace(each, reason="ignored by the recipe")
        if each.reason is None and any(matches(pattern, each.module) for pattern in patterns)
        else each
        for each in choices
    ]


def _check_stacks(choices: Sequence[Choice]) -> None:
    """Raise UsageError for experts in stacks of which some would be dense and others not: no program reads
    codes of some experts next to numbers of others."""
    quantized: dict[str, bool] = {}
    for each in choices:
        if each.experts is None:
            continue
        if quantized.setdefault(each.experts, each.reason is None) != (each.reason is None):
            raise UsageError(
                f"include and ignore part the experts {each.experts}, which are stacks of the checkpoint and "
                f"are computed as one product: match all of them ('{template(each.experts)}.*') or none."
            )


def _check_matches(key: str, pattern: str, choices: Sequence[Choice]) -> None:
    if any(matches(pattern, each.module) for each in choices):
        return
    kinds = list(dict.fromkeys(template(each.module) for each in choices if each.reason is None))
    near = did_you_mean(pattern, kinds[:16])
    raise UsageError(f"{key}: the pattern '{pattern}' matches no matrix of the checkpoint.{near}")


def _refuse_codes(header: TensorHeader) -> None:
    """Raise UnsupportedFormat for a tensor that only a quantized checkpoint has."""
    leaf = header.name.rpartition(".")[2]
    is_code = leaf == "weight" and len(header.shape) == 2 and BITS_OF_DTYPE[header.dtype] <= 8
    if leaf in CODE_LEAVES or is_code:
        raise UnsupportedFormat(
            f"the checkpoint is quantized already: it has the tensor '{header.name:.200}' of dtype "
            f"{header.dtype}. Start from the dense checkpoint."
        )


def _any(pattern: re.Pattern[str], parts: Iterable[str]) -> bool:
    return any(pattern.search(part.lower()) for part in parts)


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
