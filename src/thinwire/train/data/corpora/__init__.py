"""Where the text comes from: this machine's own source files, files, token shards, a hub stream."""

from thinwire.train.data.corpora.corpus import StreamCorpus, TextCorpus, TokenCorpus, fingerprint
from thinwire.train.data.corpora.resolve import KNOWN_CORPORA, resolve

__all__ = [
    "KNOWN_CORPORA",
    "StreamCorpus",
    "TextCorpus",
    "TokenCorpus",
    "fingerprint",
    "resolve",
]
