"""Test that processes of one host find each other, and that a process answers only processes of its
JAX job."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from pretended import Gpu

import jax_moe_a2a as ma
from jax_moe_a2a._src import compat
from jax_moe_a2a._src.group import native, processes
from jax_moe_a2a._src.group.value import devices_of

pytestmark = [
    pytest.mark.one_process("it pretends several processes in one process"),
    pytest.mark.several_devices("it pretends processes with a device each"),
]

VERSION = 1
WORDS = 7  # number of words of a request before its device ids
REFUSED = 2


@pytest.fixture
def told(monkeypatch):
    """Replace JAX's coordination service by a dict of notices, which processes publish about
    themselves."""
    told = {}
    monkeypatch.setattr(compat, "coordination_set", told.__setitem__)
    monkeypatch.setattr(compat, "coordination_get", lambda key, timeout: told.get(key))
    monkeypatch.setattr(native, "has_kernels", lambda: True)
    monkeypatch.setattr(native, "introduce_devices", lambda: None)
    monkeypatch.setattr(native, "why_no_gpus", lambda: "")
    monkeypatch.setattr(native, "listen", lambda: ("name", "secret"))
    monkeypatch.setattr(native, "limit", lambda name: 64)
    monkeypatch.setattr(native, "why_unreachable", lambda topology: "")
    monkeypatch.setattr(native, "add_process", lambda *process: told.update(met=process))
    monkeypatch.setattr(native, "has_ended", lambda index: False)
    monkeypatch.setattr(native, "protocol_version", lambda: VERSION)
    caches = (processes.publish, processes._notices)
    for cache in caches:
        cache.forget()
    yield told
    for cache in caches:
        cache.forget()


def tell(told, index, host=None, **fields):
    fields = dict(dict(socket=f"name{index}", secret="secret", version=VERSION), **fields)
    notice = dataclasses.replace(processes._own_notice(), host=host or processes._host(), **fields)
    told[processes.KEY.format(index)] = json.dumps(dataclasses.asdict(notice))


def group_of(*owners, axes=("ep",), **options):
    """Return a group over "ep" of fake GPUs; GPU i belongs to the process owners[i]."""
    devices = np.array([Gpu(i, owner) for i, owner in enumerate(owners)])
    mesh = Mesh(devices.reshape(-1, 2) if len(axes) == 2 else devices, axes)
    return ma.Group(mesh, "ep", **options)


def test_a_group_over_processes_of_one_host_takes_the_kernels(told):
    tell(told, 1)
    assert group_of(0, 0, 1, 1).path == "cuda"
    assert told["met"] == (1, "name1", "secret", 0)
    assert group_of(0, 1, 1, 0).path == "cuda"


ASKING = {
    "path": lambda group: group.path,
    "why_portable": lambda group: group._why_portable,
    "topology": lambda group: group.topology,
    "reserve": lambda group: group.reserve(num_tokens=8, hidden=16, top_k=1, num_experts=2),
    "lowering": lambda group: group.placed_by(None),
}


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_a_process_announces_itself_before_it_waits_for_another_one(told, monkeypatch, ask):
    """If two processes waited before they publish their notices, both would wait forever."""
    own = processes.KEY.format(0)

    def get(key, timeout):
        assert own in told, "it waits first"
        return told[key]

    tell(told, 1)
    monkeypatch.setattr(compat, "coordination_get", get)
    monkeypatch.setattr(native, "reserve", lambda *args: None)
    group = group_of(0, 1)
    assert own not in told
    ask(group)
    notice = json.loads(told[own])
    assert (notice["socket"], notice["secret"]) == ("name", "secret")
    assert notice["pid"] == os.getpid()


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_a_process_without_kernels_announces_itself_too(told, monkeypatch, ask):
    """Other processes wait for the notice of a process without kernels, too."""
    monkeypatch.setattr(native, "has_kernels", lambda: False)
    monkeypatch.setattr(native, "why_no_gpus", lambda: "has no CUDA kernels")
    group = group_of(0, 1)
    ask(group)
    notice = json.loads(told[processes.KEY.format(0)])
    assert notice["why_portable"] == "has no CUDA kernels"


def test_a_process_announces_itself_for_the_devices_of_the_program_that_it_lowers(told):
    mesh = group_of(0, 1).mesh
    for group in (ma.Group(axis_name="ep", size=2), ma.Group(AbstractMesh((2,), ("ep",)), "ep")):
        processes.publish.forget()
        told.clear()
        group.placed_by(None)
        assert not told
        group.placed_by(mesh)
        assert list(told) == [processes.KEY.format(0)]


def test_a_process_id_is_used_only_within_its_pid_namespace(told):
    for namespace, expected in ((processes._namespace("pid"), 77), ("another", 0), ("", 0)):
        tell(told, 1, pid=77, pid_namespace=namespace)
        processes._notices.forget()
        assert group_of(0, 0, 1, 1).path == "cuda"
        assert told["met"] == (1, "name1", "secret", expected)


def test_a_process_that_has_ended_is_looked_up_again(told, monkeypatch):
    """A restarted process answers at a different socket."""
    ranks = group_of(0, 0, 1, 1)
    tell(told, 1)
    assert ranks.path == "cuda"
    tell(told, 1, socket="new name")
    assert ranks.path == "cuda" and told["met"][:2] == (1, "name1")
    monkeypatch.setattr(native, "has_ended", lambda index: index == 1)
    assert ranks.path == "cuda" and told["met"][:2] == (1, "new name")


def test_reports_and_closing_wait_for_no_process_and_announce_nothing(told, monkeypatch):
    """After an error about a missing process, a program may close the group in a `finally`."""
    closed = []
    waited = []
    monkeypatch.setattr(native, "wait", lambda *args: waited.append(args))
    monkeypatch.setattr(native, "close", lambda *args: closed.append(args))
    monkeypatch.setattr(native, "failure", lambda topology: "")
    monkeypatch.setattr(native, "reserved_bytes", lambda topology, kind: 0)
    monkeypatch.setattr(native, "mapped_bytes", lambda topology, kind: [])
    group = group_of(1, 1)  # this process (0) owns no device of the group
    assert group.memory() == ()
    group = group_of(0, 1)
    group.check()
    group.close()
    devices = tuple(device.id for device in devices_of(group))
    assert closed == waited == [((devices, 2), 60.0), ((devices, 1), 60.0)]
    assert not told


@pytest.mark.parametrize(
    ("timeout", "given", "seconds"),
    ((30.0, {}, 60.0), (50.0, {}, 100.0), (50.0, {"timeout": 2}, 2)),
)
def test_closing_waits_for_devices_in_bounded_time(told, monkeypatch, timeout, given, seconds):
    """If a device is still busy after the timeout, `close` raises an error and closes nothing."""
    monkeypatch.setattr(native, "close", lambda *args: pytest.fail("it was closed"))

    def wait(topology, timeout):
        raise RuntimeError(f"still at work after {timeout:g} s")

    monkeypatch.setattr(native, "wait", wait)
    with pytest.raises(RuntimeError, match=f"after {seconds:g} s"):
        group_of(0, 1, timeout=timeout).close(**given)


def test_a_group_of_one_process_publishes_nothing(told):
    assert group_of(0, 0).path == "cuda"
    assert group_of(0, 1, implementation="portable").path == "portable"
    assert not told


def hosts_of_two(told, monkeypatch):
    """Put processes 0 and 1 on one host, and 2 and 3 on another."""
    for index in (1, 2, 3):
        tell(told, index, host="another" if index > 1 else None)
    monkeypatch.setattr(Gpu, "partition_index", property(lambda gpu: gpu.id // 2), raising=False)


@pytest.mark.parametrize("implementation", (None, "cuda"))
def test_a_group_over_hosts_and_ranks_runs_the_kernels_within_hosts(
    told, monkeypatch, implementation
):
    hosts_of_two(told, monkeypatch)
    gpus = np.array([Gpu(i, i) for i in range(4)]).reshape(2, 2)
    group = ma.Group(Mesh(gpus, ("host", "ep")), ("host", "ep"), implementation=implementation)
    assert group.two_level and group.path == "cuda within hosts, portable between"
    assert [level.path for level in group.levels] == ["portable", "cuda"]
    assert group._why_portable.startswith("between hosts: the ranks of processes [0, 2] are on 2 ")
    assert group.levels[1].topology == ((0, 1, 2, 3), 2)


def test_an_axis_that_spans_hosts_warns_with_a_remedy(told, monkeypatch):
    hosts_of_two(told, monkeypatch)
    with pytest.warns(UserWarning, match="takes the portable path.*are on 2 hosts"):
        assert "two axes, hosts and ranks of a host" in group_of(0, 1, 2, 3)._why_portable
    with pytest.raises(ValueError, match="implementation must be None or 'portable'.*2 hosts"):
        _ = group_of(0, 1, 2, 3, implementation="cuda").path


def test_interleaved_hosts_take_the_portable_path(told):
    for index, host in ((1, "another"), (2, "another"), (3, None)):
        tell(told, index, host=host)
    why = group_of(0, 1, 2, 3, 0, 1)._why_portable
    assert "on 2 hosts" in why and "two axes" not in why


def test_a_host_of_another_version_takes_no_kernels_within_it(told, monkeypatch):
    """With different versions, the hosts could trace different programs."""
    hosts_of_two(told, monkeypatch)
    for index in (2, 3):
        tell(told, index, host="another", package="0.0.1")
    gpus = np.array([Gpu(i, i) for i in range(4)]).reshape(2, 2)
    group = ma.Group(Mesh(gpus, ("host", "ep")), ("host", "ep"))
    assert group.path == "portable"
    why = "within and between hosts: processes 0 and 2 run different versions"
    assert group._why_portable.startswith(why)


def test_hosts_that_do_not_exchange_tokens_keep_the_kernels(told):
    tell(told, 1, host="another")
    assert group_of(0, 0, 1, 1, axes=("dp", "ep")).path == "cuda"


def test_all_processes_take_a_path_that_each_of_them_has(told):
    tell(told, 1, why_portable="has no CUDA kernels")
    assert group_of(0, 0, 1, 1)._why_portable == "process 1 has no CUDA kernels"
    assert group_of(0, 0, 1, 1, axes=("dp", "ep")).path == "portable"


@pytest.mark.parametrize(
    "field, other", (("version", 2), ("package", "0.0.1"), ("build", "CUDA 12.0 for 90"))
)
def test_processes_of_different_versions_or_builds_take_the_portable_path(told, field, other):
    """The package's version determines the shapes of a program."""
    tell(told, 1, **{field: other})
    why = group_of(0, 0, 1, 1)._why_portable
    assert why.startswith("processes 0 and 1 run different versions of jax_moe_a2a: ")
    assert str(other) in why and str(getattr(processes._own_notice(), field)) in why


