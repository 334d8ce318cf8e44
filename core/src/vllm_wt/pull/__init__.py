"""Any Transport as a full backend: workers pull the trainer's tensors into an arena of their own."""

from vllm_wt.pull.team import TeamTrainer
from vllm_wt.pull.trainer import PullTrainer
from vllm_wt.pull.worker import PullEngine

__all__ = ["PullEngine", "PullTrainer", "TeamTrainer"]
