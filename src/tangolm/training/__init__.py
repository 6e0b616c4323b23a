"""Training one model in one process: what a run is, the loop, checkpoints that resume to the bit, the kept results."""

from tangolm.training.checkpoint import CheckpointError, State
from tangolm.training.dry_run import plan
from tangolm.training.init_from import run_config_from
from tangolm.training.metrics import median_update_seconds, read_metrics
from tangolm.training.optim import OptimizerConfig, build_optimizer, learning_rate
from tangolm.training.run import Run, RunConfig, config_from_dict, run_config
from tangolm.training.selected import evaluate_run
from tangolm.training.trainer import Result, TrainingError, train

__all__ = [
    "CheckpointError",
    "OptimizerConfig",
    "Result",
    "Run",
    "RunConfig",
    "State",
    "TrainingError",
    "build_optimizer",
    "config_from_dict",
    "evaluate_run",
    "learning_rate",
    "median_update_seconds",
    "plan",
    "read_metrics",
    "run_config",
    "run_config_from",
    "train",
]
