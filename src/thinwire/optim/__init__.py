"""Inner optimizers that torch lacks, and the roles by which they tell parameters apart."""

from thinwire.optim.muon import Muon, muon_groups
from thinwire.optim.roles import Role, parameter_roles
from thinwire.optim.sign_sgd import SignSGD

__all__ = ["Muon", "Role", "SignSGD", "muon_groups", "parameter_roles"]
