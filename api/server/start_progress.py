"""Shows what a starting engine does: in ``/health``, and as bars or lines on stderr."""

from __future__ import annotations

import logging

from chairlift.api.service import Service
from chairlift.engine.hub.progress import Bar, byte_bar, reach
from chairlift.engine.messages import Loading

logger = logging.getLogger(__name__)


class StartProgress:
    """Receives an engine's progress for ``service``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._bar: Bar | None = None

    def __call__(self, loading: Loading) -> None:
        """Shows one report of the engine."""
        self._service.progress = str(loading)
        if self._bar is not None and self._bar.desc != loading.text:
            self.close()
        if not loading.total:
            logger.info("%s", loading)
            return
        if self._bar is None:
            self._bar = byte_bar(loading.text, loading.total)
        reach(self._bar, loading.done)

    def close(self) -> None:
        """Ends the bar, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
