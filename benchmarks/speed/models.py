"""The models that codecs and rounds are timed on."""

import torch
from torch import Tensor, nn

from thinwire.fragments.layout import Layout, wire_order


def gpt2(
    *, vocabulary: int = 50_257, positions: int = 1024, width: int = 512, layers: int = 8
) -> Layout:
    """The layout of a GPT-2 with tied embeddings, in wire order.

    Args:
        vocabulary: rows of the embedding, which is the head too.
        positions: rows of the position embedding.
        width: width of the residual stream.
        layers: blocks of attention and a feed-forward of four widths.

    >>> gpt2().numel
    51475968
    """
    shapes = {"wte": (vocabulary, width), "wpe": (positions, width)}
    roles = dict.fromkeys(shapes, "embedding")
    for layer in range(layers):
        shapes |= {f"h.{layer}.{name}": shape for name, shape in _block(width).items()}
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    return Layout.of({name: shapes[name] for name in wire_order(shapes)}, roles)


def llama(*, vocabulary: int = 32_000, width: int = 512, layers: int = 8) -> nn.Module:
    """The parameters of a Llama with tied embeddings, without its code; the same at each call.

    Args:
        vocabulary: rows of the embedding, which is the head too.
        width: width of the residual stream.
        layers: blocks of seven matrices and two norms.

    >>> model = llama(layers=1)
    >>> sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    (19596800, 11)
    """
    inner = width * 11 // 4
    square, widen, narrow = (width, width), (width, inner), (inner, width)

    def layer() -> nn.Module:
        matrices = [nn.Linear(*s, bias=False) for s in (*[square] * 4, widen, widen, narrow)]
        return nn.ModuleList([*matrices, nn.RMSNorm(width), nn.RMSNorm(width)])

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Module()
        model.embed = nn.Embedding(vocabulary, width)
        model.layers = nn.ModuleList(layer() for _ in range(layers))
        model.norm = nn.RMSNorm(width)
        return model


def ragged(*, tensors: int, parameters: int) -> nn.Module:
    """A stack of matrices whose sizes no chunk divides; the same at each call.

    Args:
        tensors: number of matrices.
        parameters: approximate size of all of them together.

    >>> [tuple(p.shape) for p in ragged(tensors=3, parameters=3000).parameters()]
    [(7, 142), (7, 143), (7, 144)]
    """
    columns = parameters // tensors // 7
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(columns + number % 5, 7, bias=False) for number in range(tensors)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.02, generator=generator)
    return nn.Sequential(*layers)


def heavy_tailed(numel: int, *, seed: int) -> Tensor:
    """fp32 [numel] with many small numbers and a few large ones: a Gaussian over sqrt(uniform).

    >>> bool(torch.isfinite(heavy_tailed(5, seed=0)).all())
    True
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    return x.mul_(torch.rand(numel, generator=generator).clamp_(min=1e-2).rsqrt_())


def _block(width: int) -> dict[str, tuple[int, ...]]:
    linears = {
        "attention.qkv": (3 * width, width),
        "attention.project": (width, width),
        "feed_forward.expand": (4 * width, width),
        "feed_forward.project": (width, 4 * width),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in linears.items():
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    for name in ("norm_1", "norm_2"):
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return shapes