@pytest.mark.parametrize(
    "text", ("", "{", "[1]", "{}", '{"host": "a", "why_portable": "", "version": 1, "secret": 7}')
)
def test_a_notice_that_cannot_be_read_is_an_error_that_names_its_process(told, text):
    told[processes.KEY.format(1)] = text
    with pytest.raises(RuntimeError, match="process 1 has announced itself in a way that .* read:"):
        _ = group_of(0, 1).path


def test_a_mesh_of_processes_that_jax_does_not_know_to_be_one_program_is_an_error():
    with pytest.raises(RuntimeError, match=r"jax.distributed.initialize\(\) was not called"):
        compat.coordination_set("key", "value")


def test_a_process_that_never_comes_is_an_error_that_names_it(told):
    with pytest.raises(RuntimeError, match=r"process 1: it has not announced itself within 0.1 s"):
        _ = group_of(0, 1, timeout=0.05, first_timeout=0.1).path


@pytest.fixture(scope="module")
def endpoint():
    if not native.has_kernels():
        pytest.skip("the package was built without CUDA kernels, and does not listen")
    return native.listen()


def ask(endpoint, secret, request, *, patience=5.0):
    """Return a process's answer (status, text), or None without an answer."""
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(patience)
        server.connect("\0" + endpoint[0])
        count = len(request)
        server.sendall(secret.encode() + struct.pack(f"{1 + count}q", count, *request))
        try:
            head = server.recv(24, socket.MSG_WAITALL)
        except ConnectionResetError:  # it closed before it had read everything
            return None
        if not head:
            return None
        status, length, allocations = struct.unpack("3q", head)
        assert allocations == 0
        return status, server.recv(length, socket.MSG_WAITALL).decode()


