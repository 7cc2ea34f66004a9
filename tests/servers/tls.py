"""TLS in front of servers that were built without it: an authority of our own, and a proxy that terminates TLS.

Neither server binary out of a wheel was built with TLS. What a client sees is the same: a handshake, a certificate
that an authority has signed (and, where it is asked for, one of the client's own), and Redis behind it.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlencode

from tests.servers.daemons import HOST

_HANDSHAKE = b"\x16"
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files in PEM: of the authority, and of whom it vouches for: 127.0.0.1 and localhost, as server and as client."""

    ca: Path
    certfile: Path
    keyfile: Path

    def query(self, *, client: bool = False) -> str:
        """What a URL says after its `?`, so that the server is verified, and the client shows its own certificate."""
        named = {"ssl_ca_certs": str(self.ca)}
        if client:
            named |= {"ssl_certfile": str(self.certfile), "ssl_keyfile": str(self.keyfile)}
        return urlencode(named)

    def context(self, *, mutual: bool) -> ssl.SSLContext:
        """As the server needs it; `mutual` asks the client for a certificate, too."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certfile, self.keyfile)
        if mutual:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.ca)
        return context


def certificates(folder: Path) -> Certificates:
    """A new authority each time: what one has signed, a client of another refuses."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    folder.mkdir(parents=True, exist_ok=True)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ragfence test authority")])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)

    def certificate(subject: x509.Name, public_key: ec.EllipticCurvePublicKey, *, ca: bool) -> x509.CertificateBuilder:
        usage = x509.KeyUsage(
            digital_signature=not ca,
            key_cert_sign=ca,
            crl_sign=ca,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        )

    known_as = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))]
    own = (
        certificate(name, key.public_key(), ca=False)
        .add_extension(x509.SubjectAlternativeName(known_as), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    authority = certificate(ca_name, ca_key.public_key(), ca=True).sign(ca_key, hashes.SHA256())
    made = Certificates(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    made.ca.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    made.certfile.write_bytes(own.public_bytes(serialization.Encoding.PEM))
    made.keyfile.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made


class TlsProxy:
    """Speaks TLS with clients and forwards to a plain port of 127.0.0.1.

    With `also_plain` it forwards plain connections, too: servers that know each other only by the port that clients
    are told (sentinels, replicas) cannot speak TLS themselves. While nobody listens behind it, it hangs up at once.
    """

    def __init__(self, upstream: int, context: ssl.SSLContext, *, also_plain: bool = False) -> None:
        self._upstream, self._context, self._also_plain = upstream, context, also_plain
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name=f"tls-{self.port}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else the thread would sit in accept() for ever
        self._listener.close()
        self._thread.join()
        with self._lock:
            for connection in self._open:
                _hang_up(connection)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            try:
                server = stack.enter_context(self._known(socket.create_connection((HOST, self._upstream))))
                plain = self._also_plain and client.recv(1, socket.MSG_PEEK) != _HANDSHAKE
                near = client if plain else self._context.wrap_socket(client, server_side=True)
                stack.enter_context(self._known(near))
            except OSError:  # nobody behind us, or a handshake that failed: ssl.SSLError is one, too
                client.close()
                return
            for connection in (near, server):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_pump, args=[server, near], daemon=True)
            back.start()
            _pump(near, server)
            back.join()

    @contextlib.contextmanager
    def _known(self, connection: socket.socket) -> Iterator[socket.socket]:
        with self._lock:
            self._open.add(connection)
        try:
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Until either side ends; then both do, so that the pump of the other direction ends as well."""
    try:
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    except (OSError, ValueError):
        pass
    finally:
        _hang_up(source)
        _hang_up(sink)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
