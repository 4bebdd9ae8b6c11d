"""What the integrations of other libraries' trainers have in common."""

from contextlib import ExitStack

from thinwire.elastic.transport import Elastic
from thinwire.errors import check
from thinwire.outer_loop import OuterLoop
from thinwire.transport import Distributed, Sealed


def check_apart(outer: OuterLoop, trainer_ranks: int) -> None:
    """Raise `ConfigurationError` if a trainer averages gradients over the workers.

    Args:
        outer: this worker's outer loop.
        trainer_ranks: ranks over which the trainer averages gradients.
    """
    joined = outer.transport.ranks if isinstance(outer.transport, Elastic) else 1
    check(
        not outer.is_elastic or trainer_ranks == joined,
        f"train a worker of {trainer_ranks} ranks in an elastic run",
        because=f"it would join with {joined} of them, and the trainer averages gradients over all",
        do="create the trainer's arguments, which start the group, and then pass "
        "Elastic(group=torch.distributed.group.WORLD)",
    )
    transport = outer.transport
    transport = transport.inner if isinstance(transport, Sealed) else transport
    is_one_group = isinstance(transport, Distributed) and outer.workers > 1
    check(
        trainer_ranks == 1 or not is_one_group,
        f"train {outer.workers} workers under one torchrun",
        because=f"the trainer averages gradients over its {trainer_ranks} ranks at every step, and "
        "the workers are among them",
        do="start each worker separately, with THINWIRE_AT="
        "'tcp://HOST:PORT?workers=K&worker=0' (1, 2, ...)",
    )


def logged(outer: OuterLoop) -> dict[str, float]:
    """Numbers of the outer loop that callbacks log."""
    stats = outer.stats
    return {
        "outer/rounds": stats.rounds,
        "outer/sent_bytes": stats.sent_bytes,
        "outer/received_bytes": stats.received_bytes,
        "outer/wait_s": round(stats.wait_s, 3),
        "outer/workers": outer.workers,
    }


def check_same_step(outer: OuterLoop, trainer_step: int) -> None:
    """Raise `ConfigurationError` unless trainer and outer loop are at the same inner step."""
    check(
        trainer_step == outer.inner_step,
        f"resume training from step {trainer_step}",
        because=f"the outer loop is at inner step {outer.inner_step}: one of them was resumed "
        "without the other",
        do="resume from a checkpoint that has the outer state, or start both from the beginning",
    )


def begin_evaluation(evaluation: ExitStack, outer: OuterLoop) -> None:
    """Evaluate the outer parameters until `evaluation` is closed, or this is called again."""
    evaluation.close()  # a trainer may announce an evaluation twice
    evaluation.enter_context(outer.evaluating())
