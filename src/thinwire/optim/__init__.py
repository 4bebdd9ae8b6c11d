"""Inner optimizers that torch lacks, and what tells them one kind of parameter from another."""

from typing import TYPE_CHECKING

from thinwire.lazy_exports import lazy_exports

if TYPE_CHECKING:
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
else:
    # The optimizers inherit from torch's; to describe one, or to tell roles apart, takes none.
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "thinwire.optim.muon": ("Muon", "muon_groups"),
            "thinwire.optim.newton_schulz": ("PAPER_COEFFICIENTS", "NewtonSchulz", "orthogonalise"),
            "thinwire.optim.roles": (
                "LAYOUTS",
                "MatrixLayout",
                "Role",
                "parameter_layouts",
                "parameter_roles",
            ),
            "thinwire.optim.sign_sgd": ("SignSGD",),
        },
    )

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
