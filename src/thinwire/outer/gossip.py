"""Gossip: every worker has its own anchor, pulled to the mean weights of its peers."""

from dataclasses import dataclass

from thinwire.errors import check
from thinwire.outer.base import OuterOptimizer
from thinwire.outer.overlap import Delay, Overlap
from thinwire.outer.state import FragmentContext, OuterState
from thinwire.outer.torch_optimizers import SGD


@dataclass(frozen=True, kw_only=True, slots=True)
class Gossip(OuterOptimizer):
    """m_k = mu m_k + eta (phi_k - mean_g theta); phi_k = phi_k - m_k; theta_k = phi_k.

    phi_k is the anchor of worker k, g the workers whose weights theta it is given: under `Pairs`
    itself and its peer; under `Gather` all of them, where this is outer SGD with heavy-ball
    momentum. The weights themselves travel: with a pseudo-gradient alone, no worker could pull its
    anchor towards another one's.

    Between rounds of training the anchors draw together if 0 < eta < 2 (1 - mu^2): for pairs among
    many workers, the second moments of d_k = phi_k - mean phi and m_k, where
    E[(phi_k - mean_g phi)^2] = E[d^2] / 2, then have a spectral radius below 1.

    Args:
        lr: eta, both the step along the mean pseudo-gradient and the pull towards the peer.
        momentum: mu in [0, 1); 0 keeps no buffer.

    Raises:
        ConfigurationError: a momentum outside [0, 1), or a rate at which the anchors drift apart.

    Source: NoLoCo (arXiv 2506.10911), eq. 1 and 2, with gamma = eta as in its released code.

    Differs: the paper's eq. 1 has the pseudo-gradient of the other sign, with which eq. 2 climbs.
    Its range, mu < gamma < sqrt(2 + mu^2), has our upper end at mu = 0.5; above mu = 0.5 it lets
    anchors drift apart, and its lower end is not needed.

    >>> Gossip()
    Gossip(lr=0.7, momentum=0.5)
    """

    lr: float = 0.7
    momentum: float = 0.5

    def __post_init__(self) -> None:
        limit = 2 * (1 - self.momentum**2)
        check(
            0 <= self.momentum < 1 and 0 < self.lr < limit,
            f"use Gossip with lr={self.lr} and momentum={self.momentum}",
            because="the anchors of workers that meet in pairs draw together if 0 < lr < "
            "2 (1 - momentum^2), with a momentum from 0 to 1; else they drift apart",
            do="pass the published lr=0.7 and momentum=0.5, or a lower momentum",
        )

    has_own_anchors = True

    averages_weights = True

    elastic_refusal = "every worker has its own outer parameters"

    def check(self, *, sync_every: int, overlap: Overlap) -> None:
        """Refuse an overlap that needs an anchor that all workers share."""
        del sync_every
        check(
            isinstance(overlap, Delay),
            f"use Gossip with {overlap}",
            because="it works out of the mean what the worker itself had sent, as a "
            "pseudo-gradient from an anchor that all workers share",
            do="take tw.Delay(tau=...), or leave overlap out",
        )

    def bind(self, context: FragmentContext, overlap: Overlap) -> OuterState:
        """A state whose anchor is the local weights as they are now."""
        heavy_ball = SGD(lr=self.lr, momentum=self.momentum)
        return overlap.join(heavy_ball, context, averages_weights=True)
