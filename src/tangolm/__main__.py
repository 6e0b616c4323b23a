"""`python -m tangolm` is the command `tangolm` (for `torchrun -m tangolm`)."""

from tangolm.cli import script

script()
