"""Several processes as the ranks of one job: what torchrun starts, joined by torch.distributed (gloo on CPUs, NCCL on GPUs).

Two ways to speak. Work and failures go through the launcher's key-value store, which costs nothing to wait on: a follower may wait for
hours while rank 0 exports or validates. Values go through the process group, as JSON without their tensors and then the tensors' bytes,
each straight into the place where it belongs; nothing that arrives is executed. Every wait looks at the store now and then, so that a rank
that fails stops all others with its own sentence, and gives up when nothing has come for `timeout_s`.

What it does not do: elastic membership. A job goes on with another number of ranks by starting it again; its resume points are the same.
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
from compress.errors import CompressError, EnvironmentUnfit, RankStopped, UsageError

T = TypeVar("T")
TIMEOUT_S = 3600.0
"""Longest wait for one value. The ranks' shares of a layer differ by what one group of linears costs, minutes on a CPU."""
LOOK_S = 0.2
"""Between two looks at the store."""
HEARD_S = 30.0
"""How long a rank that failed waits for rank 0 to say so before it ends: a launcher kills all when the first one ends."""
PARTING_S = 5.0
"""How long rank 0, which may be the home of the store, waits at the end until all others have seen it."""
BUCKET_VALUES = 1 << 26
"""Of tensors that are summed over the ranks in one exchange."""
_FAILED = "failed"
_HEARD = "heard"
_GONE = "gone"


