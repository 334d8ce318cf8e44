"""The ``nccl_p2p`` backend: a Transport of sends between pairs, by NCCL or gloo. Import-light."""

BACKEND = "nccl_p2p"
"""Its name, as errors tell it."""
