"""The ``ipc`` backend of vllm-wt: readers map the owner's memory, of one host or of one GPU."""

BACKEND = "ipc"
"""Our name in errors."""
