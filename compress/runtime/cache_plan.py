"""The sizes of the cache of an engine: blocks of keys and values, slots of states, and saved states."""

from dataclasses import dataclass

from compress.models.arch import Arch
from compress.runtime.deployment import Deployment
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import slot_bytes
from compress.runtime.speculative.proposer import Proposer


@dataclass(frozen=True)
class CachePlan:
    """The sizes of the cache of an engine.

    `num_blocks` count the padding block, and the `num_first` blocks that are slots of states. `num_saved`
    states of prefixes have room where the engine `saves_states`. Where `blocks_hold_all`, a sequence has
    nothing that is not in its blocks, so that these can be shared and moved.
    """

    max_model_len: int
    num_blocks: int
    num_first: int
    num_saved: int
    saves_states: bool
    blocks_hold_all: bool

    @property
    def num_slots(self) -> int:
        """The slots of states, that of padding included."""
        return self.num_first + 1

    @property
    def can_keep_prefixes(self) -> bool:
        """Whether a sequence can go on from what another one has left."""
        return self.num_first == 0 or self.saves_states


def plan_cache(
    arch: Arch,
    config: EngineConfig,
    proposer: Proposer | None,
    deployment: Deployment,
    *,
    kv_bytes_per_token: int,
) -> CachePlan:
    """Return the sizes of the cache of a model, and of the proposer that speculates for it.

    Raises:
        UsageError: they do not fit the model or the device.
    """
    device = deployment.device
    block_size = config.block_size_on(device)
    others_per_token = 0 if proposer is None else proposer.kv_bytes_per_token
    others_per_request = 0 if proposer is None else proposer.bytes_per_request
    state_bytes = slot_bytes(arch, config.num_kept) + others_per_request
    # Saved states are those of the model alone: a draft with recurrences could not go on from a prefix.
    saves_states = config.prefix_cache and bool(arch.states) and not others_per_request
    max_model_len, num_blocks = config.size_cache(
        arch,
        deployment.dtype,
        device,
        bytes_per_token=kv_bytes_per_token + others_per_token,
        state_bytes=state_bytes,
        saved_bytes=slot_bytes(arch, 1) if saves_states else 0,
    )
    num_first = config.max_batch_size if state_bytes else 0
    return CachePlan(
        max_model_len=max_model_len,
        num_blocks=num_blocks + num_first,
        num_first=num_first,
        num_saved=config.num_saved((num_blocks - 1) * block_size) if saves_states else 0,
        saves_states=saves_states,
        blocks_hold_all=num_first == 0 and not others_per_token,
    )
