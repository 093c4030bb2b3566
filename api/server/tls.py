"""The server's certificate, which can be read anew while the server runs."""

from __future__ import annotations

import ssl
from pathlib import Path

from chairlift.api.settings import ServerSettings


class Certificate:
    """A certificate with its private key, both PEM. ``key`` None: it is in the same file.

    Raises:
        OSError: a file cannot be read, or does not hold what it should.
    """

    def __init__(self, certificate: Path, key: Path | None = None) -> None:
        self._certificate = certificate
        self._key = key
        # For the listening sockets. Each connection gets the newest certificate in its handshake.
        self.context = self._newest = self._load()
        self.context.sni_callback = self._choose

    @classmethod
    def of(cls, settings: ServerSettings) -> Certificate | None:
        """That of a server, if it has one. Raises OSError as above."""
        if settings.ssl_certfile is None:
            return None
        return cls(settings.ssl_certfile, settings.ssl_keyfile)

    def reload(self) -> None:
        """Reads the files again, for connections that come from now on.

        Raises:
            OSError: as at first; the certificate from before stays.
        """
        # NOTE: not into the context in use: OpenSSL takes a new certificate before it finds that
        # the key does not match, and no connection would succeed from then on.
        self._newest = self._load()

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in every handshake, also where the client names no server (RFC 6066)."""
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        certificate, key = self._certificate, self._key
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # A key with a passphrase would make OpenSSL ask the terminal.
            context.load_cert_chain(certificate, key, password=lambda: "")
        except ssl.SSLError as error:
            where = certificate if key is None else f"{certificate} and {key}"
            raise OSError(f"{where}: no certificate with its key: {error.reason}") from error
        except OSError as error:
            # It does not say which of the two it was.
            missing = [path for path in (certificate, key) if path and not path.is_file()]
            raise OSError(f"{missing[0] if missing else certificate}: {error.strerror}") from error
        return context
