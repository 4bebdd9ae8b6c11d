"""What to train on: corpora, tokenizers, and the batches that each worker reads."""

from typing import TYPE_CHECKING

from thinwire.lazy_exports import lazy_exports
from thinwire.train.data.description import Data

if TYPE_CHECKING:
    from thinwire.train.data.loading import LoadedData
else:
    __getattr__, __dir__ = lazy_exports(__name__, {"thinwire.train.data.loading": ("LoadedData",)})

__all__ = ["Data", "LoadedData"]
