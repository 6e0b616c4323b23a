"""Judging models: NLL over a split, generation, exact answers."""

from tangolm.evaluation.generate import Answers, exact_match, generate
from tangolm.evaluation.nll import Evaluation, evaluate
from tangolm.evaluation.sampling import Sampling

__all__ = ["Answers", "Evaluation", "Sampling", "evaluate", "exact_match", "generate"]
