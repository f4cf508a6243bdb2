"""Make fake hosts for tests: network namespaces that a bridge connects, without shared loopback,
ports or abstract sockets. This needs root and `ip` of iproute2."""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess

NETWORK = "10.213.0"
HOSTS_FILES = pathlib.Path("/etc/netns")  # `ip netns exec` reads /etc/hosts here


def address_of(host):
    return f"{NETWORK}.{host + 1}"


COORDINATOR = f"{address_of(0)}:9876"  # any port is free in a new namespace


def inside(name, *command):
    return ["ip", "netns", "exec", name, *command]


@contextlib.contextmanager
def namespaces(count):
    """Yield the names of `count` hosts; at the end, kill their processes and remove them."""
    if os.geteuid() or not shutil.which("ip"):
        raise RuntimeError("network namespaces need root, and `ip` of iproute2")
    names = [f"moe-a2a-{os.getpid()}-{host}" for host in range(count)]
    first = names[0]
    try:
        for host, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            folder = HOSTS_FILES / name
            folder.mkdir(parents=True)
            # for gloo
            own = f"{address_of(host)} {socket.gethostname()}"
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{own}\n")
        _ip("-n", first, "link", "add", "bridge", "type", "bridge")
        _ip("-n", first, "addr", "add", f"{address_of(0)}/24", "dev", "bridge")
        _ip("-n", first, "link", "set", "bridge", "up")
        for host, name in enumerate(names[1:], 1):
            port = f"port{host}"
            peer = ("type", "veth", "peer", "name", "uplink", "netns", name)
            _ip("-n", first, "link", "add", port, *peer)
            _ip("-n", first, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{address_of(host)}/24", "dev", "uplink")
            _ip("-n", name, "link", "set", "uplink", "up")
        yield names
    finally:
        for name in names:
            # A removed namespace exists until its last process ends.
            inside_it = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True
            )
            for process in inside_it.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(HOSTS_FILES / name, ignore_errors=True)


def _ip(*args):
    done = subprocess.run(["ip", *args], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(args)}: {done.stderr.strip()}")
