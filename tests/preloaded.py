"""Modules that the server of forked.py loads once for all its forks."""

import importlib
import pkgutil

import transformers.models.llama.modeling_llama  # noqa: F401

import elastic_worker  # noqa: F401
import thinwire

# Modules that need more than the tests of a run do, or are for another device.
_LEFT_OUT = ("__main__", "integrations", "report", "triton", "gpu")

# Commands import late what they need, so load it all here.
for module in pkgutil.walk_packages(list(thinwire.__path__), "thinwire."):
    if not any(part.startswith(_LEFT_OUT) for part in module.name.split(".")):
        importlib.import_module(module.name)
