"""Where drafts begin: one file a kind. A kind is a Spec that says, at plan time, what it needs and what
cannot be; that trains the draft against its target, on all ranks together; and whose result writes itself
into the artifact.

Everything that kinds have in common (text, steps, the target in decoder form) is made for them: `Setting`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from compress.artifact.workspace import ArtifactWriter
from compress.context import Context
from compress.distill.learn import Curve
from compress.models.decoder import Decoder
from compress.plugins import PluginSet
from compress.registry.model_source import ModelSource
from compress.stages import Estimate, PlanFacts
from compress.stages.distill.models import NamedTeacher
from compress.stages.distill.text import Text

if TYPE_CHECKING:
    from compress.stages.draft.spec import Draft


@dataclass(frozen=True)
class Setting:
    """What a draft is made with, the same on every rank: the recipe's model, the target as it will be served
    and as a decoder in `dtype` on the device (what its codes stand for; no gradients), and windows of text.
    """

    spec: "Draft"
    source: ModelSource
    target: NamedTeacher
    decoder: Decoder
    text: Text
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Made:
    """A trained draft. `facts` are its own: `kind`, `params`, `before` and `after` with {kl, top1,
    acceptance, acceptance_length}, and what else its kind has to say. `write` puts its files into the
    artifact and returns what `describe` is to say of them: arch, layers, scheme. It is called on rank 0."""

    curve: Curve
    facts: Mapping[str, Any]
    write: Callable[[ArtifactWriter], Mapping[str, Any]]


class Init(Protocol):
    """A Spec of one kind."""

    def estimate(self, spec: "Draft", facts: PlanFacts) -> Estimate:
        """What training takes; `facts.arch` is the target's.

        Raises:
            UsageError, UnsupportedFormat: what cannot be.
        """

    def make(self, setting: Setting, ctx: Context) -> Made:
        """Train it, on all ranks together; resumable.

        Raises:
            Interrupted: asked to stop.
        """


INITS: PluginSet[type[Init]] = PluginSet("draft", "compress.stages.draft.inits")