def test_the_socket_is_no_file(endpoint):
    names = [line.split()[-1] for line in pathlib.Path("/proc/net/unix").read_text().splitlines()]
    assert f"@{endpoint[0]}" in names
    assert endpoint[0].startswith("jax_moe_a2a-")


def test_a_request_without_the_secret_gets_no_answer(endpoint):
    wrong = endpoint[1][:-1] + ("0" if endpoint[1][-1] != "0" else "1")
    assert ask(endpoint, wrong, [0] * WORDS) is None
    assert ask(endpoint, endpoint[1], [0] * WORDS) is not None


OTHER_VERSION = "it runs another version"
NOT_UNDERSTOOD = "it does not understand the request"
# The reply to a valid request, because no process owns the devices in DEVICES.
UNDERSTOOD = "is unknown in this process"
DEVICES = (7001, 7002)
MOST_BYTES = 32 << 30  # the largest half of the ring buffer


def request_of(
    kind=0,
    ranks=2,
    device=0,
    closed=0,
    first_allocation=0,
    half_bytes=0,
    devices=DEVICES,
    version=None,
):
    version = native.protocol_version() if version is None else version
    return [version, kind, ranks, device, closed, first_allocation, half_bytes, *devices]


@pytest.mark.parametrize(
    "request_, why",
    (
        ([], OTHER_VERSION),
        (request_of(version=0), OTHER_VERSION),
        (request_of(device=2), NOT_UNDERSTOOD),
        (request_of(devices=DEVICES[:1]), NOT_UNDERSTOOD),  # half a domain
        (request_of(kind=2), NOT_UNDERSTOOD),
        (request_of(first_allocation=-1), NOT_UNDERSTOOD),
        (request_of(half_bytes=-1), NOT_UNDERSTOOD),
        (request_of(half_bytes=MOST_BYTES + 1), NOT_UNDERSTOOD),
        (request_of(), UNDERSTOOD),
        (request_of(kind=1, half_bytes=MOST_BYTES), UNDERSTOOD),
    ),
)
def test_a_refused_request_gets_the_reason(endpoint, request_, why):
    status, text = ask(endpoint, endpoint[1], request_)
    assert status == REFUSED and why in text


