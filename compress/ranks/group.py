"""Several processes as the ranks of one job: what torchrun starts, joined by torch.distributed (gloo on CPUs,
NCCL on GPUs).

Work and failures travel through the launcher's key-value store, where waiting costs nothing: a rank may wait
for hours while rank 0 exports or validates. Values travel through the process group in the form of
`values.py`, each tensor received into its final memory. Every wait checks the store now and then, so a
failing rank stops all others with its own message, and a wait ends after `timeout_s`.

What it does not do: elastic membership. A job is continued with another number of ranks by starting it again;
its resume points are the same.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from compress.context import NUM_SHARDS
from compress.errors import CompressError, EnvironmentUnfit, RankStopped, Terminated, UsageError
from compress.ranks.values import as_bytes, decode, encode

T = TypeVar("T")
TIMEOUT_S = 3600.0
"""Longest wait for one value. Ranks wait for one another as long as one linear group takes, minutes on a
CPU."""
POLL_S = 0.2
"""Time between two checks of the store."""
FAILURE_SEEN_S = 30.0
"""How long a failed rank waits until rank 0 has read its failure: a launcher kills all processes when the
first one ends."""
LEAVE_S = 5.0
"""How long rank 0, whose process may hold the store, waits at the end for the others to leave."""
BUCKET_VALUES = 1 << 26
"""Largest number of values that one all-reduce exchanges."""
_FAILURE = "failed"
_FAILURE_SEEN = "heard"
_LEFT = "gone"


@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher started."""

    rank: int
    size: int
    local_rank: int

    @staticmethod
    def from_environ(environ: Mapping[str, str]) -> "Launch | None":
        """Return what torchrun's variables define, None for a process that was started alone.

        Raises:
            UsageError: more ranks than a calibration set has shards.
        """
        needed = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
        if not needed <= environ.keys() or environ["WORLD_SIZE"] == "1":
            return None
        rank = int(environ["RANK"])
        launch = Launch(rank, int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_RANK", rank)))
        if launch.size > NUM_SHARDS:
            raise UsageError(
                f"{launch.size} ranks were started, and a calibration set is summed in {NUM_SHARDS} shards, "
                f"so that more ranks would have nothing to do. Start {NUM_SHARDS} at most."
            )
        return launch


class TorchRanks:
    """`Ranks` over a process group.

    A received tensor lies on this rank's device if it lay on the sender's device, and on the CPU if it lay
    there.
    """

    def __init__(
        self, launch: Launch, device: torch.device, store: Any, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.rank = launch.rank
        self.size = launch.size
        self._device = device
        self._store = store
        self._timeout_s = timeout_s
        self._num_dispatched = 0
        self._thread: threading.Thread | None = None

    def dispatch(self, work: Mapping[str, Any] | None) -> None:
        self._store.set(f"work-{self._num_dispatched}", json.dumps(work))
        self._num_dispatched += 1

    def receive_work(self) -> Iterator[Any]:
        """Yield each piece of work that rank 0 dispatches, until it leaves.

        Raises:
            RankStopped: rank 0 failed.
        """
        while True:
            while not self._store.check([f"work-{self._num_dispatched}"]):
                self.raise_if_failed()
                time.sleep(POLL_S)
            work = json.loads(self._store.get(f"work-{self._num_dispatched}"))
            self._num_dispatched += 1
            if work is None:
                return
            yield work

    def leave(self) -> None:
        """End the job: rank 0 dispatches nothing more, and returns when the others have left or after
        `LEAVE_S`."""
        if self.rank == 0:
            self.dispatch(None)
        self._count_as_left()

    def _count_as_left(self) -> None:
        deadline = time.monotonic() + LEAVE_S
        num_left = self._store.add(_LEFT, 1)
        while self.rank == 0 and num_left < self.size and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)
            num_left = self._store.add(_LEFT, 0)

    def barrier(self) -> None:
        self.all_reduce([torch.zeros(1, device=self._device)])

    def broadcast(self, value: T, *, source: int = 0) -> T:
        if self.rank == source:
            self._exchange(lambda: self._send_value(value, lambda part: dist.broadcast(part, source)))
            return value
        received: T = self._exchange(lambda: self._receive_value(lambda part: dist.broadcast(part, source)))
        return received

    def from_lead(self, make: Callable[[], T]) -> T:
        made: Any = make() if self.rank == 0 else None
        received: T = self.broadcast(made)
        return received

    def all_gather(self, value: T) -> list[T]:
        return [self.broadcast(value, source=source) for source in range(self.size)]

    def send(self, value: T, *, source: int, to: int) -> T | None:
        if source == to:
            return value if self.rank == to else None
        if self.rank == source:
            self._exchange(lambda: self._send_value(value, lambda part: dist.send(part, to)))
        elif self.rank == to:
            received: T = self._exchange(lambda: self._receive_value(lambda part: dist.recv(part, source)))
            return received
        return None

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(self._device)
            self._exchange(lambda flat=flat: dist.all_reduce(flat))
            for tensor, total in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def fail(self, error: BaseException) -> bool:
        """Tell the other ranks why this one stops; of several failures the first one counts.

        Return whether rank 0 has read the failure within `FAILURE_SEEN_S`.
        """
        with contextlib.suppress(RuntimeError):  # the store may have ended with the rank that failed first
            if not isinstance(error, RankStopped):
                self._store.compare_set(_FAILURE, "", json.dumps(self._failure(error)))
            if self.rank == 0:
                self._store.set(_FAILURE_SEEN, "")
            deadline = time.monotonic() + FAILURE_SEEN_S
            while time.monotonic() < deadline:
                if self._store.check([_FAILURE_SEEN]):
                    self._count_as_left()
                    return True
                time.sleep(POLL_S)
        return False

    def abort(self, error: BaseException) -> None:
        """Abandon an exchange that is under way.

        If its thread does not return, the process will end without waiting for it: an interpreter that shuts
        down while a thread is inside gloo is aborted, and the exit code of `error` would be lost.
        """
        if dist.group.WORLD is not None:
            dist.group.WORLD.abort()
        if self._thread is not None:
            self._thread.join(LEAVE_S)
            if self._thread.is_alive():
                atexit.register(_end_at_once, _exit_code(error))

    def raise_if_failed(self) -> None:
        """Raise RankStopped if a rank has failed, EnvironmentUnfit if the key-value store of the process that
        launched the ranks is gone."""
        try:
            failure = self._store.get(_FAILURE) if self._store.check([_FAILURE]) else b""
        except RuntimeError as error:
            raise EnvironmentUnfit(
                f"rank {self.rank}: the launcher of this job is gone, and the other ranks with it."
            ) from error
        if failure:
            record = json.loads(failure)
            raise RankStopped(record["message"], exit_code=record["code"])

    def _failure(self, error: BaseException) -> dict[str, Any]:
        message = str(error) if isinstance(error, CompressError) else f"{type(error).__name__}: {error}"
        return {
            "code": _exit_code(error),
            "message": f"rank {self.rank} of {self.size}: {message}" if self.rank else message,
        }

    def _exchange(self, call: Callable[[], Any]) -> Any:
        """Return the result of a blocking exchange, which runs in a thread because gloo has no wait that can
        be abandoned.

        Raises:
            RankStopped: another rank failed meanwhile.
            EnvironmentUnfit: another rank ended without a message, or `timeout_s` passed.
        """
        exchange = _Exchange(call, self._device)
        self._thread = thread = threading.Thread(target=exchange.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + self._timeout_s
        while True:
            thread.join(POLL_S)
            if not thread.is_alive():
                break
            self.raise_if_failed()
            if time.monotonic() > deadline:
                raise EnvironmentUnfit(
                    f"rank {self.rank} of {self.size} waited {self._timeout_s:.0f} s for another rank: a "
                    "process or the network between them hangs. The same command resumes at the last layer "
                    "that is stored."
                )
        if exchange.error is not None:
            time.sleep(2 * POLL_S)  # a broken connection is noticed before its reason is written
            self.raise_if_failed()
            raise EnvironmentUnfit(
                f"rank {self.rank} of {self.size} lost another rank: its process ended without a message "
                "(killed, or out of memory). The same command resumes at the last layer that is stored. "
                f"({str(exchange.error).strip().splitlines()[0]})"
            ) from exchange.error
        return exchange.value

    def _send_value(self, value: object, send: Callable[[Tensor], Any]) -> None:
        tensors: list[Tensor] = []
        encoded = json.dumps(encode(value, tensors)).encode()
        send(torch.tensor([len(encoded)], dtype=torch.int64, device=self._device))
        for part in (torch.frombuffer(bytearray(encoded), dtype=torch.uint8), *map(as_bytes, tensors)):
            if part.numel():
                send(part.to(self._device))

    def _receive_value(self, receive: Callable[[Tensor], Any]) -> Any:
        length = torch.empty(1, dtype=torch.int64, device=self._device)
        receive(length)
        encoded = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        receive(encoded)
        tensors: list[Tensor] = []
        value = decode(json.loads(encoded.cpu().numpy().tobytes()), tensors, self._device)
        for target in map(as_bytes, tensors):
            if target.numel():
                received = target
                if target.device != self._device:
                    received = torch.empty_like(target, device=self._device)
                receive(received)
                if received is not target:
                    target.copy_(received)
        return value


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield consecutive tensors of one dtype, at most `BUCKET_VALUES` values: each exchange has a fixed
    latency."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        num_values = sum(each.numel() for each in bucket) + tensor.numel()
        if bucket and (tensor.dtype != bucket[0].dtype or num_values > BUCKET_VALUES):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


@dataclass
class _Exchange:
    """A blocking call for a thread of its own, and what it returned or raised."""

    call: Callable[[], Any]
    device: torch.device
    value: Any = None
    error: RuntimeError | None = field(default=None)

    def run(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # of this thread
            self.value = self.call()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            self.error = error


def _exit_code(error: BaseException) -> int:
    if isinstance(error, CompressError | Terminated):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _end_at_once(exit_code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


@contextlib.contextmanager
def joined(launch: Launch, device: str, *, timeout_s: float = TIMEOUT_S) -> Iterator[TorchRanks]:
    """Join the ranks of a launch while the block runs. When a block raises, every other rank's next exchange
    raises RankStopped.

    Raises:
        EnvironmentUnfit: not all ranks came, or they compute on different kinds of devices.
    """
    place = torch.device(device)
    backend = "nccl" if place.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    try:
        store, _, _ = next(rendezvous("env://", launch.rank, launch.size, timeout=timeout))
        group_store = PrefixStore("compress-group", store)
        dist.init_process_group(
            backend, store=group_store, rank=launch.rank, world_size=launch.size, timeout=timeout
        )
    except RuntimeError as error:
        raise EnvironmentUnfit(
            f"rank {launch.rank} of {launch.size} cannot reach the others: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
    ranks = TorchRanks(launch, place, PrefixStore("compress", store), timeout_s=timeout_s)
    try:
        _check_devices(ranks, place)
        yield ranks
    except CompressError as error:
        seen = ranks.fail(error)
        ranks.abort(error)
        if seen and ranks.rank > 0:
            raise RankStopped(str(error), exit_code=error.exit_code) from error
        raise
    except BaseException as error:
        ranks.fail(error)
        ranks.abort(error)
        raise
    ranks.leave()
    dist.destroy_process_group()


def _check_devices(ranks: TorchRanks, device: torch.device) -> None:
    """Raise EnvironmentUnfit if this rank's device is of another kind than rank 0's."""
    name = f"a CPU with {torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    lead = ranks.broadcast(name)
    if name != lead:
        raise EnvironmentUnfit(
            f"it computes on {name} and rank 0 on {lead}: their sums would differ. Give all ranks the same "
            "device."
        )
