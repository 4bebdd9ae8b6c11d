"""Inner optimizers that torch lacks, and what tells them one kind of parameter from another."""

from thinwire.optim.muon import Muon, muon_groups
from thinwire.optim.newton_schulz import (
    PAPER_COEFFICIENTS,
    NewtonSchulz,
    orthogonalise,
)
from thinwire.optim.roles import (
    LAYOUTS,
    MatrixLayout,
    Role,
    parameter_layouts,
    parameter_roles,
)
from thinwire.optim.sign_sgd import SignSGD

__all__ = [
    "LAYOUTS",
    "PAPER_COEFFICIENTS",
    "MatrixLayout",
    "Muon",
    "NewtonSchulz",
    "Role",
    "SignSGD",
    "muon_groups",
    "orthogonalise",
    "parameter_layouts",
    "parameter_roles",
]
