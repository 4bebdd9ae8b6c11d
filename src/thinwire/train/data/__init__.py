"""What to train on: corpora, tokenizers, and the batches that each worker reads."""

from thinwire.train.data.description import Data
from thinwire.train.data.loading import LoadedData

__all__ = ["Data", "LoadedData"]
