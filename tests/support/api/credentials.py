"""API keys and TLS certificates for tests."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import trustme

from chairlift.api.admission.keys import NO_LIMITS, ApiKey, KeyLimits, digest_of

ALICE, BOB, CAROL = "sk-alice-secret", "sk-bob-secret", "sk-carol-secret"


def bearer(key: str) -> dict[str, str]:
    """The header with which OpenAI's clients send a key."""
    return {"Authorization": f"Bearer {key}"}


def alice_and_bob(alice: KeyLimits = NO_LIMITS, bob: KeyLimits = NO_LIMITS) -> tuple[ApiKey, ...]:
    """The keys ALICE and BOB with their limits, as a server's settings take them."""
    return ApiKey("alice", digest_of(ALICE), alice), ApiKey("bob", digest_of(BOB), bob)


def write_keys(path: Path, **keys: str) -> None:
    """Writes a key file as editors do: a new file replaces the old one.

    Args:
        path: the key file.
        keys: a TOML string for each key's name, and any further lines of its table.
    """
    new = path.with_suffix(".new")
    new.write_text("".join(f"[{name}]\nkey = {value}\n" for name, value in keys.items()))
    new.replace(path)


class LoopbackCertificates:
    """An authority that issues certificates for 127.0.0.1.

    Attributes:
        certificate, key: the files that a server reads.
        trusting: a client's TLS context that trusts the authority.
        other_key: the PEM key of a certificate that was never written.
    """

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key = folder / "cert.pem", folder / "key.pem"
        self.trusting = ssl.create_default_context()
        self._authority = trustme.CA()
        self._authority.configure_trust(self.trusting)
        self.other_key = trustme.CA().issue_cert("127.0.0.1").private_key_pem.bytes()

    def write(self) -> bytes:
        """Writes a new certificate and its key, and returns the certificate as DER."""
        issued = self._authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(self.key)
        chain = [part.bytes() for part in issued.cert_chain_pems]
        self.certificate.write_bytes(b"".join(chain))
        return ssl.PEM_cert_to_DER_cert(chain[0].decode())

    async def presented(self, port: int, **options: Any) -> bytes:
        """The certificate that a new connection to ``port`` is shown, as DER."""
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=self.trusting, **options)
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return bytes(certificate)
