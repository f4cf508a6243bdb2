"""Find processes, descriptors, sockets and files in shared memory that remain after a run."""

import collections
import contextlib
import os
import pathlib

MARK = "MOE_A2A_FAULTS"  # an environment variable of every process that a campaign starts
PROC = pathlib.Path("/proc")
SHARED = pathlib.Path("/dev/shm")
SOCKET = "@jax_moe_a2a-"


def mark():
    """Set MARK, which all later child processes and their children inherit."""
    os.environ[MARK] = str(os.getpid())


def processes():
    mine = f"{MARK}={os.getpid()}".encode()
    found = set()
    for folder in PROC.iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and mine in (folder / "environ").read_bytes().split(b"\0"):
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":  # the process may have become a zombie
                    found.add(int(folder.name))
    return found


def descriptors(process="self"):
    """Return a dict from the number of each open descriptor of a process to its link target."""
    found = {}
    for link in (PROC / str(process) / "fd").iterdir():
        with contextlib.suppress(OSError):
            found[int(link.name)] = os.readlink(link)
    return found


def by_sort(targets):
    """Count the targets: all sockets together, all pipes together, and each file separately."""
    return collections.Counter(target.partition("[")[0] for target in targets.values())


class Before:
    def __init__(self):
        self.processes = processes()
        self.sockets = sockets()
        self.files = files()
        self.descriptors = by_sort(descriptors())

    def left(self):
        found = {
            "processes": processes() - self.processes,
            "sockets": of_campaign(sockets().items() - self.sockets.items()),
            "files in shared memory": of_campaign(files().items() - self.files.items()),
            "descriptors of the campaign": by_sort(descriptors()) - self.descriptors,
        }
        return [f"{sort}: {sorted(left)}" for sort, left in found.items() if left]


def sockets():
    """Return a dict from the name of each listening socket of this package to "socket:[INODE]"."""
    lines = (line.split() for line in (PROC / "net/unix").read_text().splitlines())
    named = (line for line in lines if line[-1].startswith(SOCKET))
    listens = "00010000"  # connections have the same name, but not this flag
    return {name: f"socket:[{inode}]" for *_, flags, _, _, inode, name in named if flags == listens}


def files():
    return {path.name: str(path) for path in SHARED.iterdir()} if SHARED.exists() else {}


def of_campaign(found):
    """Return the names, except those that only processes outside of this campaign have open."""
    if not found:
        return []
    mine, held = processes() | {os.getpid()}, collections.defaultdict(set)
    for folder in PROC.iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit():
                for target in descriptors(folder.name).values():
                    held[target].add(int(folder.name))
    return [name for name, target in found if not held[target] or held[target] & mine]
