"""How a server of a trial proves itself before a client sends it a secret.

    rl-submit, a resume --new_identity--> {trial}/secrets/server.pem: private key, certificate of its own
    server: Trust.server() --TLS 1.3--> client: Trust.client(), which takes that certificate and no other

Any user of a machine can take a port that nobody holds: one that was published before its server died, or one that a
server which still loads will listen on. So no port is trusted: a client says keys and passwords only after the server
has signed the handshake with the trial's key. A stranger that has taken a port gets no byte of them.
"""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

_FILE_NAME: Final = "server.pem"
_LIFETIME: Final = timedelta(days=3650)  # it goes with the trial's secrets; clocks of hosts differ by less than a day


@dataclass(frozen=True, slots=True)
class Trust:
    """One trial's identity, as its servers show it and its clients want it."""

    secrets_directory: Path

    @property
    def path(self) -> Path:
        """The file that holds the private key and the certificate; for its owner only."""
        return self.secrets_directory / _FILE_NAME

    def server(self) -> ssl.SSLContext:
        """For a server of the trial.

        Raises:
            FileNotFoundError: if the trial has ended, and its secrets with it.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.path)
        return context

    def client(self) -> ssl.SSLContext:
        """For a client of the trial's servers; raises as `server`.

        Guarantee: a handshake succeeds only with who has the trial's private key. The certificate is the one that is
        trusted, it can sign no other, and it stands for no host: that is why a host's name is not compared.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.load_verify_locations(self.path)
        return context


def new_identity() -> bytes:
    """A private key and its certificate, as PEM."""
    from cryptography import x509  # takes a while to import, and only who makes a trial needs it
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a trial of corral")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return secret + certificate.public_bytes(serialization.Encoding.PEM)
