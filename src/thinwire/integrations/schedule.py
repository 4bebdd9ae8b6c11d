"""Learning rates of a trainer in an elastic run."""

import copy
import warnings
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from thinwire.errors import ConfigurationError, check


class FollowedSchedule:
    """A scheduler that can move by any number of steps, forwards or back.

    Args:
        scheduler: a torch scheduler, whose rates must be a function of its steps alone.

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
                f"use {type(scheduler).__name__} in an elastic run",
                because="a late worker cannot compute its rate from the step alone",
                do="use a scheduler whose rate is a function of the step, such as LambdaLR",
            )
        self._scheduler = scheduler
        self._first_step = scheduler.last_epoch
        # To go back: most schedulers compute a rate from the one before.
        self._first_state = copy.deepcopy(scheduler.state_dict())
        self._first_groups = [_settings(group) for group in scheduler.optimizer.param_groups]

    def move(self, steps: int) -> None:
        """Take `steps` steps of the scheduler; a negative number goes back.

        Raises:
            ConfigurationError: the target is before the step at which this process began.
        """
        target = self._scheduler.last_epoch + steps
        check(
            target >= self._first_step,
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
            # This worker's optimizer did not take these steps.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            while self._scheduler.last_epoch < target:
                self._scheduler.step()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})
