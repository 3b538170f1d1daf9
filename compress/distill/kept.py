"""A teacher's likeliest tokens on disk, so that several passes over the text and several runs compute them
once.

    <place>/teacher-<digest>/<shard>.safetensors
        ids int32 [n, S, K], log_p float16 [n, S, K], log_tail float32 [n, S]

The digest covers everything that decides the content: teacher, tokens, K, temperature, dtypes. A shard is
complete or absent, and a rank that finds one missing writes it, so a run that was cut goes on and several
ranks may fill the directory at once. Rounding to float16 leaves a distribution that does not quite sum to
one; it is normalised when it is read.

Shapes: N windows, B windows of a batch, S positions, K kept.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from compress.artifact.resume import ResumePoint
from compress.context import Ranks
from compress.digest import digest_json
from compress.distill.losses import TopK
from compress.distill.objective import EVALUATED_TOKENS, Teacher

WINDOWS_OF_A_SHARD = 64
_LAYOUT = 2
"""Part of the digest: raise it when files of the same name would hold something else."""


class KeptLogits:
    """A teacher's likeliest tokens for windows int32 [N, S+1], each of which predicts S tokens."""

    def __init__(
        self,
        place: Path,
        tokens_NS: Tensor,
        *,
        teacher: str,
        tokens: str,
        num_kept: int,
        temperature: float,
        log: Callable[[str], None],
    ) -> None:
        name = {
            "teacher": teacher,
            "tokens": tokens,
            "top_k": num_kept,
            "temperature": temperature,
            "dtype": "float16",
            "layout": _LAYOUT,
        }
        self.directory = place / f"teacher-{digest_json(name).removeprefix('sha256:')[:32]}"
        self._tokens_NS = tokens_NS
        self._num_kept = num_kept
        self._temperature = temperature
        self._log = log
        self._open: dict[int, Any] = {}

    @property
    def num_shards(self) -> int:
        return -(-self._tokens_NS.shape[0] // WINDOWS_OF_A_SHARD)

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are not on disk, or damaged there."""
        return [idx for idx in range(self.num_shards) if self._point(idx).load_tensors() is None]

    def fill(
        self,
        teacher: Teacher,
        ranks: Ranks,
        done: Callable[[int], None],
        *,
        device: torch.device,
    ) -> None:
        """Compute the missing shards with the teacher; `done` is called with the number of shards on disk.

        The windows that are computed at once are a constant of the device: on some CPUs a row's last bits
        depend on them.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        at_once = max(1, EVALUATED_TOKENS[device.type] // self._tokens_NS.shape[1])
        missing = ranks.from_lead(self.missing)  # one list for all: other ranks write while this one looks
        for count, idx in enumerate(missing[ranks.rank :: ranks.size]):
            done(self.num_shards - len(missing) + count * ranks.size)
            windows = self._tokens_NS[idx * WINDOWS_OF_A_SHARD : (idx + 1) * WINDOWS_OF_A_SHARD, :-1]
            parts = [
                teacher.keep(part.to(device=device, dtype=torch.int64), self._num_kept, self._temperature)
                for part in windows.split(at_once)
            ]
            ids, log_p, log_tail = (
                torch.cat([each.cpu() for each in column]) for column in zip(*parts, strict=True)
            )
            self._point(idx).save_tensors(
                {"ids": ids.to(torch.int32), "log_p": log_p.to(torch.float16), "log_tail": log_tail}
            )
        ranks.barrier()  # all shards are written before any is read

    def rows(self, windows_B: list[int]) -> TopK:
        """Return ids [B, S, K], log probabilities [B, S, K] and log tails [B, S] of some windows."""
        found = [self._window(idx) for idx in windows_B]
        ids, log_p, log_tail = (torch.stack(each) for each in zip(*found, strict=True))
        log_p = log_p.to(torch.float32)
        total = torch.logaddexp(log_p.logsumexp(-1), log_tail)
        return TopK(ids, log_p - total.unsqueeze(-1), log_tail - total)

    def _window(self, idx: int) -> tuple[Tensor, ...]:
        shard, row = divmod(idx, WINDOWS_OF_A_SHARD)
        if shard not in self._open:
            self._open[shard] = safe_open(self._file(shard), framework="pt")
        return tuple(self._open[shard].get_slice(name)[row] for name in ("ids", "log_p", "log_tail"))

    def _point(self, shard: int) -> ResumePoint:
        return ResumePoint(self._file(shard), self._log)

    def _file(self, shard: int) -> Path:
        return self.directory / f"{shard:05d}.safetensors"
