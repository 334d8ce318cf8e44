"""The ``rdma`` backend of vllm-wt: one-sided reads over NIXL and its UCX backend."""
