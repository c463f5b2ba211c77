"""Mutual TLS: real certificates, real handshakes, and what a client sees that has none."""

import asyncio
import http.client
import json
import logging
import ssl
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from tests.http.live import PATH, event, live, prepare
from tests.http.targets import TLS, on_both_loops, server_tls

from oncebridge.base.secrets import Secret
from oncebridge.errors import ConfigError
from oncebridge.http.auth import AuthOptions
from oncebridge.http.server import Response, Server
from oncebridge.service import config
from oncebridge.sources.http.openapi import describe

SERVER = str(TLS / "localhost.pem")
YEAR = timedelta(days=365)
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


def _name(text):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """Signs certificates, and writes them as files."""

    def __init__(self, folder, name):
        self._folder, self._name = folder, _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        made = self._begun(self._name, self._key).add_extension(constraints, critical=True)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(made.sign(self._key, SHA256()).public_bytes(Encoding.PEM))

    def _begun(self, subject, key, begins=-YEAR, ends=YEAR):
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
        )

    def issue(
        self,
        common,
        *others,
        begins=-YEAR,
        ends=YEAR,
        usage=ExtendedKeyUsageOID.CLIENT_AUTH,
    ):
        """Write a certificate and its key; give the file."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._begun(_name(common), key, begins, ends).add_extension(
            x509.ExtendedKeyUsage([usage]), critical=False
        )
        if others:
            made = made.add_extension(x509.SubjectAlternativeName(others), critical=False)
        file = self._folder / f"{abs(hash((common, *others, begins, ends, usage)))}.pem"
        file.write_bytes(
            made.sign(self._key, SHA256()).public_bytes(Encoding.PEM)
            + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
        return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def ours(folder):
    return Authority(folder, "ours")


@pytest.fixture(scope="module")
def theirs(folder):
    return Authority(folder, "theirs")


def settings(authority, **more):
    return {
        "source": f"https://localhost:0{PATH}",
        "source__tls_cert": SERVER,
        "source__client_ca": str(authority.file),
        **more,
    }


@pytest.fixture(scope="module")
def gate(tmp_path_factory, ours):
    names = "gateway.example.com,spiffe://example.com/gateway,Old Gateway"
    made = settings(ours, source__client_names=names)
    with live(tmp_path_factory.mktemp("gate"), **made) as running:
        yield running


@pytest.fixture(scope="module")
def door(tmp_path_factory, ours):
    """Any certificate of the authority will do here."""
    with live(tmp_path_factory.mktemp("door"), **settings(ours)) as running:
        yield running


def ask(running, certificate=None, version=None, *, path=PATH, body=None, headers=()):
    """Send an event as a client with *certificate*; raise as the connection ends."""
    context = ssl.create_default_context(cafile=TLS / "ca.pem")
    if certificate is not None:
        context.load_cert_chain(certificate)
    if version is not None:
        context.minimum_version = context.maximum_version = version
    line = http.client.HTTPSConnection("localhost", running.port, timeout=10, context=context)
    with closing(line):
        line.request("POST" if body else "GET", path, body, dict(headers))
        response = line.getresponse()
        return response.status, json.loads(response.read())


def sees_nothing(running, certificate, version):
    """Return True if the connection ends before there is an answer."""
    try:
        ask(running, certificate, version, body=event(1))
    except (ssl.SSLError, ConnectionError, http.client.RemoteDisconnected):
        return True
    return False


# --- the handshake ------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_with_a_certificate_of_the_authority_is_let_in(door, ours, version):
    status, said = ask(door, ours.issue("any"), version, body=event(int(version)))
    assert (status, said["verdict"]) == (200, "delivered")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["none", "other", "expired", "early", "for servers", "itself"])
def test_a_client_without_a_good_certificate_gets_no_answer(door, ours, theirs, kind, version):
    certificate = {
        "none": lambda: None,
        "other": lambda: theirs.issue("any"),
        "expired": lambda: ours.issue("any", ends=-timedelta(days=1)),
        "early": lambda: ours.issue("any", begins=timedelta(days=1)),
        "for servers": lambda: ours.issue("any", usage=ExtendedKeyUsageOID.SERVER_AUTH),
        "itself": lambda: SERVER,
    }[kind]()
    before = door.counts, door.store.asked.copy()
    assert sees_nothing(door, certificate, version)
    assert (door.counts, door.store.asked.copy()) == before


def test_health_needs_a_certificate_too(door, ours):
    assert ask(door, ours.issue("any"), path="/healthz") == (200, {"alive": True})
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
        ask(door, path="/healthz")


def test_why_a_certificate_was_refused_is_logged_once_a_minute(tmp_path, ours, theirs, caplog):
    with live(tmp_path, **settings(ours)) as running:
        for certificate in (theirs.issue("any"), None, None):
            assert sees_nothing(running, certificate, ssl.TLSVersion.TLSv1_3)

        def logged():
            return [r for r in caplog.records if r.message == "oncebridge.http_certificate_refused"]

        running.until(logged)
        assert ask(running, ours.issue("any"), body=event(1))[0] == 200
    (record,) = logged()
    assert record.reason == "unable to get local issuer certificate"


@on_both_loops
async def test_the_names_of_a_certificate_go_with_each_request(ours):
    seen = []

    def handle(request, respond):
        seen.append(request.certified)
        respond(Response(200))

    context = server_tls()
    context.load_verify_locations(ours.file)
    context.verify_mode = ssl.CERT_OPTIONAL
    server = Server(handle, host="127.0.0.1", port=0, tls=context, screen=lambda request: None)
    await server.open()
    names = x509.DNSName("a.example"), x509.UniformResourceIdentifier("spiffe://a/b")
    try:
        for certificate in (ours.issue("common", *names), None):
            with suppress(json.JSONDecodeError):  # the answer has no body
                await asyncio.to_thread(ask, server, certificate)
    finally:
        await server.aclose()
    assert seen == [{"common", "a.example", "spiffe://a/b"}, frozenset()]


# --- the names ----------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("common", "others"),
    [
        ("any", [x509.DNSName("gateway.example.com")]),
        ("any", [x509.DNSName("x.example.com"), x509.DNSName("gateway.example.com")]),
        ("any", [x509.UniformResourceIdentifier("spiffe://example.com/gateway")]),
        ("Old Gateway", []),
    ],
    ids=str,
)
def test_a_name_that_is_listed_is_let_in(gate, ours, common, others, version):
    assert ask(gate, ours.issue(common, *others), version, body=event(1))[0] == 200


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("common", "others"),
    [
        ("any", []),
        ("any", [x509.DNSName("other.example.com")]),
        ("any", [x509.DNSName("*.example.com")]),
        ("any", [x509.DNSName("gateway.example.com.other.example")]),
        ("any", [x509.RFC822Name("gateway.example.com")]),
        ("old gateway", []),
    ],
    ids=str,
)
def test_a_name_that_is_not_listed_gets_a_401_and_touches_nothing(
    gate, ours, common, others, version
):
    before = gate.counts, gate.store.asked.copy(), len(gate.buried())
    status, said = ask(gate, ours.issue(common, *others), version, body=event(1))
    assert (status, said) == (401, {"error": "not authenticated"})
    assert (gate.counts, gate.store.asked.copy(), len(gate.buried())) == before
    assert ask(gate, ours.issue(common, *others), version, path="/readyz")[0] == 200


def test_a_name_that_is_not_listed_is_logged(tmp_path, ours, caplog):
    caplog.set_level(logging.WARNING, "oncebridge")
    with live(tmp_path, **settings(ours, source__client_names="gateway")) as running:
        for _ in range(3):
            assert ask(running, ours.issue("stranger"), body=event(1))[0] == 401
    logged = [(r.message, r.reason) for r in caplog.records]
    assert logged == [("oncebridge.http_certificate_refused", "its names are not in client_names")]


def test_a_certificate_is_asked_for_beside_other_kinds(tmp_path, ours):
    key = "apple-key-of-a-mill"
    with live(tmp_path, **settings(ours, source__api_keys=key)) as running:
        certificate = ours.issue("any")
        assert ask(running, certificate, body=event(1))[0] == 401
        assert ask(running, certificate, body=event(1), headers={"x-api-key": key})[0] == 200
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            ask(running, body=event(1), headers={"x-api-key": key})


# --- settings -----------------------------------------------------------------------------


def load(source, **options):
    named = {f"source.{name}": text for name, text in options.items()}
    return config.load(None, environment={}, flags={"source": source, "store": "memory:", **named})


def test_a_source_with_client_certificates_may_listen_to_others(ours):
    assert load("https://0.0.0.0:8443/events", tls_cert=SERVER, client_ca=str(ours.file))
    with pytest.raises(ConfigError, match=r"set api_keys, .*, jwt or client_ca"):
        load("https://0.0.0.0:8443/events", tls_cert=SERVER)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("http", {"client_ca": "ca.pem"}, "source.client_ca: needs https://"),
        (
            "https",
            {"tls_cert": SERVER, "client_names": "a"},
            "source.client_names: needs client_ca",
        ),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(source, options, message):
    with pytest.raises(ConfigError, match=message):
        load(f"{source}://127.0.0.1:8443/events", **options)


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_an_authority_that_cannot_be_used_is_told_at_the_start(tmp_path, content):
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)
    running = prepare(
        tmp_path,
        source=f"https://127.0.0.1:0{PATH}",
        source__tls_cert=SERVER,
        source__client_ca=str(file),
    )
    with pytest.raises(ConfigError, match="client_ca: the certificates cannot be loaded"):
        running.start()


def test_the_description_asks_for_a_certificate_with_each_kind():
    def asked(**options):
        described = describe(PATH, AuthOptions(**options), "0")
        schemes = described["components"]["securitySchemes"]
        return schemes["mutualTLS"], described["paths"][PATH]["post"]["security"]

    certificate = {"type": "mutualTLS"}
    assert asked(client_ca="ca.pem") == (certificate, [{"mutualTLS": []}])
    secrets = {"api_keys": (Secret("a"),), "hmac": (Secret("b"),)}
    assert asked(client_ca="ca.pem", **secrets) == (
        certificate,
        [
            {"apiKey": [], "mutualTLS": []},
            {"hmac": [], "hmacTime": [], "mutualTLS": []},
        ],
    )
