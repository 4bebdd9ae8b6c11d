"""Checks of inner optimizers' settings, made when they are built."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from thinwire.errors import check, check_range, unknown_name
from thinwire.optim.roles import LAYOUTS
from thinwire.optim.sharded import check_sharding

SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda fan_out, fan_in: math.sqrt(fan_out / fan_in),
    "rms": lambda fan_out, fan_in: 0.2 * math.sqrt(max(fan_out, fan_in)),
    "original": lambda fan_out, fan_in: math.sqrt(max(1, fan_out / fan_in)),
}
"""Scales of an orthogonal update by name, as functions of fan_out and fan_in."""

_BELOW = {
    **dict.fromkeys(("lr", "adamw_lr", "weight_decay", "eps"), math.inf),
    **dict.fromkeys(("momentum", "beta1", "beta2"), 1.0),
}


def check_hyperparameters(values: Mapping[str, Any]) -> None:
    """Refuse values that no inner optimizer can run with.

    Learning rates, decay and eps must lie in [0, inf), momentum and both betas in [0, 1), and the
    scale must be a known one. Names that are absent or None are not checked.

    Raises:
        ConfigurationError: a value is out of range or NaN, or a name unknown.

    >>> check_hyperparameters({"lr": -1.0})
    Traceback (most recent call last):
    thinwire.errors.ConfigurationError: cannot set lr to -1.0; because it must lie in [0, inf); ...

    Source: ours.
    """
    betas = enumerate(values.get("betas", ()), 1)
    numbers = {**values, **{f"beta{place}": beta for place, beta in betas}}
    for name, below in _BELOW.items():
        if numbers.get(name) is not None:
            check_range(name, numbers[name], below=below)
    _check_known("scale", values.get("scale", "spectral"), SCALES)


def check_group(group: Mapping[str, Any], rules: Collection[str]) -> None:
    """Raise `ConfigurationError` unless `group` is a parameter group that `Muon` can step."""
    check(
        "rule" in group,
        "build Muon from these parameters",
        because='a parameter group has no "rule", which says what is a matrix',
        do="pass muon_groups(model, lr=..., weight_decay=...) instead of bare parameters",
    )
    _check_known("rule", group["rule"], rules)
    _check_known("layout", group["layout"], LAYOUTS)
    check_hyperparameters(group)
    for parameter in group["params"]:
        check(
            not parameter.is_complex() and (group["rule"] != "muon" or parameter.ndim >= 2),
            f"step a {parameter.dtype} parameter of shape {tuple(parameter.shape)} by "
            f'"{group["rule"]}"',
            because='"muon" steps real matrices, and "adamw" steps real tensors',
            do='put vectors into a group with the rule "adamw", and store complex numbers as pairs',
        )
        check_sharding(parameter)


def _check_known(what: str, name: object, known: Collection[str]) -> None:
    if name not in known:
        raise unknown_name(f"set {what} to {name!r}", str(name), known)
