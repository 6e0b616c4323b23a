"""Which runs a comparison needs and what they give: the quickstart, and grids of runs.

A grid is a file and a line in `EXPERIMENTS`.
"""

from tangolm.experiments import windowed_defaults
from tangolm.experiments.grid import Grid

EXPERIMENTS: dict[str, Grid] = {"windowed-defaults": windowed_defaults.GRID}
