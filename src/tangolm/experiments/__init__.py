"""One file a table of the paper, and the quickstart: which runs an experiment needs and what they give.

An experiment is a file and a line in `EXPERIMENTS`.
"""

from tangolm.experiments import quickstart

EXPERIMENTS = {"quickstart": quickstart.run}