def test_a_request_that_never_ends_delays_others_for_seconds_only(endpoint):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect("\0" + endpoint[0])
        silent.sendall(endpoint[1].encode()[:5])
        begin = time.monotonic()
        assert ask(endpoint, endpoint[1], [], patience=10.0) is not None
        assert time.monotonic() - begin < 5


needs_a_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


# `ask SOCKET SECRET PID` prints the problem, whether PID has ended, and the number of allocations.
# `listen [MS]` prints socket and secret, and answers requests. For each line of input, it forks a
# child, which closes its copy of the socket after MS milliseconds. `hold FD` asks itself, forks
# while it answers with FD, and ends. `throw` asks itself three times, and throws twice.
PEERS = r"""
#include <pthread.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include "runtime/handoff.h"
using namespace moe_a2a;

void Fork() {
  const pid_t child = fork();
  if (child == 0) {
    sleep(60);
    _exit(0);
  }
  std::printf("%d\n", child);
  std::fflush(stdout);
}

int delay_ms = 0;

int main(int argc, char** argv) {
  const Deadline deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  Answer given;
  if (!std::strcmp(argv[1], "listen") && argc > 2) {
    delay_ms = std::atoi(argv[2]);
    pthread_atfork(nullptr, nullptr, [] { usleep(1000 * delay_ms); });  // before those of Listen
  }
  if (!std::strcmp(argv[1], "ask")) {
    const Problem problem = Ask({argv[2], argv[3], std::atoi(argv[4])}, {1}, deadline, &given);
    std::printf("%s|%d|%zu\n", problem.c_str(), given.has_ended, given.allocations.size());
    return 0;
  }
  const bool holds = !std::strcmp(argv[1], "hold"), throws = !std::strcmp(argv[1], "throw");
  const auto answer = [&](const Request& request) -> Answer {
    if (throws && request[0] == 0) throw std::runtime_error("no room for a vector");
    if (throws && request[0] == 1) throw 7;
    if (!holds) return {Status::kRefused, "nothing is wrong", {}};
    const Allocation memory = {0, 1, Descriptor(std::atoi(argv[2]))};
    Fork();
    _exit(0);
  };
  Endpoint endpoint;
  if (Problem p = Listen(answer, &endpoint); !p.empty()) return std::puts(p.c_str()), 1;
  if (holds) {
    Ask(endpoint, {1}, deadline, &given);
    return 1;
  }
  for (int64_t word = 0; throws && word < 3; ++word) {
    const Problem problem = Ask(endpoint, {word}, deadline, &given);
    std::printf("%s|%d|%s\n", problem.c_str(), static_cast<int>(given.status), given.why.c_str());
  }
  if (throws) return 0;
  std::printf("%s %s\n", endpoint.socket.c_str(), endpoint.secret.c_str());
  std::fflush(stdout);
  while (std::getchar() != EOF) Fork();
  _exit(0);
}
"""

