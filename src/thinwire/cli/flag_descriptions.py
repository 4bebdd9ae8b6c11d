"""The flags of a command, described for help and for errors; tyro alone parses them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro

# Which flags stand together in help, in this order, and what stands for a value whose type says too
# little. A name means the same in all commands that have it.
_GROUPS: Final = {
    "what to train": "method=NAME methods=NAMES workers=K steps seed seeds=NUMBERS recipe=NAME "
    "experiment=FILE",
    "method": "sync-every=H density bits inner-lr=RATE outer-lr=RATE outer-momentum warmup-steps "
    "clip-norm tune=RATES baseline=NAME equal-steps",
    "model and data": "model=NAME parameters=COUNT layers=COUNT corpus=NAME tokenizer=NAME "
    "sequence-length global-batch accumulate tokens-per-step=COUNT tokens=COUNT",
    "computing": "device=NAME outer-device precision compile simulation threads jobs worker-size "
    "step-time=DURATION encode-time=DURATION decode-time=DURATION accelerator=NAME mfu=SHARE "
    "accelerators-per-worker=COUNT",
    "workers and network": "elastic=TICKET|URL bucket=URL run-name=NAME worker=N identity=NAME "
    "token-file=FILE patience=SHARE min-workers timeout-s=SECONDS bind=HOST:PORT public=HOST "
    "heartbeat-timeout-s=SECONDS join-timeout-s=SECONDS allow-fork grace-s=SECONDS "
    "lost-after-s=SECONDS give-up-s=SECONDS bandwidth=RATE up=RATE down=RATE latency=DURATION "
    "topology sealed from=FOLDER",
    "price": "worker-price=PRICE traffic-price=PRICE egress-price=PRICE put-price=PRICE "
    "get-price=PRICE",
    "output": "out=PATH resume watch json target=SHARE metrics=HOST:PORT log-steps=STEPS "
    "evaluate-steps=STEPS checkpoint-steps=STEPS keep-checkpoints statistics-steps=STEPS "
    "tensorboard wandb=PROJECT trackio=PROJECT",
}
_POSITIONAL: Final = {
    "where": "TICKET|URL",
    "address": "TICKET|URL",
    "server": "HOST:PORT",
    "folders": "FOLDER...",
    "what": "NAME",
}
_BY_TYPE: Final = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}
OTHERS: Final = "other flags"


@dataclass(frozen=True, slots=True)
class Called:
    """Marks a field whose flag has another name than the field."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagDescription:
    """A flag or a positional argument of a command.

    Args:
        name: as it is typed, without dashes.
        text: what it is for.
        group: the heading that it stands under in help.
        metavar: stands for its value; empty for a switch.
        value_type: of a value.
        choices: the only values there are; empty if there are others.
        default: of the field; `dataclasses.MISSING` if it must be given.
        is_positional: its value stands alone, without the name.
        is_list: takes several values.
    """

    name: str
    text: str
    group: str
    metavar: str
    value_type: type
    choices: tuple[str, ...]
    default: Any
    is_positional: bool
    is_list: bool

    @property
    def typed(self) -> str:
        """As it is typed: `--sync-every`, or what stands for a positional argument."""
        return self.metavar if self.is_positional else f"--{self.name}"

    @property
    def is_switch(self) -> bool:
        """Whether it stands alone, without a value."""
        return self.value_type is bool

    @property
    def is_required(self) -> bool:
        """Whether the command does not run without it."""
        return self.default is dataclasses.MISSING


def group_names() -> list[str]:
    """The headings of help, in their order."""
    return [*_GROUPS, OTHERS]


@cache
def describe_flags(command: type) -> Mapping[str, FlagDescription]:
    """The flags and positional arguments of a command by their names, in the order of help.

    Args:
        command: a dataclass that tyro builds; fields that are dataclasses hold flags of their own.
    """
    order = list(_tables())
    found = {described.name: described for described in _described(command)}
    known = sorted(found.keys() & _tables().keys(), key=order.index)
    return {name: found[name] for name in [*known, *(found.keys() - _tables().keys())]}


def _described(command: type) -> Iterator[FlagDescription]:
    hints, texts = get_type_hints(command, include_extras=True), _field_texts(command)
    for field in dataclasses.fields(command):
        kind, markers = _apart(hints[field.name])
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _described(kind)
        else:
            yield _flag(field, kind, markers, texts.get(field.name, ""))


def _flag(
    field: dataclasses.Field[Any], kind: Any, markers: tuple[Any, ...], text: str
) -> FlagDescription:
    called = [marker.name for marker in markers if isinstance(marker, Called)]
    name = called[0] if called else field.name.replace("_", "-")
    is_list = get_origin(kind) is tuple
    if is_list:
        kind = get_args(kind)[0]
    is_positional = tyro.conf.Positional in markers
    choices = tuple(get_args(kind)) if get_origin(kind) is Literal else ()
    value_type = str if choices else kind
    group, metavar = _tables().get(name, (OTHERS, ""))
    if is_positional:
        metavar = _POSITIONAL.get(name, name.upper())
    elif value_type is bool:
        metavar = ""
    elif choices and not metavar:
        metavar = "|".join(choices)
    return FlagDescription(
        name=name,
        text=text,
        group=group,
        metavar=metavar or _BY_TYPE.get(value_type, ""),
        value_type=value_type,
        choices=choices,
        default=field.default,
        is_positional=is_positional,
        is_list=is_list,
    )


def _apart(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A field's type without None, and what is beside it in Annotated."""
    markers: tuple[Any, ...] = ()
    while True:
        if get_origin(hint) is Annotated:
            hint, *beside = get_args(hint)
            markers += tuple(beside)
        elif get_origin(hint) in (Union, UnionType):
            (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
        else:
            return hint, markers


@cache
def _tables() -> Mapping[str, tuple[str, str]]:
    """Group and metavar by a flag's name."""
    found: dict[str, tuple[str, str]] = {}
    for group, words in _GROUPS.items():
        for word in words.split():
            name, _, metavar = word.partition("=")
            found[name] = (group, metavar)
    return found


def _field_texts(command: type) -> Mapping[str, str]:
    """The string below each field of a class, on one line."""
    (body,) = (
        node.body
        for node in _syntax(command.__module__).body
        if isinstance(node, ast.ClassDef) and node.name == command.__name__
    )
    found: dict[str, str] = {}
    for node, below in itertools.pairwise(body):
        match node, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
            case _:
                pass
    return found


@cache
def _syntax(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))
