"""``python -m vllm_wt.cli``."""

import sys

from vllm_wt.cli import main

sys.exit(main())
