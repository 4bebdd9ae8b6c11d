"""What has to be so before a trainer of another library may train a worker."""

from thinwire.elastic.transport import Elastic
from thinwire.errors import ConfigurationError
from thinwire.outer_loop import OuterLoop
from thinwire.transport import Distributed


def check_apart(outer: OuterLoop, trainer_ranks: int) -> None:
    """Raise `ConfigurationError` if a trainer's ranks are the workers that should train apart.

    Args:
        outer: of this worker.
        trainer_ranks: over which the trainer averages gradients.
    """
    joined = outer.transport.ranks if isinstance(outer.transport, Elastic) else 1
    if outer.is_elastic and trainer_ranks != joined:
        raise ConfigurationError(
            f"train a worker of {trainer_ranks} ranks where workers come and go",
            because=f"it would join with {joined} of them as a worker, and the trainer averages "
            "gradients over all",
            do="pass Elastic(group=torch.distributed.group.WORLD), after the trainer's arguments "
            "were made, which start the group",
        )
    if trainer_ranks > 1 and outer.workers > 1 and isinstance(outer.transport, Distributed):
        raise ConfigurationError(
            f"train {outer.workers} workers under one torchrun",
            because=f"the trainer averages gradients over its {trainer_ranks} ranks at every step, "
            "and the workers are among them",
            do="start every worker by itself, and let them meet by THINWIRE_AT="
            "'tcp://HOST:PORT?workers=K&worker=0' (1, 2, ...)",
        )


def check_same_step(outer: OuterLoop, trainer_step: int) -> None:
    """Raise `ConfigurationError` unless trainer and outer loop have taken as many inner steps."""
    if trainer_step != outer.inner_step:
        raise ConfigurationError(
            f"train on from step {trainer_step}",
            because=f"the outer loop is at inner step {outer.inner_step}: one of them was resumed "
            "without the other",
            do="resume from a checkpoint that has the outer state, or begin anew with both",
        )
