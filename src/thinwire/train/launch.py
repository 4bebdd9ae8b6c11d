"""From a configuration to connected workers: devices, threads, process groups."""

import datetime
import hashlib
import importlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.address import Address, connect
from thinwire.aggregate import DropOutliers
from thinwire.elastic.timeouts import ElasticOptions
from thinwire.elastic.transport import Elastic
from thinwire.errors import ConfigurationError, ExchangeError, check
from thinwire.handshake import check_descriptions, encode_description, flatten_description
from thinwire.outer_loop import OuterLoop
from thinwire.runs.folder import RunFolder
from thinwire.runs.schema import identity_fields
from thinwire.security.token import find_token
from thinwire.train.config import Runtime, TrainConfig
from thinwire.train.data import LoadedData
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

_OF_A_MACHINE = ("machine.", "periods.", "accumulate")


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig:
    """Address and settings with which this process joins a run.

    Args:
        at: address of the run, with this worker's number where the number of workers is fixed.
        identity: name of this worker in the run; default the names of the run folder and the host,
            so that a restart in the same folder is the same worker.
        token_file: file with the run's token; default the environment variable THINWIRE_TOKEN.
        patience: how long the others wait for a slow worker, as a share of a round.
        min_workers: a round waits for this many workers.
    """

    at: Address
    identity: str | None = None
    token_file: Path | None = None
    patience: float = 0.5
    min_workers: int = 1

    @property
    def is_fixed(self) -> bool:
        """Whether the number of workers is fixed."""
        return self.at.worker is not None

    @property
    def run_name(self) -> str:
        """Name under which its workers are shown as one group."""
        return str(replace(self.at, worker=None, workers=None))

    def identity_in(self, out: Path) -> str:
        """Name, in the run, of the worker with folder `out`."""
        if self.is_fixed:
            return f"{self.at.run} worker {self.at.worker}".strip()
        return self.identity or f"{out.resolve().name}@{socket.gethostname()}"

    def check_launch(self, worker_size: int) -> None:
        """Raise `ConfigurationError` unless the processes here are a worker of this many ranks."""
        ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1
        check(
            ranks == worker_size,
            f"join with --worker-size {worker_size} in {ranks} process{'es' if ranks > 1 else ''}",
            because="all ranks of one torchrun are one worker, which ends with any of them",
            do=f"start one torchrun --nproc-per-node {worker_size} each, or 1 without torchrun",
        )

    def connect(self, config: TrainConfig, out: Path, group: Any = None) -> Transport:
        """The connection to the other workers, sealed if there is a token.

        Args:
            config: the run's configuration.
            out: the run's folder.
            group: process group of this worker's ranks; None for a worker of one rank.
        """
        token = None if self.token_file is None else find_token(self.token_file)
        timeout_s = config.machine.timeout_s
        if not self.at.run:
            return connect(str(self.at), token=token, timeout_s=timeout_s)
        # Keep the others' messages since this worker's oldest checkpoint.
        periods, every = config.periods, config.method.sync_every
        rounds = -(-periods.checkpoint_steps // every) * periods.keep_checkpoints
        options = ElasticOptions(
            patience=self.patience,
            min_workers=self.min_workers,
            timeout_s=timeout_s if self.is_fixed or timeout_s != Runtime().timeout_s else None,
        )
        return Elastic(
            self.at.place,
            run=self.at.run,
            workers=self.at.workers,
            worker=self.at.worker,
            token=token,
            identity=None if self.is_fixed else self.identity_in(out),
            group=group,
            options=options,
            keep=2 + rounds if self.is_fixed else None,
            cache=None if self.is_fixed else out / "snapshot",
        )

    def place(self, transport: Transport) -> WorkerIdentity:
        """Which worker of the run `transport` connects.

        In an elastic run its name seeds its random numbers: a restart is the same worker.
        """
        if (k := self.at.worker) is not None:
            return WorkerIdentity(block=k, first_stream=k)
        assert isinstance(transport, Elastic)
        mixed = hashlib.sha256(transport.identity.encode()).digest()
        return WorkerIdentity(first_stream=int.from_bytes(mixed[:6], "little"))


def resolve(
    config: TrainConfig, elastic: ElasticConfig | None = None, *, begun: RunFolder | None = None
) -> TrainConfig:
    """`config` with the device, threads and number of workers of this machine and launch.

    An elastic run leaves outliers out of its means (`DropOutliers`) by default.

    Args:
        config: the run's configuration.
        elastic: settings of a worker that joins a run by its address.
        begun: folder of a run to resume, which keeps its aggregate; None for a new run.

    Raises:
        ConfigurationError: the device is missing, or the ranks do not make whole workers.
    """
    machine = config.machine
    is_elastic = elastic is not None and not elastic.is_fixed
    if is_elastic:
        config.method.check_elastic()
    # The ranks of a torchrun are one worker there, so `config` has the number of workers.
    if elastic is not None:
        elastic.check_launch(machine.worker_size)
        workers, here = config.workers, machine.worker_size
    else:
        workers = count_workers(config.workers, machine.worker_size)
        here = machine.worker_size * workers
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", here))
    threads = machine.threads or max(1, len(cores()) // on_this_host)
    machine = replace(machine, threads=threads, device=_device(machine.device))
    config = replace(config, workers=workers, machine=machine)
    if begun is not None:
        # Elastic runs of earlier versions have no limit on outliers.
        is_elastic = (is_elastic or begun.is_elastic()) and _drops_outliers(begun.config())
    if not is_elastic or _drops_outliers(config.describe()):
        return config
    aggregate = DropOutliers(aggregate=config.method.aggregate)
    return replace(config, method=replace(config.method, aggregate=aggregate))


def _drops_outliers(description: Mapping[str, Any]) -> bool:
    # `DropOutliers` may be inside another aggregate.
    fields = flatten_description(description.get("method", {}).get("aggregate", {}))
    return DropOutliers.__name__ in fields.values()


def join(config: TrainConfig) -> None:
    """Join the default process group.

    Raises:
        ExchangeError: the others cannot be reached in time.
    """
    # If first imported while a group exists, its caches keep the group: gloo's threads then
    # survive destroy_process_group() and sometimes abort the process as it exits.
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
    config: TrainConfig, data: LoadedData, member: ElasticConfig | None = None, out: Path = Path()
) -> WorkerGroup:
    """The workers of this process, connected.

    Args:
        config: the run's configuration, resolved.
        data: the loaded data.
        member: which worker of a run with an address this is; None for the workers of this process
            or of this torchrun.
        out: the worker's folder.
    """
    torch.set_num_threads(config.machine.threads)
    device = torch.device(config.machine.device)
    if member is not None:
        return _assemble_member(config, data, member, out)
    if not under_torchrun():
        workers = [_numbered(config, data, each, Ranks()) for each in in_process(config.workers)]
        return simulated(workers, data.validation[:1, :-1])
    everyone = sealed_by_default(Distributed())
    # Ranks that disagree, say on the number of steps, would wait for each other forever.
    _compare(everyone, common_fields(config, data, ("machine.threads",)), "the ranks' arguments")
    worker = _numbered(config, data, *_groups_of(config, everyone))
    return WorkerGroup(
        [worker], ranks=everyone.world_size, gather=partial(gather_values, device=device)
    )


def _numbered(config: TrainConfig, data: LoadedData, transport: Transport, ranks: Ranks) -> Worker:
    k = transport.rank
    identity = WorkerIdentity(number=k, evaluators=config.workers, block=k)
    return Worker(config, data, partial(OuterLoop, transport=transport), identity, ranks)


def _assemble_member(
    config: TrainConfig, data: LoadedData, member: ElasticConfig, out: Path
) -> WorkerGroup:
    if not member.is_fixed:
        # For a stream, which has no shares, this raises before any request to the store.
        data.training.samples(0, 1, config.seed)
    ranks, group = Ranks(), dist.group.WORLD if config.machine.worker_size > 1 else None
    if group is not None:
        ranks = FsdpRanks(group, torch.device(config.machine.device))
    transport = member.connect(config, out, group)
    try:
        _compare(transport, common_fields(config, data), "the workers' arguments")
        connect_loop = partial(OuterLoop, transport=transport)
        worker = Worker(config, data, connect_loop, member.place(transport), ranks)
    except BaseException:
        transport.close()
        raise
    return WorkerGroup([worker], ranks=ranks.size, gather=ranks.gather)


def _compare(transport: Transport, fields: Mapping[str, str], what: str) -> None:
    mine = encode_description(fields)
    check_descriptions(transport.announce(mine, RoundTag(what=what, round=0)))


def _groups_of(config: TrainConfig, everyone: Transport) -> tuple[Transport, Ranks]:
    """The connection to the same shard of all workers, and the ranks of this worker."""
    machine = config.machine
    if machine.worker_size == 1:
        return everyone, Ranks()
    grid = torch.arange(everyone.world_size, device="cpu").view(config.workers, machine.worker_size)
    timeout = datetime.timedelta(seconds=machine.timeout_s)
    split: Any = partial(dist.new_subgroups_by_enumeration, timeout=timeout)
    across, inside = (split(groups.tolist())[0] for groups in (grid.T, grid))
    return sealed_by_default(Distributed(across)), FsdpRanks(inside, torch.device(machine.device))


def common_fields(
    config: TrainConfig, data: LoadedData, own: tuple[str, ...] = _OF_A_MACHINE
) -> dict[str, str]:
    """Settings that workers on different machines must share: all but their `own`."""
    fields = {"corpus": data.fingerprint, **identity_fields(config.describe())}
    return {field: value for field, value in fields.items() if not field.startswith(own)}


def _device(name: str) -> str:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and under_torchrun():
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        torch.zeros(1, device=name).item()  # fails on device "meta", which has no values
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"train on device {name!r}",
            because=str(error).splitlines()[0],
            do="pass --device cpu, or auto to use a GPU if there is one",
        ) from error
    return name
