"""Modules that the server of forked.py loads once for all that it forks."""

import importlib
import pkgutil

import transformers.models.llama.modeling_llama  # noqa: F401

import elastic_worker  # noqa: F401
import thinwire

# What needs more than the tests of a run do, or is another device's.
_LEFT_OUT = ("__main__", "integrations", "report", "triton", "gpu")

# Commands import what they need when they run: here they have run already.
for module in pkgutil.walk_packages(list(thinwire.__path__), "thinwire."):
    if not any(part.startswith(_LEFT_OUT) for part in module.name.split(".")):
        importlib.import_module(module.name)
