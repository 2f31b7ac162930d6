"""A rank but the first: does what that one hands out, until the job ends."""

from mpi4py.futures import MPICommExecutor
from mpi4py.MPI import COMM_WORLD

with MPICommExecutor(COMM_WORLD) as executor:
    assert executor is None, "the first rank runs mgmn_leader_node"
