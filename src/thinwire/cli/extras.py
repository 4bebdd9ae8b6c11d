"""Which extra installs a module that a command lacks."""

from __future__ import annotations

from typing import Final

EXTRA_OF: Final = {
    "accelerate": "transformers",
    "cryptography": "secure",
    "datasets": "train",
    "filelock": "train",
    "jinja2": "report",
    "lightning": "lightning",
    "numba": "fast",
    "obstore": "bucket",
    "prometheus_client": "elastic",
    "rich": "cli",
    "safetensors": "train",
    "tokenizers": "train",
    "torchdata": "train",
    "torchft": "elastic",
    "transformers": "train",
    "msgspec": "cli",
    "tyro": "cli",
}
"""Extras by module; of several that have it the one whose commands import it."""


def install_text(error: ModuleNotFoundError) -> str:
    """What to do about a module that is missing, for the end of an error message.

    >>> install_text(ModuleNotFoundError(name="jinja2.runtime"))
    "pip install 'thinwire[report]'"
    """
    package = (error.name or "").partition(".")[0]
    if package in EXTRA_OF:
        return f"pip install 'thinwire[{EXTRA_OF[package]}]'"
    return f"pip install {package}" if package else "pip install 'thinwire[all]'"
