"""Reloads API keys and the certificate on SIGHUP."""

from __future__ import annotations

import asyncio
import logging

from chairlift.api.admission.accounts import Accounts
from chairlift.api.admission.keys import KeyFileError, read_keys
from chairlift.api.server.tls import Certificate
from chairlift.api.settings import ServerSettings
from chairlift.metrics.recorder import Recorder

logger = logging.getLogger(__name__)


class Reloader:
    """Reloads the key file and the certificate.

    Changes apply to later requests and connections; running ones are not disturbed. If a file is
    invalid, that is logged and its previous contents stay in force.
    """

    def __init__(
        self,
        settings: ServerSettings,
        accounts: Accounts,
        certificate: Certificate | None,
        recorder: Recorder,
    ) -> None:
        self._settings = settings
        self._accounts = accounts
        self._certificate = certificate
        self._recorder = recorder
        self._requested = asyncio.Event()

    def request(self) -> None:
        """Requests a reload."""
        self._requested.set()

    async def run(self) -> None:
        """Reloads whenever requested, until it is cancelled."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            await self.reload()

    async def reload(self) -> None:
        """Reloads the files now."""
        if self._settings.api_key_file is None and self._certificate is None:
            logger.info("SIGHUP: there is neither a key file nor a certificate to reload")
        if self._settings.api_key_file is not None:
            await self._reload_keys()
        if self._certificate is not None:
            await self._reload_certificate(self._certificate)

    async def _reload_keys(self) -> None:
        settings = self._settings
        try:
            keys = await asyncio.to_thread(
                read_keys, settings.api_key_file, settings.anonymous, settings.given_keys
            )
        except KeyFileError as error:
            logger.error("SIGHUP: the API keys stay as they are: %s", error)
            self._recorder.record_reload("failure")
            return
        self._accounts.replace(keys)
        logger.info("SIGHUP: read %d API keys", len(keys))
        self._recorder.record_reload("success")

    async def _reload_certificate(self, certificate: Certificate) -> None:
        try:
            await asyncio.to_thread(certificate.reload)
        except OSError as error:
            logger.error("SIGHUP: the certificate stays as it is: %s", error)
            self._recorder.record_reload("failure")
            return
        logger.info("SIGHUP: read the certificate")
        self._recorder.record_reload("success")
