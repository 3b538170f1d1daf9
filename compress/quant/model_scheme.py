"""The schemes of a whole model: one for the linears of layers, exceptions by name, and the head's."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from compress.errors import StorageError
from compress.quant.scheme import Scheme, name_of
from compress.untrusted.fields import Fields


@dataclass(frozen=True)
class ModelScheme:
    """The schemes of a whole model.

    `layers` is the scheme of the linears of layers, `exceptions` lists linears that differ from it (None:
    dense), and `head` is the head's, None when it is dense. Linears that share an input have the same scheme
    where this project chose it.
    """

    layers: Scheme
    head: Scheme | None = None
    exceptions: tuple[tuple[str, Scheme | None], ...] = ()

    def for_linear(self, linear: str) -> Scheme | None:
        if linear == "head":
            return self.head
        return self._by_linear.get(linear, self.layers) if self.exceptions else self.layers

    @cached_property
    def _by_linear(self) -> dict[str, Scheme | None]:
        return dict(self.exceptions)

    @property
    def name(self) -> str:
        counts = Counter(name_of(scheme) for _, scheme in self.exceptions)
        exceptions = [
            f"{count} linear{'s' if count > 1 else ''} {name}" for name, count in sorted(counts.items())
        ]
        return ", ".join(
            [self.layers.name, *exceptions, *([] if self.head is None else [f"head {self.head.name}"])]
        )

    @property
    def of_layers(self) -> tuple[Scheme, ...]:
        """Every scheme that a linear of a layer has, once."""
        return tuple(
            dict.fromkeys([self.layers, *(scheme for _, scheme in self.exceptions if scheme is not None)])
        )

    @property
    def all(self) -> tuple[Scheme, ...]:
        return tuple(dict.fromkeys([*self.of_layers, *([] if self.head is None else [self.head])]))

    @property
    def dense(self) -> tuple[str, ...]:
        """Names of the linears of layers that have no scheme."""
        return tuple(linear for linear, scheme in self.exceptions if scheme is None)

    def renamed(self, names: Callable[[str], Iterable[str]]) -> "ModelScheme":
        """Return the same schemes with the exceptions renamed, each to all its names in programs."""
        named = ((name, scheme) for linear, scheme in self.exceptions for name in names(linear))
        return replace(self, exceptions=tuple(named))

    def facts_of_layer(self, layer_idx: int, linears: Iterable[str]) -> dict[str, Any]:
        """Return a manifest's facts of one layer: its scheme by name and, where linears differ, their names
        and schemes."""
        names = {linear: name_of(self.for_linear(f"layers.{layer_idx}.{linear}")) for linear in linears}
        scheme = next(iter(names.values())) if len(set(names.values())) == 1 else self.layers.name
        different = {linear: name for linear, name in names.items() if name != scheme}
        return {"scheme": scheme, **({"exceptions": different} if different else {})}

    def to_json(self) -> dict[str, Any]:
        """Return JSON: the facts of `layers`, those of the head under `head`, and linears that differ under
        `exceptions`.

        Exceptions are grouped by scheme (null: dense).
        """
        linears: dict[Scheme | None, list[str]] = {}
        for linear, scheme in self.exceptions:
            linears.setdefault(scheme, []).append(linear)
        exceptions = [
            {"scheme": scheme.to_json() if scheme else None, "linears": names}
            for scheme, names in linears.items()
        ]
        head = {} if self.head is None else {"head": self.head.to_json()}
        return self.layers.to_json() | head | ({"exceptions": exceptions} if exceptions else {})

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> "ModelScheme":
        """Read what `to_json` wrote.

        Raises:
            StorageError: a value is missing, unknown, of another type or out of range.
        """
        stated = Fields(facts, "the scheme of a manifest", StorageError)
        layers = Scheme.from_json(
            {key: value for key, value in facts.items() if key not in ("head", "exceptions")}
        )
        head = Scheme.from_json(stated.mapping("head")) if stated.has("head") else None
        schemes: dict[str, Scheme | None] = {}
        for item in stated.items("exceptions", default=()):
            each = Fields(item, "an exception in the scheme of a manifest", StorageError)
            scheme = Scheme.from_json(each.mapping("scheme")) if each.has("scheme") else None
            schemes |= dict.fromkeys(each.texts("linears"), scheme)
        return with_exceptions(layers, schemes, head=head)


def with_exceptions(
    layers: Scheme, schemes: Mapping[str, Scheme | None], *, head: Scheme | None = None
) -> ModelScheme:
    """Return `layers` for all linears except those that `schemes` gives another; sorted by name, so that
    equal models are equal."""
    return ModelScheme(
        layers,
        head,
        tuple((linear, schemes[linear]) for linear in sorted(schemes) if schemes[linear] != layers),
    )


def commonest(schemes: Mapping[str, Scheme | None], *, head: Scheme | None = None) -> ModelScheme:
    """Return the scheme that most of these linears have as that of all layers, the rest as exceptions; of
    equal counts the first."""
    counts = Counter(scheme for scheme in schemes.values() if scheme is not None)
    return with_exceptions(counts.most_common(1)[0][0], schemes, head=head)
