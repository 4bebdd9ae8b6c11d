"""From a method and a worker to its fragments: each one's states, made and connected."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from thinwire.aggregate import MeanOverWorkers
from thinwire.codecs import Identity
from thinwire.exchange import Automatic, ExchangeContext, ExchangeState
from thinwire.feedback import NoFeedback
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
from thinwire.storage import OnDevice, StatePlacement
from thinwire.transport import Transport


class FragmentBuilder:
    """Makes the fragments of one worker, for any number of workers.

    Args:
        method: fills the slots.
        live: the worker's weights.
        transport: to the other workers.
        storage: of the outer state.
        is_fixed: whether the same workers take part to the end.

    Raises:
        ConfigurationError: a parameter is sharded in a way that cannot be exchanged.
    """

    def __init__(
        self,
        method: Method,
        live: LiveWeights,
        transport: Transport,
        storage: StatePlacement,
        *,
        is_fixed: bool,
    ) -> None:
        check_placements(live.parameters)
        self._method, self._live, self._is_fixed = method, live, is_fixed
        self._transport, self.storage = transport, storage
        self.has_own_anchors = method.outer.has_own_anchors
        self._shapes = live.shapes()
        self._roles = {n: role.value for n, role in parameter_roles(live.model).items()}

    def fragments(self) -> list[FragmentState]:
        """One state for each fragment of the method, in its order."""
        overlap = self._method.overlap
        late = overlap.steps(sync_every=self._method.sync_every) > 0
        workers, rank = self._transport.world_size, self._transport.rank
        return [
            FragmentState(
                fragment,
                self.layout(fragment),
                self.outer_state(fragment, workers),
                self.exchange_state(fragment, workers, rank),
                self._transport,
                saved_rounds=overlap.at_once if late else 0,
            )
            for fragment in self.plan()
        ]

    def outer_state(self, fragment: Fragment, workers: int) -> OuterState:
        """A fresh outer state of `fragment` for any number of workers."""
        context = FragmentContext(
            live=self._live,
            names=fragment.names,
            workers=workers,
            storage=self.storage,
            alone=workers == 1 and self._is_fixed,
        )
        return self._method.outer.bind(context, self._method.overlap)

    def exchange_state(self, fragment: Fragment, workers: int, rank: int) -> ExchangeState:
        """A fresh exchange of `fragment` for any number of workers."""
        return self._method.exchange.bind(self._context(fragment, workers, rank))

    def reader(self, fragment: Fragment, workers: int) -> ExchangeState:
        """An exchange of `fragment` that only reads what any number of workers wrote."""
        # It is gone in a moment: the ledger counts what stays.
        uncounted = OnDevice(self.storage.device)
        context = replace(self._context(fragment, workers, 0), storage=uncounted)
        return self._method.exchange.bind(context)

    def mean_exchange(self, fragment: Fragment, workers: int, rank: int) -> ExchangeState:
        """An exchange for the mean of all workers' vectors of `fragment`, in fp32."""
        context = replace(
            self._context(fragment, workers, rank),
            codec=Identity(),
            feedback=NoFeedback(),
            aggregate=MeanOverWorkers(),
            # They may have come together.
            warns_of_same_work=False,
            # All wait for it: a worker that refused alone would leave the others waiting.
            refuses_own=False,
        )
        return Automatic().bind(context)

    def describe(self, layouts: Sequence[Layout]) -> dict[str, str]:
        """All that must be equal on all workers, and in a checkpoint, as one text per field."""
        parameters = self._live.parameters
        segments = [layout.segments for layout in layouts]
        shardings = {name: sharding_of(p) for name, p in parameters.items()}
        return flatten_description(
            {
                "method": self._method.describe(),
                **({"workers": self._transport.world_size} if self._is_fixed else {}),
                "parameters": {name: str(list(p.shape)) for name, p in parameters.items()},
                # Equal shapes in another order would be averaged crosswise.
                "wire order": [f"{s.name} ({s.role})" for layout in segments for s in layout],
                "fragment sizes": [len(layout) for layout in segments],
                # Equal shapes may be other parts of the same parameter.
                "sharding": {name: text for name, text in shardings.items() if text},
            }
        )

    def plan(self) -> Iterator[Fragment]:
        """The method's fragments; one that ranks of this worker share in part is cut in two."""
        # All ranks of a worker must plan alike, so the plan sees nothing of this rank's shards.
        parts = list(parts_of(self._live.model).values())
        planned = self._method.fragments.plan(parts, sync_every=self._method.sync_every)
        index = 0
        for fragment in planned:
            for names in by_holders(fragment.names, self._live.parameters):
                ordered = wire_order({name: self._shapes[name] for name in names})
                yield replace(fragment, index=index, names=ordered)
                index += 1

    def layout(self, fragment: Fragment) -> Layout:
        """The places of the parameters of `fragment` in its vector."""
        return Layout.of({name: self._shapes[name] for name in fragment.names}, self._roles)

    def _context(self, fragment: Fragment, workers: int, rank: int) -> ExchangeContext:
        return ExchangeContext(
            codec=self._method.codec,
            feedback=self._method.feedback,
            aggregate=self._method.aggregate,
            layout=self.layout(fragment),
            fragment=fragment.index,
            workers=workers,
            rank=rank,
            storage=self.storage,
            drops_bad_messages=not self._is_fixed,
            has_own_anchors=self.has_own_anchors,
            # Weights are sent then, which are equal before anything was trained.
            warns_of_same_work=not self.has_own_anchors,
        )
