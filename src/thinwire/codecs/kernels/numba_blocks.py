"""Blocks of 64x64 of a matrix that lies row by row: into a core's cache, and back."""
# pyright: basic

import numpy as np

from thinwire.codecs.kernels.numba_rows import compiled

AT_ONCE = 8
"""Blocks that are in the cache together: 128 KiB."""

SIDE = 64
"""Rows and columns of a block."""

_U = np.uint64  # an index that cannot be negative


@compiled
def gather(blocks, x, delta, decay, first):
    """blocks = those of decay * x + delta from the block `first` on; of x if there is no delta.

    `blocks` is [n, 64, 64]; `x` and `delta` are [down, 64, across, 64].
    """
    across = x.shape[2]
    for i in range(len(blocks)):
        down, right = _U((first + i) // across), _U((first + i) % across)
        if len(delta):
            for r in range(SIDE):
                for j in range(SIDE):
                    blocks[_U(i), _U(r), _U(j)] = (
                        decay * x[down, _U(r), right, _U(j)] + delta[down, _U(r), right, _U(j)]
                    )
        else:
            for r in range(SIDE):
                for j in range(SIDE):
                    blocks[_U(i), _U(r), _U(j)] = x[down, _U(r), right, _U(j)]


@compiled
def scatter(blocks, x, first):
    """The blocks of x from `first` on = blocks; shapes as in `gather`."""
    across = x.shape[2]
    for i in range(len(blocks)):
        down, right = _U((first + i) // across), _U((first + i) % across)
        for r in range(SIDE):
            for j in range(SIDE):
                x[down, _U(r), right, _U(j)] = blocks[_U(i), _U(r), _U(j)]
