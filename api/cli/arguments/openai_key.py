"""``serve`` with the key in OPENAI_API_KEY, so that the clients of one shell need no other."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from chairlift.api.admission.keys import KEY_VARIABLE, MIN_KEY_CHARS, OPENAI_VARIABLE
from chairlift.api.cli.arguments.config_sources import Resolved
from chairlift.api.cli.arguments.setting import Setting

logger = logging.getLogger(__name__)

_KEY = "api-key"


def with_openai_key(resolved: Resolved, environment: Mapping[str, str]) -> Resolved:
    """Takes the API key from OPENAI_API_KEY if nothing else gives or names one.

    Values that are too short are placeholders, like "none", for servers without keys.
    """
    options, settings = resolved
    key = environment.get(OPENAI_VARIABLE, "")
    if options.api_key or options.api_key_file is not None or len(key) < MIN_KEY_CHARS:
        return resolved
    options.api_key = [key]
    given = Setting(_KEY, [key], OPENAI_VARIABLE)
    return Resolved(options, tuple(given if s.key == _KEY else s for s in settings))


def log_origin(settings: Iterable[Setting], environment: Mapping[str, str]) -> None:
    """Says that OPENAI_API_KEY is in use, or is too short for that."""
    if any(setting.key == _KEY and setting.source == OPENAI_VARIABLE for setting in settings):
        logger.warning(
            "clients need an API key: the one in %s (set it to nothing to need none, or set %s)",
            OPENAI_VARIABLE,
            KEY_VARIABLE,
        )
    elif 0 < len(environment.get(OPENAI_VARIABLE, "")) < MIN_KEY_CHARS:
        logger.info("%s is too short for a key, and not used", OPENAI_VARIABLE)
