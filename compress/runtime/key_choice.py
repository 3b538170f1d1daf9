"""The kernels by which the indexers of one kind choose keys, in sequences of the length that a deployment has
(`models/indexer.py`)."""

from typing import Any, Generic, TypeVar

from compress.kernels.problem import Op
from compress.models.arch import Arch
from compress.models.indexer import BlockIndexer, Indexer
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel

F = TypeVar("F", Indexer, BlockIndexer)


class KeyChoice(Generic[F]):
    """The kernels of one op for all indexers of one kind that an architecture has, and those of
    `pool_choice` for indexers with pools.

    Raises:
        EnvironmentUnfit: no kernel here serves their choice.
    """

    def __init__(self, op: Op, kind: type[F], arch: Arch, deployment: Deployment) -> None:
        num_positions = deployment.num_positions(arch)
        self._kernels: dict[F, BoundKernel] = {}
        for layer in arch.layers:
            facts = layer.indexer
            if isinstance(facts, kind) and facts not in self._kernels and layer.index_numbers(num_positions):
                own: Op = "pool_choice" if isinstance(facts, Indexer) and facts.pool_size else op
                problem = deployment.kernel_device.problem(own, n=facts.head_dim, k=facts.num_heads)
                self._kernels[facts] = BoundKernel.of(problem)
        self.least = min((facts.top_k for facts in self._kernels), default=None)
        """The positions up to which all rows attend to all that they see, None where they always do."""

    def may_choose(self, num_positions: int) -> bool:
        """Return whether rows of contexts of so many positions may attend to some of them only."""
        return self.least is not None and num_positions > self.least

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return [each.report(layer=None, linear=each.problem.op) for each in self._kernels.values()]
