"""Exchange the information that processes need to map each other's workspaces.

Each process publishes a notice through JAX's coordination service (``announce`` in ``group.py``).
The notice contains the name of a socket. Through this socket, other processes map the memory of the
process's devices (``cuda/runtime/handoff.h``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import socket
from collections.abc import Iterable, Sequence

import jax

from .. import compat
from . import extension, native

KEY = "jax_moe_a2a/process/{}"


@dataclasses.dataclass(frozen=True)
class Notice:
    """The data that a process publishes about itself."""

    host: str
    """Identifies the host. Processes with an equal ``host`` can map each other's memory."""
    why_portable: str
    """The reason why the process cannot run the kernels, or ''."""
    version: int
    """Version of the protocol."""
    package: str = ""
    """Version of the installed package."""
    build: str = ""
    """Architectures of the kernels, and a digest of the package's Python sources. Both affect which
    kernels a program calls."""
    socket: str = ""
    secret: str = ""
    pid: int = 0
    pid_namespace: str = ""
    """Namespace of ``pid``; '' if it is not known."""


@compat.per_job
def publish() -> None:
    """Publish the notice of this process, once in a job, and start to answer memory requests."""
    notice = _own_notice()
    if not notice.why_portable:
        native.introduce_devices()  # before other processes ask for memory
        name, secret = native.listen()
        notice = dataclasses.replace(
            notice,
            socket=name,
            secret=secret,
            pid=os.getpid(),
            pid_namespace=_namespace("pid"),
        )
    compat.coordination_set(KEY.format(jax.process_index()), json.dumps(dataclasses.asdict(notice)))


def ranks_of_a_host(domains: Sequence[Sequence[jax.Device]], timeout: float) -> int:
    """Return how many consecutive ranks of a domain are on each host; 0 if hosts differ in this."""
    hosts = [[_notice_of(d.process_index, timeout).host for d in domain] for domain in domains]
    runs = {len(list(run)) for of_domain in hosts for _, run in itertools.groupby(of_domain)}
    return runs.pop() if len(runs) == 1 else 0


def why_not_together(domains: Sequence[Sequence[jax.Device]], timeout: float) -> str:
    """Return why the processes of a mesh cannot run the kernels together, or ''. All processes get
    the same result. Raise a RuntimeError if a notice is missing after ``timeout`` seconds."""
    # Check all domains together, because all processes of the mesh run the same program.
    members = sorted({device.process_index for domain in domains for device in domain})
    everyone = {index: _notice_of(index, timeout) for index in members}
    for index, notice in everyone.items():
        if notice.why_portable:
            return f"process {index} {notice.why_portable}"
    if why := _why_different(everyone):
        return why
    for domain in domains:
        notices = {index: everyone[index] for index in {d.process_index for d in domain}}
        num_hosts = len({notice.host for notice in notices.values()})
        if num_hosts > 1:
            return (
                f"the ranks of processes {sorted(notices)} are on {num_hosts} hosts, and the "
                "kernels run within a host"
            )
    return ""


def _why_different(notices: dict[int, Notice]) -> str:
    first, *others = sorted(notices)
    for index in others:
        for field, name in (("version", "protocol"), ("package", "package"), ("build", "build")):
            one, other = (getattr(notices[i], field) or "unknown" for i in (first, index))
            if one != other:
                return (
                    f"processes {first} and {index} run different versions of jax_moe_a2a: "
                    f"{name} {one} and {name} {other}"
                )
    return ""


def meet(indices: Iterable[int], timeout: float) -> None:
    """Register other processes of this host with the extension. If a process has ended, read its
    notice again, because a restarted process publishes a new one."""
    for index in set(indices) - {jax.process_index()}:
        if native.has_ended(index):
            _notices().pop(index, None)
        notice = _notice_of(index, timeout)
        is_comparable = notice.pid_namespace and notice.pid_namespace == _namespace("pid")
        pid = notice.pid if is_comparable else 0
        native.add_process(index, notice.socket, notice.secret, pid)


_notices = compat.per_job(dict[int, Notice])


def _notice_of(index: int, timeout: float) -> Notice:
    notices = _notices()
    if index in notices:
        return notices[index]
    publish()  # The other process may wait for this process's notice.
    text = compat.coordination_get(KEY.format(index), timeout)
    if text is None:
        raise RuntimeError(
            f"jax_moe_a2a: waiting for process {index}: it has not announced itself within "
            f"{timeout:g} s (the group's first_timeout). A process announces itself when it lowers "
            "a program with a Group over GPUs of several processes, or reads the path of such a "
            "group; all processes must do so"
        )
    notices[index] = _parse_notice(index, text)
    return notices[index]


def _parse_notice(index: int, text: str) -> Notice:
    # A process of another version may publish more fields.
    fields = {field.name: field.type for field in dataclasses.fields(Notice)}
    try:
        told = {name: value for name, value in json.loads(text).items() if name in fields}
        notice = Notice(**told)
        wrong = [name for name, value in told.items() if type(value).__name__ != fields[name]]
        if wrong:
            raise TypeError(f"{wrong[0]} must be {fields[wrong[0]]}; got {told[wrong[0]]!r}")
    except (AttributeError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"jax_moe_a2a: process {index} has announced itself in a way that this process cannot "
            f"read: {error}. Install the same version of jax_moe_a2a in all processes"
        ) from error
    return notice


def _own_notice() -> Notice:
    """Return the notice of this process, without socket and secret."""
    return Notice(
        host=_host(),
        why_portable=native.why_no_gpus(),
        version=native.protocol_version(),
        package=extension.VERSION,
        build=_build(),
    )


def _build() -> str:
    """Return ``Notice.build``, which must be equal in all processes. A digest of the compiled
    extension is not included, because two builds of the same sources may differ."""
    digest = hashlib.sha256()
    for source in sorted(pathlib.Path(__file__).parents[2].rglob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    hooks = " with test hooks" * native.has_test_hooks()
    return f"{native.cuda_build()}{hooks}, sources {digest.hexdigest()[:12]}"


def _host() -> str:
    """Return a name that is unique to this boot of this host and to this network namespace."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
    network_namespace = _namespace("net")
    return f"{boot}/{network_namespace}" if network_namespace else socket.gethostname()


def _namespace(kind: str) -> str:
    """Return the name of this process's Linux namespace of a kind, such as "net"; '' if unknown."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""