# This program listens at a socket name, answers with a descriptor, and prints what it received.
IMPOSTOR = r"""
import os, socket, struct, sys
name, user = sys.argv[1], int(sys.argv[2])
if user:
    os.setgroups([]), os.setgid(user), os.setuid(user)
server = socket.socket(socket.AF_UNIX)
server.bind("\0" + name)
server.listen()
print("listening", flush=True)
asker, _ = server.accept()
told = asker.recv(32 + 8 + 8, socket.MSG_WAITALL)  # secret, number of words, one word
try:
    asker.sendall(struct.pack("3q", 0, 0, 1) + struct.pack("2q", 0, 1))
    socket.send_fds(asker, [b"x"], [0])
except OSError:  # it has closed the connection
    pass
print(told.decode(errors="replace")[:32], flush=True)
"""
SECRET = "0123456789abcdef" * 2
NOBODY = 65534


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    folder, cuda = tmp_path_factory.mktemp("peers"), pathlib.Path(__file__).parents[1] / "cuda"
    (folder / "main.cc").write_text(PEERS)
    sources = [
        folder / "main.cc",
        *(cuda / "runtime" / f"{n}.cc" for n in ("handoff", "descriptor")),
    ]
    options = ["-std=c++17", f"-I{cuda}", "-pthread", "-o", folder / "main"]
    subprocess.run(["g++", *options, *sources], check=True)
    return str(folder / "main")


