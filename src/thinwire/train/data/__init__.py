"""Training data: corpora, tokenizers and the batches of each worker."""

from thinwire.train.data.loading import Data, LoadedData

__all__ = ["Data", "LoadedData"]
