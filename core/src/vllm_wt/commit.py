"""The one step in which a model's weights change, and what is said of it when it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm_wt.errors import TornModel

logger = logging.getLogger(__name__)


def commit(load: Callable[[], None], what: str, *, backend: str) -> TornModel | None:
    """Load, and say what came of it: from here on it is the ranks that decide.

    Args:
        load: Writes the new weights into the model.
        what: What is loaded, for the log.
        backend: Named in the error.

    Returns:
        None when everything is in.
    """
    try:
        load()
    except Exception as caught:
        logger.exception("vllm-wt: the commit of %s failed", what)
        return TornModel(
            f"The commit failed in the middle: {type(caught).__name__}: {caught}",
            where="finish_weight_update",
            backend=backend,
            cure="do not generate; push a full update, or restart the engine",
        )
    return None