@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher started."""

    rank: int
    size: int
    local_rank: int

    @staticmethod
    def of(environ: Mapping[str, str]) -> "Launch | None":
        """What torchrun says in its variables; None for a process started alone.

        Raises:
            UsageError: more ranks than a calibration set has shards.
        """
        if (
            not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys()
            or environ["WORLD_SIZE"] == "1"
        ):
            return None
        launch = Launch(
            int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_RANK", environ["RANK"]))
        )
        if launch.size > NUM_SHARDS:
            raise UsageError(
                f"{launch.size} ranks were started, and a calibration set is summed in {NUM_SHARDS} shards, so that more ranks would have "
                f"nothing to do. Start {NUM_SHARDS} at most."
            )
        return launch


class TorchRanks:
    """`Ranks` over a process group. A tensor arrives on the receiver's device if it lay on the sender's, and on the CPU if it lay there."""

    def __init__(
        self, launch: Launch, device: torch.device, store: Any, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.rank = launch.rank
        self.size = launch.size
        self._device = device
        self._store = store
        self._timeout_s = timeout_s
        self._summoned = 0
        self._thread: threading.Thread | None = None

    def summon(self, work: Mapping[str, Any] | None) -> None:
        self._store.set(f"work-{self._summoned}", json.dumps(work))
        self._summoned += 1

    def summons(self) -> Iterator[Any]:
        """What rank 0 summons this one to, until it dismisses all.

        Raises:
            RankStopped: rank 0 failed.
        """
        while True:
            while not self._store.check([f"work-{self._summoned}"]):
                self.look()
                time.sleep(LOOK_S)
            work = json.loads(self._store.get(f"work-{self._summoned}"))
            self._summoned += 1
            if work is None:
                return
            yield work

    def part(self) -> None:
        """The end: rank 0 asks nothing more of the others, and leaves when they know."""
        if self.rank == 0:
            self.summon(None)
        self._leave()

    def _leave(self) -> None:
        deadline = time.monotonic() + PARTING_S
        gone = self._store.add(_GONE, 1)
        while self.rank == 0 and gone < self.size and time.monotonic() < deadline:
            time.sleep(LOOK_S / 4)
            gone = self._store.add(_GONE, 0)

    def broadcast(self, value: T, *, source: int = 0) -> T:
        if self.rank == source:
            self._watched(lambda: self._each(value, lambda part: dist.broadcast(part, source)))
            return value
        received: T = self._watched(lambda: self._receive(lambda part: dist.broadcast(part, source)))
        return received

    def move(self, value: T | None, *, source: int, to: int) -> T | None:
        if source == to:
            return value if self.rank == to else None
        if self.rank == source:
            self._watched(lambda: self._each(value, lambda part: dist.send(part, to)))
        elif self.rank == to:
            received: T = self._watched(lambda: self._receive(lambda part: dist.recv(part, source)))
            return received
        return None

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(self._device)
            self._watched(lambda flat=flat: dist.all_reduce(flat))
            for tensor, total in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def fail(self, error: BaseException) -> bool:
        """Tell the others why this rank stops; the first to fail is the one that is heard. Whether rank 0 has taken notice."""
        with contextlib.suppress(RuntimeError):  # the store may have gone with whoever failed first
            if not isinstance(error, RankStopped):
                self._store.compare_set(_FAILED, "", json.dumps(self._record(error)))
            if self.rank == 0:
                self._store.set(_HEARD, "")
            deadline = time.monotonic() + HEARD_S
            while time.monotonic() < deadline:
                if self._store.check([_HEARD]):
                    self._leave()
                    return True
                time.sleep(LOOK_S)
        return False

    def abort(self, error: BaseException) -> None:
        """Let go of an exchange that is still under way. If its thread does not come back, the process ends without waiting for it when it
        ends: an interpreter that shuts down under a thread inside gloo is aborted, and its exit code with it."""
        if dist.group.WORLD is not None:
            dist.group.WORLD.abort()
        if self._thread is not None:
            self._thread.join(PARTING_S)
            if self._thread.is_alive():
                atexit.register(_end_at_once, _exit_code(error))

    def _record(self, error: BaseException) -> dict[str, Any]:
        known = isinstance(error, CompressError)
        sentence = str(error) if known else f"{type(error).__name__}: {error}"
        return {
            "code": _exit_code(error),
            "message": f"rank {self.rank} of {self.size}: {sentence}" if self.rank else sentence,
        }

    def look(self) -> None:
        """Raises RankStopped if a rank has failed, EnvironmentUnfit if the launcher's store is gone."""
        try:
            failed = self._store.get(_FAILED) if self._store.check([_FAILED]) else b""
        except RuntimeError as error:
            raise EnvironmentUnfit(
                f"rank {self.rank}: the launcher of this job is gone, and the other ranks with it."
            ) from error
        if failed:
            record = json.loads(failed)
            raise RankStopped(record["message"], exit_code=record["code"])

    def _watched(self, call: Callable[[], Any]) -> Any:
        """Run a blocking exchange beside a look at the store now and then; a thread, because gloo has no wait that can be given up."""
        exchange = _Exchange(call, self._device)
        self._thread = thread = threading.Thread(target=exchange.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + self._timeout_s
        while True:
            thread.join(LOOK_S)
            if not thread.is_alive():
                break
            self.look()
            if time.monotonic() > deadline:
                raise EnvironmentUnfit(
                    f"rank {self.rank} of {self.size} waited {self._timeout_s:.0f} s for another rank: a process or the network between "
                    "them hangs. The same command resumes at the last layer that is stored."
                )
        if exchange.error is not None:
            time.sleep(2 * LOOK_S)  # a broken connection is seen before its reason is written
            self.look()
            raise EnvironmentUnfit(
                f"rank {self.rank} of {self.size} lost another rank: its process ended without a word (killed, or out of memory). The same "
                f"command resumes at the last layer that is stored. ({str(exchange.error).strip().splitlines()[0]})"
            ) from exchange.error
        return exchange.value

    def _each(self, value: object, send: Callable[[Tensor], Any]) -> None:
        tensors: list[Tensor] = []
        plain = json.dumps(_plain(value, tensors)).encode()
        send(torch.tensor([len(plain)], dtype=torch.int64, device=self._device))
        for part in (torch.frombuffer(bytearray(plain), dtype=torch.uint8), *map(_bytes, tensors)):
            if part.numel():
                send(part.to(self._device))

    def _receive(self, receive: Callable[[Tensor], Any]) -> Any:
        length = torch.empty(1, dtype=torch.int64, device=self._device)
        receive(length)
        plain = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        receive(plain)
        tensors: list[Tensor] = []
        value = _restored(json.loads(plain.cpu().numpy().tobytes()), tensors, self._device)
        for place in map(_bytes, tensors):
            if place.numel():
                landed = (
                    place if place.device == self._device else torch.empty_like(place, device=self._device)
                )
                receive(landed)
                if landed is not place:
                    place.copy_(landed)
        return value


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In order, neighbours of one dtype together: an exchange of many small tensors costs what each of them waits."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and (
            tensor.dtype != bucket[0].dtype
            or sum(each.numel() for each in bucket) + tensor.numel() > BUCKET_VALUES
        ):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


