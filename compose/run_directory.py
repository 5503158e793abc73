"""The run directory of a stack: its lock, its secrets, its sockets, and `stack.json`.

One living stack owns it, by a lock that the kernel drops when the process ends, however it ends.
So whoever gets the lock may remove what an earlier owner left behind.

    lock          held by the supervisor; holds its pid
    secrets.json  pepper, admin token, Valkey password, demo key; kept, so that keys survive a restart
    valkey/       data of the embedded Valkey; kept
    config.json   the configuration with all flags applied, for the services; removed at the end
    gateway.json  written by the gateway once it listens; removed at the end
    stack.json    for scripts, written when the stack is ready; removed at the end
    s/            sockets of the engines; removed at the end
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.config import HeadraceConfig
from shared.errors import ConfigError
from shared.identifiers import EngineId

MAX_SOCKET_PATH_BYTES = 107  # sun_path of unix(7) less its final zero
SECRETS_FILE = "secrets.json"
CONFIG_FILE = "config.json"
LONGEST_SOCKET_NAME = "999.sock"


class ServicePids(msgspec.Struct, frozen=True):
    """None or absent: not running at the moment, or not ours."""

    supervisor: int
    gateway: int | None
    valkey: int | None
    engines: dict[EngineId, int]


class StackRecord(msgspec.Struct, frozen=True):
    """`stack.json`: where a ready stack is and how to use it."""

    url: str
    demo_key: str
    admin_token: str
    redis_url: str
    namespace: str  # of its keys in Redis
    pids: ServicePids
    engine_ids: list[EngineId]
    run_dir: str


class StackSecrets(msgspec.Struct, frozen=True):
    pepper: str
    valkey_password: str
    admin_token: str
    demo_key: str | None = None


Json = TypeVar("Json", StackRecord, StackSecrets)


class RunDirectory:
    """Owned by at most one living stack. `open` takes it, `close` cleans it up and gives it back."""

    def __init__(self, path: Path, lock: int, socket_directory: Path) -> None:
        self.path = path
        self.socket_directory = socket_directory
        self._lock: int | None = lock

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Raises ConfigError when a living stack owns it, or when it cannot be written."""
        path = path.absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot use the run directory {path}: {error.strerror}", "run-dir") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise ConfigError(
                f"a running stack (pid {owner}) uses the run directory {path}; stop it, or give this one "
                "its own --run-dir and --port",
                "run-dir",
            ) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        directory = cls(path, lock, _short_directory_for_sockets(path))
        directory._remove_leftovers()
        directory.socket_directory.mkdir(mode=0o700, exist_ok=True)
        return directory

    @property
    def valkey_directory(self) -> Path:
        return self.path / "valkey"

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def gateway_ready_file(self) -> Path:
        return self.path / "gateway.json"

    def socket_file(self, engine_index: int) -> Path:
        """Numbered, since an engine's id may be long and may hold slashes."""
        return self.socket_directory / f"{engine_index}.sock"

    def secrets(self, pepper: str | None = None) -> StackSecrets:
        """Those of this directory, made on first use. A given pepper replaces the kept one, so that
        commands that only know the directory make keys that the gateway accepts.
        """
        kept = secrets_of(self.path)
        if pepper is not None and pepper != kept.pepper:
            kept = msgspec.structs.replace(kept, pepper=pepper)
            self.keep_secrets(kept)
        return kept

    def keep_secrets(self, values: StackSecrets) -> None:
        write_private(self.path / SECRETS_FILE, msgspec.json.encode(values))

    def write_config(self, config: HeadraceConfig) -> None:
        write_private(self.config_file, config.model_dump_json().encode())

    def write_stack(self, record: StackRecord) -> None:
        write_private(self.path / "stack.json", msgspec.json.format(msgspec.json.encode(record)))

    def close(self) -> None:
        """Idempotent. Call when the services have ended."""
        if self._lock is None:
            return
        self._remove_leftovers()
        os.close(self._lock)
        self._lock = None

    def _remove_leftovers(self) -> None:
        for name in ("stack.json", "gateway.json", CONFIG_FILE):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.socket_directory, ignore_errors=True)


def read_stack(path: Path) -> StackRecord | None:
    """None when no stack is ready there. What a stack that was killed has left behind does not count."""
    stack = _read(path / "stack.json", StackRecord)
    return stack if stack is not None and _is_alive(stack.pids.supervisor) else None


def read_secrets(path: Path) -> StackSecrets | None:
    """None when nothing has ever run there."""
    return _read(path / SECRETS_FILE, StackSecrets)


def secrets_of(path: Path) -> StackSecrets:
    """Those of a directory, made on first use. Several processes may ask at once: all get the same."""
    file = path / SECRETS_FILE
    while True:
        if (found := _read(file, StackSecrets)) is not None:
            return found
        made = StackSecrets(secrets.token_hex(32), secrets.token_hex(24), secrets.token_urlsafe(24))
        fresh = _write_beside(file, msgspec.json.encode(made))
        with contextlib.suppress(FileExistsError):  # somebody else was faster: theirs counts
            file.hardlink_to(fresh)
        fresh.unlink()


def write_private(path: Path, content: bytes) -> None:
    """Replaces a file as a whole, readable by its owner only: a reader sees the old or the new one."""
    _write_beside(path, content).replace(path)


def _write_beside(path: Path, content: bytes) -> Path:
    """A new file of mode 0600 in the same directory."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return fresh


def _read(path: Path, kind: type[Json]) -> Json | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "run-dir") from error


def _short_directory_for_sockets(run_directory: Path) -> Path:
    """Where socket paths fit into a socket address.

    Usually inside the run directory. Else a directory under the system's temporary one whose name
    derives from the run directory, so that the next start finds and removes it after a crash.
    """
    inside = run_directory / "s"
    if len(os.fsencode(inside / LONGEST_SOCKET_NAME)) <= MAX_SOCKET_PATH_BYTES:
        return inside
    digest = hashlib.sha256(os.fsencode(run_directory)).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}-{digest}"
    if _may_be_used(short):
        return short
    return Path(tempfile.mkdtemp(prefix="headrace-"))


def _may_be_used(path: Path) -> bool:
    """Whether nobody else put something there: the temporary directory belongs to everybody."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return True
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there, and somebody else's
        return True
    return True
