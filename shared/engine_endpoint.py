"""Where an engine listens, and what it tells gateways to connect to."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import zmq

from shared.errors import ConfigError

_IPC = "ipc://"
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+):(?P<port>\*|\d{1,5})")
_MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un on Linux, without the closing zero
_EVERY_HOST = ("*", "0.0.0.0", "[::]")


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], address: str, *, send_high_water_mark: int = 1000
) -> zmq.Socket[bytes]:
    """A ROUTER that listens on `ipc:///path` or `tcp://host:port` (port 0 or *: any). Raises ConfigError.

    All limits are explicit. The socket is used by the thread that runs the Router, and by no other.
    """
    router = context.socket(zmq.ROUTER)
    # A send to a gateway that is gone or full is an error to act on, not a message lost in silence.
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a gateway that reconnects takes its name over
    router.setsockopt(zmq.SNDHWM, send_high_water_mark)  # messages per gateway, on top of kernel buffers
    router.setsockopt(zmq.RCVHWM, 10_000)
    router.setsockopt(zmq.MAXMSGSIZE, 64 * 2**20)
    router.setsockopt(zmq.LINGER, 2000)  # ms: last words still leave
    router.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    # A peer that vanished without closing (power, network) is noticed within five seconds.
    router.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
    router.setsockopt(zmq.TCP_KEEPALIVE, 1)
    try:
        listen(router, address, "bind")
    except ConfigError:
        router.close(linger=0)
        raise
    return router


def listen(server: zmq.Socket[bytes], address: str, field: str) -> str:
    """Binds a socket; returns its address, with the real port. Raises ConfigError about `field`."""
    if address.startswith(_IPC):
        _make_way(Path(address.removeprefix(_IPC)), field)
    elif _TCP.fullmatch(address) is None:
        raise ConfigError(f"engine address {address!r} is neither ipc:///path nor tcp://host:port", field)
    try:
        server.bind(_TCP.sub(r"tcp://\g<host>:*", address) if address.endswith(":0") else address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen on {address}: {error}", field) from error
    return server.getsockopt_string(zmq.LAST_ENDPOINT)


def advertised_address(bound: str, advertise: str | None) -> str:
    """What goes into the registry. `bound` is the socket's last endpoint, with the real port.

    In `advertise` port 0 or * stands for the real port. Without it, an engine that listens on all
    interfaces gives this machine's host name, as containers know each other by it.
    """
    match = _TCP.fullmatch(bound)
    if advertise is None:
        if match is not None and match["host"] in _EVERY_HOST:
            return f"tcp://{socket.gethostname()}:{match['port']}"
        return bound
    wanted = _TCP.fullmatch(advertise)
    if wanted is None and not advertise.startswith(_IPC):
        raise ConfigError(
            f"advertised address {advertise!r} is neither ipc:///path nor tcp://host:port", "advertise"
        )
    if wanted is not None and match is not None and wanted["port"] in ("0", "*"):
        return f"tcp://{wanted['host']}:{match['port']}"
    return advertise


def remove_socket_file(address: str) -> None:
    if address.startswith(_IPC):
        Path(address.removeprefix(_IPC)).unlink(missing_ok=True)


def _make_way(path: Path, field: str) -> None:
    """Removes the socket file of an engine that was killed; refuses if somebody still listens there."""
    if len(str(path).encode()) > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"socket path is longer than {_MAX_SOCKET_PATH_BYTES} bytes: {path}", field)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_socket():
        if path.exists():
            raise ConfigError(f"{path} exists and is not a socket", field)
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        else:
            raise ConfigError(f"another process listens on {path}", field)
