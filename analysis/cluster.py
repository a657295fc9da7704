"""Work done on a Dask cluster: the same blocks, seeds and arithmetic as here, so the same numbers.

A block (of trials, of training runs, or one run of a language model) is a task. Results stream back as they finish;
what a lost worker had in hand is done again elsewhere by Dask. ``distributed`` (extra ``cluster``) is imported here and
only here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol

_MOST_BYTES = 1 << 24  # of one task: it travels with every block, and a lost worker costs nothing but its blocks
_WAITING = 64  # tasks sent ahead; more would only fill the scheduler
CONNECT_SECONDS = 10
NUMERICS = ("numpy",)  # the packages whose version decides the bits of a block, unless a task says more


class Task(Protocol):
    """What can be sent: it makes the function that does a block, in whichever process it arrives."""

    def drawer(self) -> Callable[[Any], Any]: ...


class Parcel(NamedTuple):
    """A task as it travels: pickled once, with what its numbers depend on besides."""

    content: bytes
    made_with: str
    packages: tuple[str, ...] = NUMERICS


def numerics(packages: Sequence[str] = NUMERICS) -> str:
    """What the bits of a block depend on: klgrad, the packages that compute it, operating system and arithmetic."""
    from importlib.metadata import PackageNotFoundError, version

    from klgrad.analysis.arithmetic import arithmetic, described, system

    found = []
    for name in ("klgrad", *packages):
        with suppress(PackageNotFoundError):  # a source tree on the path has no version
            found.append(f"{name} {version(name)}")
    computes = described(arithmetic(torch="torch" in packages))
    return f"{', '.join(found)} on {system()} ({computes})"


def draw_parcel(parcel: Parcel, block: Any) -> Any:
    """A block on a worker.

    Raises:
        ValueError: on a worker with other packages, another platform or vector unit, whose numbers could differ in
            the last digit.
    """
    if parcel.made_with != numerics(parcel.packages):
        raise ValueError(
            f"a worker has {numerics(parcel.packages)} and this process {parcel.made_with}: "
            "the same numbers need the same versions, platform and vector unit everywhere; NPY_DISABLE_CPU_FEATURES, "
            "OPENBLAS_CORETYPE and ATEN_CPU_CAPABILITY make CPUs alike"
        )
    return _unpacked(parcel.content)(block)


@lru_cache(maxsize=4)
def _unpacked(content: bytes) -> Any:
    """The drawing function of a task, its tables made once for each worker."""
    import pickle

    return pickle.loads(content).drawer()  # what Dask itself would do with every task that it is sent


def _distributed() -> Any:
    try:
        return import_module("distributed")
    except ImportError:
        raise ValueError(
            "a scheduler needs Dask's distributed, which is not installed: pip install 'klgrad[cluster]'"
        ) from None


def draw_on_cluster(
    address: str,
    task: Task,
    keep: Callable[[Any, Any], None],
    todo: Sequence[tuple[int, Any]],
    packages: tuple[str, ...] = NUMERICS,
) -> Generator[tuple[int, Any]]:
    """Yield ``(index, result)`` as blocks finish on the cluster whose scheduler is at ``address``; ``keep`` each here.

    Args:
        packages: those whose versions must be the same on every worker.

    Raises:
        ValueError: without ``distributed``, without a scheduler at the address, for a request too large to travel
            with every block, or for a cluster that keeps losing its workers.
    """
    distributed = _distributed()
    parcel = Parcel(
        import_module("cloudpickle").dumps(task), numerics(packages), packages
    )  # distributed's own: it knows lambdas
    if len(parcel.content) > _MOST_BYTES:
        raise ValueError(
            f"the request takes {len(parcel.content):,} bytes, and at most {_MOST_BYTES:,} travel with every block: "
            "run it here, or share its pair's parameters"
        )
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"no Dask scheduler answers at {address}: {error}") from None
    with client:
        waiting = list(reversed(todo))
        sent: dict[Any, tuple[int, Any]] = {}

        def send() -> Any:
            i, block = waiting.pop()
            future = client.submit(draw_parcel, parcel, block, pure=False)
            sent[future] = i, block
            return future

        futures = distributed.as_completed([send() for _ in range(min(_WAITING, len(waiting)))], loop=client.loop)
        try:
            for future in futures:
                try:
                    result = future.result()
                except distributed.scheduler.KilledWorker as error:
                    raise ValueError(
                        f"the cluster lost one block's worker again and again ({error}): give its workers more memory"
                    ) from None
                if waiting:
                    futures.add(send())
                i, block = sent.pop(future)
                keep(block, result)
                yield i, result
        finally:
            client.cancel(list(sent))
