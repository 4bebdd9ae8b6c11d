"""From a configuration to workers that are ready: devices, threads, process groups."""

import datetime
import importlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import ConfigurationError, CorpusError, ExchangeError
from thinwire.handshake import check_cards, make_card
from thinwire.train.config import TrainConfig
from thinwire.train.cores import cores
from thinwire.train.crew import Crew, Ranked, Simulated
from thinwire.train.data import LoadedData
from thinwire.train.elastic import ElasticCrew, Membership, Roaming
from thinwire.train.ranks import Alone, Ranks, Sharded
from thinwire.train.run_folder import what_counts
from thinwire.train.stacked import Stacked
from thinwire.train.standing import Numbered
from thinwire.train.worker import Worker
from thinwire.transport import Distributed, Transport, in_process

__all__ = [
    "assemble",
    "assemble_elastic",
    "count_workers",
    "is_lead",
    "join",
    "resolve",
    "under_torchrun",
]


def under_torchrun() -> bool:
    """Whether torchrun (or something that sets the same variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_lead() -> bool:
    """Whether this process writes what exists once: rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def resolve(config: TrainConfig, membership: Membership | None = None) -> TrainConfig:
    """`config` with everything filled in that depends on where it runs.

    Args:
        config: of the run.
        membership: of an elastic worker.

    Raises:
        ConfigurationError: a device that is not there, or ranks that are no whole workers.
    """
    machine = config.machine
    _check_simulation(config, membership)
    if membership is not None:
        membership.check(config)
    workers = count_workers(config.workers, machine.worker_size)
    here = workers * machine.worker_size if membership is None else 1
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", here))
    threads = machine.threads or max(1, len(cores()) // on_this_host)
    machine = replace(machine, threads=threads, device=_device(machine.device))
    return replace(config, workers=workers, machine=machine)


def _check_simulation(config: TrainConfig, membership: Membership | None) -> None:
    if config.machine.simulation == "stacked" and (under_torchrun() or membership is not None):
        raise ConfigurationError(
            "stack the workers",
            because="each is a process of its own",
            do="leave out --simulation, or simulate them all in one process",
        )


def count_workers(simulated: int, worker_size: int) -> int:
    """K: what the ranks of torchrun make, or else `simulated`.

    Args:
        simulated: workers of this process, without torchrun.
        worker_size: ranks of a worker.

    Raises:
        ConfigurationError: the ranks are no whole workers, or simulated ones are to be sharded.

    >>> count_workers(4, 1)
    4
    """
    if worker_size > 1 and not under_torchrun():
        raise ConfigurationError(
            f"train workers of {worker_size} ranks in one process",
            because="the ranks of a worker are processes that hold a shard of it each",
            do=f"start thinwire train with torchrun and a multiple of {worker_size} ranks, or "
            "leave --worker-size out",
        )
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else simulated
    if ranks % worker_size:
        raise ConfigurationError(
            f"make workers of {worker_size} ranks",
            because=f"torchrun started {ranks} ranks, which is no multiple",
            do="change --worker-size, or the number of processes",
        )
    return ranks // worker_size


def join(config: TrainConfig) -> None:
    """Become a rank of the default process group.

    Raises:
        ExchangeError: the others cannot be reached in time.
    """
    # Whoever imports this first while a group exists keeps the group alive for ever: gloo's threads
    # then survive destroy_process_group() and now and then abort the process as it exits.
    importlib.import_module("torch._dynamo")
    if config.machine.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(config.machine.device))
    backend = "nccl" if config.machine.device.startswith("cuda") else "gloo"
    timeout = datetime.timedelta(seconds=config.machine.timeout_s)
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise ExchangeError(
            "join the other workers",
            because=str(error).strip().splitlines()[0],
            do="start all ranks with the same torchrun rendezvous, and check that the address and "
            "port of the first are open",
        ) from error


def assemble(config: TrainConfig, data: LoadedData) -> Crew:
    """The workers of this process, connected.

    Args:
        config: resolved.
        data: loaded.
    """
    torch.set_num_threads(config.machine.threads)
    device = torch.device(config.machine.device)
    _check_validation(config, data)
    if under_torchrun():
        everyone = Distributed()
        # Ranks that disagree on the number of steps, say, would wait for each other in vain.
        check_cards(everyone.introduce(make_card(_common(config, data))))
        across, inside = _seat(config, everyone)
        standing = Numbered(across.rank, config.workers)
        return Ranked([Worker(config, data, across, standing, inside, device)])
    workers = [
        Worker(config, data, t, Numbered(t.rank, config.workers), Alone(), device)
        for t in in_process(config.workers)
    ]
    if config.machine.simulation == "stacked":
        return Stacked(workers, threads=config.machine.threads, sample=data.validation)
    sample = data.validation[:1, :-1]
    return Simulated(workers, threads=config.machine.threads, sample=sample)


def assemble_elastic(
    config: TrainConfig, data: LoadedData, membership: Membership, out: Path
) -> Crew:
    """One worker of an elastic run, connected.

    Args:
        config: resolved.
        data: loaded.
        membership: how it takes part.
        out: the run's folder.
    """
    torch.set_num_threads(config.machine.threads)
    # Before anybody is asked: a stream has no shares, wherever the others are.
    data.shares(rows=1, sync_every=1, seed=config.seed)
    transport: Any = membership.connect(out)
    try:
        check_cards(transport.introduce(make_card(_common_elastic(config, data))))
        standing, device = Roaming(transport.identity), torch.device(config.machine.device)
        return ElasticCrew(Worker(config, data, transport, standing, Alone(), device), transport)
    except BaseException:
        transport.close()
        raise


def _seat(config: TrainConfig, everyone: Transport) -> tuple[Transport, Ranks]:
    """The connection to the same shard of all workers, and the ranks of this rank's worker."""
    machine = config.machine
    if machine.worker_size == 1:
        return everyone, Alone()
    grid = torch.arange(everyone.world_size).view(config.workers, machine.worker_size)
    timeout = datetime.timedelta(seconds=machine.timeout_s)
    mine: list[Any] = [
        dist.new_subgroups_by_enumeration(groups.tolist(), timeout=timeout)[0]
        for groups in (grid.T, grid)
    ]
    across, inside = mine
    return Distributed(across), Sharded(inside, torch.device(machine.device))


def _common(config: TrainConfig, data: LoadedData) -> dict[str, str]:
    """What all ranks must agree on: everything but their own host's share of cores."""
    fields = {"corpus": data.fingerprint, **what_counts(config.describe())}
    return {field: value for field, value in fields.items() if field != "machine.threads"}


def _common_elastic(config: TrainConfig, data: LoadedData) -> dict[str, str]:
    """What workers that come and go must agree on: not on where they are nor on what they note."""
    own = ("machine.", "periods.", "accumulate")
    return {f: value for f, value in _common(config, data).items() if not f.startswith(own)}


def _check_validation(config: TrainConfig, data: LoadedData) -> None:
    ranks = config.workers * config.machine.worker_size
    if len(data.validation) < ranks:
        raise CorpusError(
            f"evaluate with {config.workers} workers",
            because=f"the validation side has {len(data.validation)} sequences of "
            f"{config.data.sequence_length} tokens, and each of {ranks} ranks takes its share",
            do="pass a longer corpus, a shorter --sequence-length or fewer --workers",
        )


def _device(name: str) -> str:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and under_torchrun():
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"train on device {name!r}",
            because=str(error).splitlines()[0],
            do="pass --device cpu, or auto to take what is there",
        ) from error
    return name
