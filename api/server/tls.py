"""The server's certificate, which can be reloaded while the server runs."""

from __future__ import annotations

import ssl
from pathlib import Path

from chairlift.api.settings import ServerSettings


class Certificate:
    """A certificate with its private key, both PEM. ``key`` None means it is in the same file.

    Raises:
        OSError: a file cannot be read or is invalid.
    """

    def __init__(self, certificate: Path, key: Path | None = None) -> None:
        self._certificate = certificate
        self._key = key
        # The context of the listening sockets. In its handshake, each connection gets ``_newest``.
        self.context = self._newest = self._load()
        self.context.sni_callback = self._choose

    @classmethod
    def from_settings(cls, settings: ServerSettings) -> Certificate | None:
        """The certificate of a server, or None without TLS. Raises OSError as above."""
        if settings.ssl_certfile is None:
            return None
        return cls(settings.ssl_certfile, settings.ssl_keyfile)

    def reload(self) -> None:
        """Reads the files again, for later connections.

        Raises:
            OSError: as above; the previous certificate stays in use.
        """
        # NOTE: never load into the context in use: OpenSSL installs a new certificate before it
        # finds that the key does not match, and all later connections would fail.
        self._newest = self._load()

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in every handshake, even if the client names no server (RFC 6066)."""
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        certificate, key = self._certificate, self._key
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # Without a password callback, OpenSSL asks the terminal for a key's passphrase.
            context.load_cert_chain(certificate, key, password=lambda: "")
        except ssl.SSLError as error:
            where = certificate if key is None else f"{certificate} and {key}"
            raise OSError(f"{where}: no certificate with its key: {error.reason}") from error
        except OSError as error:
            # The error does not say which of the two files it was.
            missing = [path for path in (certificate, key) if path and not path.is_file()]
            raise OSError(f"{missing[0] if missing else certificate}: {error.strerror}") from error
        return context
