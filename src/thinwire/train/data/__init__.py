"""What to train on: corpora, tokenizers, and the batches that each worker reads."""

from thinwire.train.data.loading import Data, LoadedData

__all__ = ["Data", "LoadedData"]
