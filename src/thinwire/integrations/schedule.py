"""A trainer's learning rates where workers come and go: they follow the run's inner step."""

import copy
import warnings
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from thinwire.errors import ConfigurationError


class FollowedSchedule:
    """A scheduler that can be moved by any number of steps, also back, to those of a healed worker.

    Args:
        scheduler: any whose rates are a function of its steps alone.

    Raises:
        ConfigurationError: its rates depend on a metric, or it is no torch scheduler.

    >>> import torch
    >>> sgd = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
    >>> schedule = FollowedSchedule(torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5))
    >>> schedule.move(3)
    >>> schedule.move(-1)
    >>> sgd.param_groups[0]["lr"]
    0.25
    """

    def __init__(self, scheduler: object) -> None:
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigurationError(
                f"follow a run whose workers come and go with {type(scheduler).__name__}",
                because="a worker that comes late cannot tell its rate from the step alone",
                do="take a scheduler whose rate is a function of the step, such as LambdaLR",
            )
        self._scheduler = scheduler
        self._first_step = scheduler.last_epoch
        # To go back: most schedulers compute a rate from the one before.
        self._first_state = copy.deepcopy(scheduler.state_dict())
        self._first_groups = [_settings(group) for group in scheduler.optimizer.param_groups]

    def move(self, steps: int) -> None:
        """Take so many steps, or as many back.

        Args:
            steps: of the scheduler, negative to go back.

        Raises:
            ConfigurationError: that is before the step at which this process began.
        """
        target = self._scheduler.last_epoch + steps
        if target < self._first_step:
            raise ConfigurationError(
                f"set the schedule back to step {target}",
                because=f"this process began at step {self._first_step}",
                do="start this worker again",
            )
        if steps < 0:
            self._scheduler.load_state_dict(copy.deepcopy(self._first_state))
            groups = self._scheduler.optimizer.param_groups
            for group, settings in zip(groups, self._first_groups, strict=True):
                group.update(copy.deepcopy(settings))
        with warnings.catch_warnings():
            # It is not the optimizer of this worker that took these steps.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            while self._scheduler.last_epoch < target:
                self._scheduler.step()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})
