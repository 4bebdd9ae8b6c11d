"""From a method and a worker to tracks: each fragment's states, made and connected."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import final

from thinwire.exchange import ExchangeContext, ExchangeState
from thinwire.fragment_state import FragmentState
from thinwire.fragments import Fragment
from thinwire.fragments.layers import parts_of
from thinwire.fragments.layout import Layout, wire_order
from thinwire.fragments.sharding import by_holders, check_placements, sharding_of
from thinwire.handshake import flatten_description
from thinwire.live_weights import LiveWeights
from thinwire.method import Method
from thinwire.optim import parameter_roles
from thinwire.outer import FragmentContext, OuterState
from thinwire.storage import Ledger, OnDevice, StatePlacement
from thinwire.transport import Transport

__all__ = ["FragmentBuilder"]


@final
class FragmentBuilder:
    """What the tracks of a worker are made of.

    Args:
        method: fills the slots.
        replica: the worker's live weights.
        transport: to the other workers.
        storage: where outer state rests.

    Raises:
        ConfigurationError: a parameter is sharded in a way that cannot be exchanged.
    """

    def __init__(
        self, method: Method, replica: LiveWeights, transport: Transport, storage: StatePlacement
    ) -> None:
        check_placements(replica.parameters)
        self._method, self._replica = method, replica
        self._transport, self._storage = transport, storage
        self._shapes = replica.shapes()
        self._roles = {n: role.value for n, role in parameter_roles(replica.model).items()}

    def tracks(self) -> list[FragmentState]:
        """One for each fragment of the method, in its order."""
        return [self._track(fragment) for fragment in self._plan()]

    def states(self, fragment: Fragment) -> tuple[OuterState, ExchangeState]:
        """Fresh states of `fragment` for the workers there are now."""
        wiring = self.wiring(fragment, self._transport.world_size, self._transport.rank)
        return self.outer_state(fragment), self._method.exchange.bind(wiring)

    def outer_state(self, fragment: Fragment, workers: int | None = None) -> OuterState:
        """A fresh outer state of `fragment`, by default for the workers there are now."""
        workers = workers or self._transport.world_size
        seat = FragmentContext(
            replica=self._replica,
            names=fragment.names,
            workers=workers,
            storage=self._storage,
            alone=workers == 1 and not self._transport.forgiving,
        )
        return self._method.outer.bind(seat, self._method.overlap)

    def exchange_state(self, fragment: Fragment, workers: int, rank: int) -> ExchangeState:
        """A fresh exchange of `fragment` for any number of workers."""
        return self._method.exchange.bind(self.wiring(fragment, workers, rank))

    def reader(self, fragment: Fragment, workers: int) -> ExchangeState:
        """An exchange of `fragment` that only reads what any number of workers wrote."""
        # It is gone in a moment: the ledger counts what stays.
        uncounted = OnDevice(self._storage.device, Ledger())
        wiring = replace(self.wiring(fragment, workers, 0), storage=uncounted)
        return self._method.exchange.bind(wiring)

    def describe(self, tracks: Sequence[FragmentState]) -> dict[str, str]:
        """All that must be equal on all workers, and in a checkpoint, as one text per field."""
        parameters, segments = self._replica.parameters, [t.layout.segments for t in tracks]
        shardings = {name: sharding_of(p) for name, p in parameters.items()}
        return flatten_description(
            {
                "method": self._method.describe(),
                **({} if self._transport.forgiving else {"workers": self._transport.world_size}),
                "parameters": {name: str(list(p.shape)) for name, p in parameters.items()},
                # Equal shapes in another order would be averaged crosswise.
                "wire order": [f"{s.name} ({s.role})" for track in segments for s in track],
                "fragment sizes": [len(track) for track in segments],
                # Equal shapes may be other parts of the same parameter.
                "sharding": {name: text for name, text in shardings.items() if text},
            }
        )

    def _plan(self) -> Iterator[Fragment]:
        """The method's fragments; one that ranks of this worker share in part is cut in two."""
        # All ranks of a worker must plan alike, so the plan sees nothing of this rank's shards.
        parts = list(parts_of(self._replica.model).values())
        planned = self._method.fragments.plan(parts, sync_every=self._method.sync_every)
        index = 0
        for fragment in planned:
            for names in by_holders(fragment.names, self._replica.parameters):
                ordered = wire_order({name: self._shapes[name] for name in names})
                yield replace(fragment, index=index, names=ordered)
                index += 1

    def _track(self, fragment: Fragment) -> FragmentState:
        method = self._method
        outer, exchange = self.states(fragment)
        late = method.overlap.steps(sync_every=method.sync_every) > 0
        slots = method.overlap.at_once if late else 0
        return FragmentState(fragment, self._layout(fragment), outer, exchange, slots=slots)

    def _layout(self, fragment: Fragment) -> Layout:
        return Layout.of({name: self._shapes[name] for name in fragment.names}, self._roles)

    def wiring(self, fragment: Fragment, workers: int, rank: int) -> ExchangeContext:
        """What an exchange of `fragment` among `workers` is made of."""
        return ExchangeContext(
            codec=self._method.codec,
            feedback=self._method.feedback,
            aggregate=self._method.aggregate,
            layout=self._layout(fragment),
            fragment=fragment.index,
            transport=self._transport,
            workers=workers,
            rank=rank,
            storage=self._storage,
        )
