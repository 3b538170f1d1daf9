"""Field types that the specs of several stages share."""

from collections.abc import Mapping
from typing import Any, cast

from pydantic import BeforeValidator

from compress.plugins import PluginSet
from compress.recipe import Spec


def _tuple_of_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


FROM_LIST = BeforeValidator(_tuple_of_list)
"""Mark of a tuple field that takes a list too. JSON lists become tuples by themselves, but a spec with a
validator of its raw mapping hands its fields Python values, and strict mode then refuses a list for a tuple.
"""


def specs_of(plugins: PluginSet[Any]) -> Mapping[str, type[Spec]]:
    """Return the specs that the members of a plug-in set are, by name."""
    return {name: cast(type[Spec], member) for name, member in plugins.items()}
