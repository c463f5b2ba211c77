"""
An identity provider: it signs tokens, and publishes its keys over real HTTP or HTTPS.

A test says what it publishes and how it answers; `fetches` counts who asked for the keys.
"""

import json
import ssl
import threading
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from tests.http.targets import TLS, server_tls

NOW_S = 1_790_000_000
CA = str(TLS / "ca.pem")
AUDIENCE = "api://events"
PATH = "/eu/keys"


@cache
def rsa_key(name, bits=2048):
    """Make a key, the same for the same *name*."""
    return rsa.generate_private_key(65537, bits)


@cache
def ec_key(name, curve=ec.SECP256R1):
    return ec.generate_private_key(curve())


def jwk(key, kid=None, **more):
    """Write the public half of *key* as a provider publishes it."""
    writer = RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else ECAlgorithm
    named = {} if kid is None else {"kid": kid}
    return {**json.loads(writer.to_jwk(key.public_key())), **named, "use": "sig", **more}


def sign(key, alg="RS256", kid=None, header=(), **claims):
    """Sign a token as the provider would; a claim that is None is left out."""
    usual = {
        "iss": "https://login.example.com/eu",
        "aud": AUDIENCE,
        "sub": "eventbridge",
        "iat": NOW_S,
        "exp": NOW_S + 3600,
    }
    written = {name: value for name, value in {**usual, **claims}.items() if value is not None}
    named = {} if kid is None else {"kid": kid}
    payload = json.dumps(written).encode()
    return jwt.PyJWS().encode(payload, key, alg, headers={**named, **dict(header)})


class Provider:
    def __init__(self, *, tls=True):
        self.keys = []
        self.status = 200
        self.body = None
        """What is answered instead of the keys."""
        self.headers = {}
        self.fetches = 0
        self.asked = []
        self._tls = tls
        self._open = threading.Event()
        self._open.set()
        self._server = None
        self.port = 0

    @property
    def url(self):
        return f"{'https' if self._tls else 'http'}://localhost:{self.port}{PATH}"

    def settings(self, **more):
        """Give the settings of a source that accepts its tokens, as flags."""
        usual = {
            "issuer": "https://login.example.com/eu",
            "audience": AUDIENCE,
            "jwks": self.url,
            **({"ca_file": CA} if self._tls else {}),
        }
        return {f"source__jwt__{name}": text for name, text in {**usual, **more}.items()}

    def hold(self):
        """Let those who ask wait, until `let_go`."""
        self._open.clear()

    def let_go(self):
        self._open.set()

    def start(self):
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                provider.fetches += 1
                provider.asked.append((self.path, dict(self.headers)))
                body = provider.body
                if body is None:
                    body = json.dumps({"keys": provider.keys}).encode()
                status, headers = provider.status, dict(provider.headers)
                provider._open.wait(20)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args): ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, request, client_address):
                """Do not print that a client hung up."""

        self._server = Server(("127.0.0.1", self.port), Handler)
        if self._tls:
            self._server.socket = server_tls().wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True).start()

    def stop(self):
        """Go away; `start` comes back at the same port."""
        self.let_go()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def providing(*keys, tls=True):
    provider = Provider(tls=tls)
    provider.keys = list(keys)
    provider.start()
    try:
        yield provider
    finally:
        provider.stop()


def trusting():
    return ssl.create_default_context(cafile=CA)
