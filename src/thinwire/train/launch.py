"""From a configuration to connected workers: devices, threads, process groups."""

import datetime
import importlib
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.aggregate import DropOutliers
from thinwire.elastic.transport import Elastic
from thinwire.errors import ConfigurationError, CorpusError, ExchangeError, check
from thinwire.handshake import (
    check_descriptions,
    encode_description,
    flatten_description,
)
from thinwire.runs.folder import RunFolder
from thinwire.runs.schema import identity_fields
from thinwire.train.config import TrainConfig
from thinwire.train.data import LoadedData
from thinwire.train.workers.elastic import ElasticConfig
from thinwire.train.workers.group import WorkerGroup, cores, simulated
from thinwire.train.workers.ranks import (
    FsdpRanks,
    Ranks,
    count_workers,
    gather_values,
    under_torchrun,
)
from thinwire.train.workers.worker import Worker, WorkerIdentity
from thinwire.transport import Distributed, RoundTag, Transport, in_process
from thinwire.transport.sealed import sealed_by_default


def resolve(
    config: TrainConfig,
    elastic: ElasticConfig | None = None,
    *,
    begun: RunFolder | None = None,
) -> TrainConfig:
    """`config` with device, threads and number of workers of this machine and launch.

    An elastic run leaves outliers out of its means (`DropOutliers`) by default.

    Args:
        config: of the run.
        elastic: of a worker that joins a run by its address.
        begun: folder of a run to resume, which keeps its aggregate; None for a new run.

    Raises:
        ConfigurationError: a missing device, or ranks that do not make whole workers.
    """
    machine = config.machine
    # The ranks of a torchrun are one worker there, so `config` has the number of workers.
    if elastic is not None:
        elastic.check(config)
        workers, here = config.workers, machine.worker_size
    else:
        workers = count_workers(config.workers, machine.worker_size)
        here = machine.worker_size * workers
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", here))
    threads = machine.threads or max(1, len(cores()) // on_this_host)
    machine = replace(machine, threads=threads, device=_device(machine.device))
    config = replace(config, workers=workers, machine=machine)
    comes_and_goes = elastic is not None and not elastic.is_fixed
    is_elastic = comes_and_goes or (begun is not None and begun.is_elastic())
    # Elastic runs of earlier versions have none.
    began_so = begun is None or _drops_outliers(begun.config())
    if not (is_elastic and began_so) or _drops_outliers(config.describe()):
        return config
    aggregate = DropOutliers(aggregate=config.method.aggregate)
    return replace(config, method=replace(config.method, aggregate=aggregate))


def _drops_outliers(description: Mapping[str, Any]) -> bool:
    # It may be inside another aggregate.
    fields = flatten_description(description.get("method", {}).get("aggregate", {}))
    return DropOutliers.__name__ in fields.values()


def join(config: TrainConfig) -> None:
    """Join the default process group.

    Raises:
        ExchangeError: the others cannot be reached in time.
    """
    # If this is first imported while a group exists, its caches keep it: gloo's threads then
    # survive destroy_process_group() and now and then abort the process as it exits.
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
            do="start all ranks with the same torchrun rendezvous, whose port must be open",
        ) from error


def assemble(
    config: TrainConfig,
    data: LoadedData,
    member: ElasticConfig | None = None,
    out: Path | None = None,
) -> WorkerGroup:
    """The workers of this process, connected.

    Args:
        config: resolved.
        data: loaded.
        member: which worker of a run with an address this is; None for the workers of this process
            or of this torchrun.
        out: folder of the worker.
    """
    torch.set_num_threads(config.machine.threads)
    device = torch.device(config.machine.device)
    if member is not None:
        return _assemble_member(config, data, member, out or Path())
    all_ranks = config.workers * config.machine.worker_size
    check(
        len(data.validation) >= all_ranks,
        f"evaluate with {config.workers} workers",
        because=f"there are {len(data.validation)} validation sequences for {all_ranks} ranks",
        do="pass a longer corpus, a shorter --sequence-length or fewer --workers",
        kind=CorpusError,
    )
    if not under_torchrun():
        workers = [_numbered(config, data, each, Ranks()) for each in in_process(config.workers)]
        return simulated(workers, data.validation[:1, :-1])
    everyone = sealed_by_default(Distributed())
    # Ranks that disagree, on the number of steps say, would wait for each other in vain.
    _compare(everyone, _common(config, data), "the ranks' arguments")
    worker = _numbered(config, data, *_groups_of(config, everyone))
    return WorkerGroup([worker], ranks=all_ranks, gather=partial(gather_values, device=device))


def _numbered(config: TrainConfig, data: LoadedData, transport: Transport, ranks: Ranks) -> Worker:
    k = transport.rank
    identity = WorkerIdentity(number=k, evaluators=config.workers, block=k)
    return Worker(config, data, transport, identity, ranks)


def _assemble_member(
    config: TrainConfig, data: LoadedData, member: ElasticConfig, out: Path
) -> WorkerGroup:
    if not member.is_fixed:
        # Raises for a stream, which has no shares, before the store is asked.
        data.training.shares(rows=1, sync_every=1, seed=config.seed)
    ranks, group = Ranks(), dist.group.WORLD if config.machine.worker_size > 1 else None
    if group is not None:
        ranks = FsdpRanks(group, torch.device(config.machine.device))
    transport = member.connect(config, out, group)
    try:
        _compare(transport, common_fields(config, data), "the workers' arguments")
        worker = Worker(config, data, transport, member.place(transport), ranks)
    except BaseException:
        transport.close()
        raise
    store = transport if isinstance(transport, Elastic) else None
    return WorkerGroup([worker], ranks=ranks.size, gather=ranks.gather, is_apart=True, store=store)


def _compare(transport: Transport, fields: Mapping[str, str], what: str) -> None:
    mine = encode_description(fields)
    check_descriptions(transport.announce(mine, RoundTag(what=what, round=0)))


def _groups_of(config: TrainConfig, everyone: Transport) -> tuple[Transport, Ranks]:
    """The connection to the same shard of all workers, and the ranks of this worker."""
    machine = config.machine
    if machine.worker_size == 1:
        return everyone, Ranks()
    grid = torch.arange(everyone.world_size).view(config.workers, machine.worker_size)
    timeout = datetime.timedelta(seconds=machine.timeout_s)
    mine: list[Any] = [
        dist.new_subgroups_by_enumeration(groups.tolist(), timeout=timeout)[0]
        for groups in (grid.T, grid)
    ]
    across, inside = mine
    return sealed_by_default(Distributed(across)), FsdpRanks(inside, torch.device(machine.device))


def _common(config: TrainConfig, data: LoadedData) -> dict[str, str]:
    """Settings that all ranks have in common: all but the number of threads."""
    fields = {"corpus": data.fingerprint, **identity_fields(config.describe())}
    return {field: value for field, value in fields.items() if field != "machine.threads"}


def common_fields(config: TrainConfig, data: LoadedData) -> dict[str, str]:
    """Settings that workers of different machines have in common: not devices, nor intervals."""
    own = ("machine.", "periods.", "accumulate")
    return {f: value for f, value in _common(config, data).items() if not f.startswith(own)}


def _device(name: str) -> str:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and under_torchrun():
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    check(
        not name.startswith("meta"),
        f"train on device {name!r}",
        because="it holds no numbers, only shapes",
        do="pass --device cpu, or auto to use a GPU if there is one",
    )
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"train on device {name!r}",
            because=str(error).splitlines()[0],
            do="pass --device cpu, or auto to use a GPU if there is one",
        ) from error
    return name