@dataclass
class _Exchange:
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
    return (
        error.exit_code
        if isinstance(error, CompressError)
        else 130
        if isinstance(error, KeyboardInterrupt)
        else 1
    )


def _end_at_once(exit_code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """JSON of a value: scalars, lists, tuples, mappings, and objects by class and attributes; tensors go to `tensors`, in order."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_plain(each, tensors) for each in value]
        case tuple():
            return {"tuple": [_plain(each, tensors) for each in value]}
        case dict():
            return {"dict": [[_plain(key, tensors), _plain(each, tensors)] for key, each in value.items()]}
        case Tensor():
            tensors.append(value.detach().contiguous())
            return {
                "tensor": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "host": value.device.type == "cpu",
            }
    return {
        "object": type(value).__qualname__,
        "module": type(value).__module__,
        "attributes": _plain(vars(value), tensors),
    }


def _restored(plain: Any, tensors: list[Tensor], device: torch.device) -> Any:
    """The way back: tensors are made empty, in the same order, for their bytes to land in. An object gets its attributes and no call."""
    match plain:
        case list():
            return [_restored(each, tensors, device) for each in plain]
        case {"tuple": items}:
            return tuple(_restored(each, tensors, device) for each in items)
        case {"dict": items}:
            return {_restored(key, tensors, device): _restored(each, tensors, device) for key, each in items}
        case {"tensor": dtype, "shape": shape, "host": on_host}:
            tensors.append(
                torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if on_host else device)
            )
            return tensors[-1]
        case {"object": name, "module": module, "attributes": attributes}:
            value = object.__new__(getattr(sys.modules[module], name))
            vars(value).update(_restored(attributes, tensors, device))
            return value
    return plain


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def joined(launch: Launch, device: str, *, timeout_s: float = TIMEOUT_S) -> Iterator[TorchRanks]:
    """The ranks of a launch, while the block runs. When a block raises, every other rank's next exchange raises RankStopped.

    Raises:
        EnvironmentUnfit: not all ranks came, or they compute on different kinds of devices.
    """
    place = torch.device(device)
    backend = "nccl" if place.type == "cuda" else "gloo"
    try:
        store, _, _ = next(
            rendezvous("env://", launch.rank, launch.size, timeout=timedelta(seconds=timeout_s))
        )
        group_store = PrefixStore("compress-group", store)
        dist.init_process_group(
            backend,
            store=group_store,
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise EnvironmentUnfit(
            f"rank {launch.rank} of {launch.size} found no way to the others: {str(error).strip().splitlines()[0]}"
        ) from error
    ranks = TorchRanks(launch, place, PrefixStore("compress", store), timeout_s=timeout_s)
    try:
        _check_devices(ranks, place)
        yield ranks
    except CompressError as error:
        heard = ranks.fail(error)
        ranks.abort(error)
        if heard and ranks.rank > 0:
            raise RankStopped(str(error), exit_code=error.exit_code) from error
        raise
    except BaseException as error:
        ranks.fail(error)
        ranks.abort(error)
        raise
    ranks.part()
    dist.destroy_process_group()


def _check_devices(ranks: TorchRanks, device: torch.device) -> None:
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"a CPU with {torch.backends.cpu.get_cpu_capability()}"
    )
    lead = ranks.broadcast(name)
    if name != lead:
        raise EnvironmentUnfit(
            f"it computes on {name} and rank 0 on {lead}: their sums would differ. Give all ranks the same device."
        )
