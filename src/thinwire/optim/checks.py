"""What the inner optimizers refuse, found when they are built and not at step 3,000."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from thinwire.errors import ConfigurationError
from thinwire.optim.roles import LAYOUTS
from thinwire.optim.scales import SCALES
from thinwire.optim.sharded import check_sharding

_UPPER = {
    **dict.fromkeys(("lr", "adamw_lr", "weight_decay", "eps"), math.inf),
    **dict.fromkeys(("momentum", "beta1", "beta2"), 1.0),
}


def check_hyperparameters(values: Mapping[str, Any]) -> None:
    """Refuse what no inner optimizer can run with.

    Learning rates, decay and eps must lie in [0, inf), momentum and both betas in [0, 1), and the
    scale must be a known one. Names that are absent, or None, are not looked at.

    Raises:
        ConfigurationError: a value is out of range or NaN, a name unknown, the betas are not two.

    >>> check_hyperparameters({"lr": -1.0})
    Traceback (most recent call last):
    thinwire.errors.ConfigurationError: cannot set lr to -1.0; because it must lie in [0, inf); ...

    Source: ours.
    """
    numbers = dict(values)
    if "betas" in values:
        numbers |= _named_betas(values["betas"])
    for name, upper in _UPPER.items():
        value = numbers.get(name)
        if value is not None and not 0 <= value < upper:
            raise ConfigurationError(
                f"set {name} to {value}",
                because=f"it must lie in [0, {upper:g})",
                do="choose a value in that interval",
            )
    _check_known("scale", values.get("scale", "spectral"), SCALES)


def _named_betas(betas: Sequence[float]) -> dict[str, float]:
    if len(betas) != 2:
        raise ConfigurationError(
            f"set betas to {betas}", because="Adam has two moments", do="pass (beta1, beta2)"
        )
    return {"beta1": betas[0], "beta2": betas[1]}


def check_group(group: Mapping[str, Any], rules: Collection[str]) -> None:
    """Raise `ConfigurationError` unless `group` is a parameter group that `Muon` can step."""
    if "rule" not in group:
        raise ConfigurationError(
            "build Muon from these parameters",
            because='a parameter group has no "rule", which says what is a matrix',
            do="pass muon_groups(model, lr=..., weight_decay=...) instead of bare parameters",
        )
    _check_known("rule", group["rule"], rules)
    _check_known("layout", group["layout"], LAYOUTS)
    check_hyperparameters(group)
    for parameter in group["params"]:
        _check_parameter(parameter, group["rule"])
        check_sharding(parameter)


def _check_parameter(parameter: Tensor, rule: str) -> None:
    if parameter.is_complex() or (rule == "muon" and parameter.ndim < 2):
        raise ConfigurationError(
            f'step a {parameter.dtype} parameter of shape {tuple(parameter.shape)} by "{rule}"',
            because='"muon" steps real matrices, and "adamw" steps real tensors',
            do='put vectors into a group with the rule "adamw", and store complex numbers as pairs',
        )


def _check_known(what: str, name: object, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigurationError(
            f"set {what} to {name!r}",
            because=f"it must be one of {', '.join(known)}",
            do="choose one of them",
        )