@needs_a_compiler
def test_an_exception_while_answering_is_a_refusal_and_ends_no_process(peers):
    ran = subprocess.run([peers, "throw"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert [line.split("|") for line in ran.stdout.splitlines()] == [
        ["", str(REFUSED), "it failed while it answered: no room for a vector"],
        ["", str(REFUSED), "it failed while it answered"],
        ["", str(REFUSED), "nothing is wrong"],
    ]


def asked_impostor(peers, user, pid_of):
    """Return the problem, whether the asked process seems to have ended, the number of allocations,
    and what the impostor received."""
    name = f"jax_moe_a2a-test-{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, "-c", IMPOSTOR, name, str(user)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as impostor:
        assert impostor.stdout.readline() == "listening\n"
        ask = [peers, "ask", name, SECRET, str(pid_of(impostor))]
        asked = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60)
        told = impostor.stdout.readline().strip()
    problem, has_ended, allocations = asked.stdout.strip().split("|")
    return problem, has_ended == "1", int(allocations), told


@pytest.fixture(scope="module")
def named_peers(peers):
    """Skip the test if Linux does not name the process at the other end of a socket."""
    with Listener([peers, "listen"]) as listener, socket.socket(socket.AF_UNIX) as server:
        server.connect("\0" + listener.endpoint[0])
        told = server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", told)[0] != listener.process.pid:
            pytest.skip("this kernel does not name the process at the other end of a socket")
    return peers


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@needs_a_compiler
@needs_root
def test_a_process_of_another_user_that_took_the_name_learns_no_secret(named_peers):
    problem, has_ended, allocations, told = asked_impostor(named_peers, NOBODY, lambda impostor: 0)
    assert f"belongs to user {NOBODY}, and this process to user 0" in problem
    assert (has_ended, allocations, told) == (True, 0, "")


@needs_a_compiler
def test_another_process_of_this_user_that_took_the_name_is_not_asked_either(named_peers):
    problem, has_ended, allocations, told = asked_impostor(
        named_peers, 0, lambda impostor: os.getpid()
    )
    assert f"instead of {os.getpid()}" in problem
    assert (has_ended, allocations, told) == (True, 0, "")
    for pid_of in (lambda impostor: impostor.pid, lambda impostor: 0):
        assert asked_impostor(named_peers, 0, pid_of) == ("", False, 1, SECRET)


class Listener:
    """A process that listens, and the children that it has forked."""

    def __init__(self, command, **options):
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(command, **pipes, **options)
        self.children = []

    def __enter__(self):
        return self

    def hear(self):
        return self.process.stdout.readline().split()

    @functools.cached_property
    def endpoint(self):
        return self.hear()

    def fork(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.children.append(int(self.hear()[0]))

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __exit__(self, *_):
        for child in self.children:
            os.kill(child, signal.SIGKILL)
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


ASKING = r"""
import os, socket, sys
name, secret, user = sys.argv[1:]
os.setgroups([]), os.setgid(int(user)), os.setuid(int(user))
server = socket.socket(socket.AF_UNIX)
server.settimeout(10)
server.connect("\0" + name)
try:
    server.sendall(secret.encode() + bytes(8))  # a request of no words
    print(len(server.recv(24)))
except (BrokenPipeError, ConnectionResetError):
    print(0)
"""


@needs_a_compiler
@needs_root
@pytest.mark.parametrize("user, answer_bytes", ((0, 24), (NOBODY, 0)))
def test_a_process_of_another_user_gets_no_answer_even_with_the_secret(
    named_peers, user, answer_bytes
):
    with Listener([named_peers, "listen"]) as listener:
        command = [sys.executable, "-c", ASKING, *listener.endpoint, str(user)]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert asked.stdout.strip() == str(answer_bytes), asked


@needs_a_compiler
@pytest.mark.parametrize("delay_ms", (0, 500))
def test_a_dead_process_is_known_to_have_ended_while_a_child_that_it_forked_lives(peers, delay_ms):
    """With a delay, the child still has a copy of the dead process's socket open."""
    with Listener([peers, "listen", str(delay_ms)]) as listener:
        for _ in range(2):
            assert ask(listener.endpoint, listener.endpoint[1], []) is not None
            listener.fork()
            assert ask(listener.endpoint, listener.endpoint[1], []) is not None
        listener.kill()
        command = [peers, "ask", *listener.endpoint, str(listener.process.pid)]
        begin = time.monotonic()
        asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert asked.stdout.strip() == "it has ended|1|0"
        assert time.monotonic() - begin < 5


@needs_a_compiler
def test_a_forked_child_does_not_hold_memory_that_its_parent_was_giving(peers):
    """Reading from a pipe ends when no process has the other end open."""
    reading, writing = os.pipe()
    with open(reading, "rb") as memory:
        with Listener([peers, "hold", str(writing)], pass_fds=[writing]) as listener:
            os.close(writing)
            listener.children.append(int(listener.hear()[0]))
            listener.process.wait(timeout=20)
            os.set_blocking(reading, False)
            # The child's fork handlers close its copy of the memory. They may run late, even after
            # the end of its parent.
            end = time.monotonic() + 10
            while (held := memory.read()) is None and time.monotonic() < end:
                time.sleep(0.01)
            assert held == b""
