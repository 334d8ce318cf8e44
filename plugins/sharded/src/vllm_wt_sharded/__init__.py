"""The ``sharded`` backend of vllm-wt: many trainer ranks to many workers, by a plan made once."""
