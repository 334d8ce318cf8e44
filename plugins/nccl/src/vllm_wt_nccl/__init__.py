"""The ``nccl`` backend of vllm-wt: packed broadcasts from a trainer to all workers at once."""
