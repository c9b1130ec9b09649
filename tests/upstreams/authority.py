"""A certificate authority for tests: its own certificate, and those of servers and clients, as files in PEM."""

from __future__ import annotations

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

YEAR = timedelta(days=365)


class Authority:
    """Signs certificates into `directory`. `ca_file` is its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        ca = self._builder(self._name, self._key.public_key())
        ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.ca_file = self._written("ca", ca.sign(self._key, hashes.SHA256()))

    def issue(self, *names: str) -> tuple[Path, Path]:
        """(certificate, key) for these names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        general = [_general(name) for name in names]
        builder = self._builder(subject, key.public_key())
        builder = builder.add_extension(x509.SubjectAlternativeName(general), critical=False)
        path = self._directory / f"{names[0]}.key"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return self._written(names[0], builder.sign(self._key, hashes.SHA256())), path

    def serves(self, *names: str, asks_client: bool = False) -> ssl.SSLContext:
        """The context of a server with these names. `asks_client`: whether callers need a certificate, too."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue(*names))
        if asks_client:
            context.load_verify_locations(self.ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return x509.CertificateBuilder(
            self._name, subject, key, x509.random_serial_number(), now - timedelta(days=1), now + YEAR
        )

    def _written(self, name: str, certificate: x509.Certificate) -> Path:
        path = self._directory / f"{name}.pem"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
