"""The ``echo`` backend of vllm-wt: one-sided reads over TCP on one host, as an example to copy."""
