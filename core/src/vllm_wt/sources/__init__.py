"""The kinds of weight sources; `vllm_wt.source` is their public home."""
