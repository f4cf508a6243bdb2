"""Test that one of two processes ends with the right error, and leaves nothing behind, if the other
fails. Each test starts two workers, which run this file.
"""

import ctypes
import faulthandler
import json
import math
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]

import cases
import processes
import pytest

TIMEOUT = 5.0  # the timeout of the group, in seconds
SLACK = 4.0  # seconds from the timeout to the error of the process
START = 60.0  # seconds for a worker to start and compile
COMPILE = 15.0  # seconds for a worker to make a group and compile a program
LIMIT = 85.0  # maximum lifetime of a worker, in seconds
SURVIVOR, VICTIM = 0, 1
CLOSE = 2.0  # timeout of close(), in seconds
CYCLES = 20
OWN_GPU_ONLY = "MOE_A2A_TEST_OWN_GPU_ONLY"
SHARES_GPU = cases.RANKS_ON_ONE_GPU > 0

pytestmark = pytest.mark.one_process("it starts processes of its own")
needs_nccl = pytest.mark.several_devices("NCCL refuses two processes on one GPU")


# ------------------------------------------------------------------------------ what a worker does


class Job:
    def __init__(self, **options):
        import checked
        import jax
        import numpy as np
        from jax.sharding import Mesh

        self.checked = checked
        self.mesh = Mesh(np.array(jax.devices()), (checked.AXIS,))
        self.group = checked.new_group(self.mesh, timeout=TIMEOUT, **options)
        self.small = self.new_program(checked.Shape(tokens=64))
        self.large = self.new_program(checked.Shape(tokens=300, hidden=2048))
        self.larger = self.new_program(checked.Shape(tokens=900, hidden=4096))
        self.summed = checked.sum_program(self.group, checked.Shape(tokens=64))

    def new_program(self, shape):
        return self.checked.new_program(shape, self.group)

    def begin(self):
        return self.checked.begin(self.group)

    def compile(self, *programs):
        return [program.lower(self.begin()).compile() for program in programs]

    def ready(self, *programs):
        compiled = self.compile(*programs)
        meet()
        return compiled

    def wrong(self, program, times=3):
        state = self.checked.repeat(program, times, self.begin())
        counts = self.checked.own_counts(state)
        self.group.check()
        return int(sum(own.sum() for own in counts.values()))

    def sums(self, program, times):
        found = []
        for _ in range(times):
            (shard,) = program(self.begin()).addressable_shards
            found.append(float(shard.data[0]))
        return found

    def close(self):
        self.group.close()
        tell("closed")

    def error_of_check(self):
        try:
            self.group.check()
        except RuntimeError as raised:
            return str(raised)
        return ""

    def until_it_fails(self, program):
        """Repeat calls until one fails. Return its error, or the number of wrong elements."""
        state, checked = self.begin(), self.checked
        try:
            while True:
                state = program(state)
                counts = checked.own_counts(state)
                plausible = sum(int(own[0]) for own in counts.values())
                if plausible:
                    return dict(error="", plausible=plausible)
                self.group.check()
        except RuntimeError as raised:
            return dict(error=str(raised), plausible=0)


def tell(word, **found):
    print(f"@{word} {json.dumps(found)}", flush=True)


def wait_for(word):
    said = sys.stdin.readline().strip()
    assert said == word, f"waiting for {word!r}, got {said!r}"


def meet():
    tell("met")
    wait_for("met")


def num_contexts():
    cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    flags, active = ctypes.c_uint(), [ctypes.c_int() for _ in range(count.value)]
    for device, is_active in enumerate(active):
        state = ctypes.byref(flags), ctypes.byref(is_active)
        assert cuda.cuDevicePrimaryCtxGetState(device, *state) == 0
    return sum(is_active.value for is_active in active)


def fill_gpu(but):
    """Allocate all memory of this process's GPU except `but` GiB, until the process ends."""
    import jax

    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    device = jax.local_devices()[0].local_hardware_id
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    blocks, address = [], ctypes.c_uint64()
    while cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 30)) == 0:
        blocks.append(address.value)
    for block in blocks[-but:]:
        assert cuda.cuMemFree_v2(ctypes.c_uint64(block)) == 0
    assert cuda.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0


def exchanging():
    job = Job()
    (small,) = job.ready(job.small)
    tell("ready", wrong=job.wrong(small))
    return job, small


def loop_until_it_fails(process):
    job, small = exchanging()
    tell("failed", **job.until_it_fails(small))
    job.close()


def idle(process):
    job, small = exchanging()
    if process == VICTIM:
        wait_for("check")
        tell("failed", error=job.error_of_check(), plausible=0)
    else:
        tell("failed", **job.until_it_fails(small))
    go_on_after_close(job, small)


def late_with_psum(process):
    """The victim makes its next call after the timeout of the survivor."""
    job = Job(on_failure="nan")
    small, summed = job.ready(job.small, job.summed)
    tell("ready", sums=job.sums(summed, 2))
    if process == VICTIM:
        time.sleep(2 * TIMEOUT + SLACK)
    tell("failed", sums=job.sums(summed, 3), error=job.error_of_check())
    go_on_after_close(job, small)


def stuck_in_a_collective(process):
    """The survivor's GPU waits in a psum that the victim joins later."""
    import jax
    from jax import lax

    job = Job()
    total = job.checked.mapped(lambda state: lax.psum(state[0], job.checked.AXIS), job.group)
    small, total = job.ready(job.small, jax.jit(total))
    jax.block_until_ready(total(job.begin()))
    tell("ready", wrong=job.wrong(small))
    if process == VICTIM:
        wait_for("join")
        jax.block_until_ready(total(job.begin()))
    else:
        pending = total(job.begin())
        start, error = time.monotonic(), ""
        try:
            job.group.close(timeout=CLOSE)
        except RuntimeError as raised:
            error = str(raised)
        seconds = time.monotonic() - start
        tell("failed", error=error, seconds=seconds, memory=len(job.group.memory()))
        jax.block_until_ready(pending)
    go_on_after_close(job, small)


def go_on_after_close(job, *programs):
    wait_for("close")
    job.group.close()
    tell("stopped")
    wait_for("go on")
    tell("right", wrong=sum(map(job.wrong, programs)))
    job.close()


def never_makes_a_group(process):
    import jax

    jax.devices()
    if process == VICTIM:
        tell("ready")
        wait_for("end")
    job = Job()
    tell("ready")
    tell("failed", **job.until_it_fails(job.small))
    tell("closed")


def never_calls(process):
    job = Job()
    (program,) = job.compile(job.small)
    tell("ready")
    if process == VICTIM:
        wait_for("end")
    tell("failed", **job.until_it_fails(program))
    job.close()


def other_order_of_execution(process):
    job = Job()
    programs = job.ready(job.small, job.large)
    tell("ready", wrong=sum(map(job.wrong, programs)))
    found = job.until_it_fails(programs[process])
    tell("failed", **found)
    go_on_after_close(job, *programs)


def growth(process):
    job = Job()
    (small,) = job.ready(job.small)
    wrong = [job.wrong(small)]
    small_memory = [m.mapped_bytes for m in job.group.memory()]
    (large,) = job.ready(job.large)
    wrong += [job.wrong(large), job.wrong(small)]
    (larger,) = job.ready(job.larger)
    wrong += [job.wrong(larger), job.wrong(small), job.wrong(large)]
    memory = [m.mapped_bytes for m in job.group.memory()]
    job.group.close()  # the other process may still finish its exchange
    wrong += [job.wrong(large), job.wrong(larger), job.wrong(small)]
    tell("right", wrong=sum(wrong), memory=[small_memory, memory])
    job.close()


def no_room(process):
    """The victim's GPU has no memory for ring halves of 4 GiB."""
    job = Job()
    (small,) = job.ready(job.small)
    wrong, error = [job.wrong(small)], ""
    if process == VICTIM:
        fill_gpu(but=2)
    meet()
    if process == SURVIVOR:
        try:
            job.group.reserve(num_tokens=1 << 17, hidden=1 << 13, top_k=1, num_experts=2)
        except RuntimeError as raised:
            error = str(raised)
    (large,) = job.ready(job.large)
    wrong += [job.wrong(large), job.wrong(small)]
    tell("right", wrong=sum(wrong), error=error)
    job.close()


def reopening(process):
    """Count descriptors after 2 and 22 cycles, and CUDA contexts before and after all cycles."""
    import jax

    jax.devices()
    contexts = [num_contexts()]
    job = Job()
    (small,) = job.ready(job.small)
    descriptors = []
    wrong = 0
    for cycle in range(CYCLES + 2):
        wrong += job.wrong(small, times=1)
        job.group.close()
        if cycle in (1, CYCLES + 1):  # not 0, which also starts the CUDA runtime
            meet()
            time.sleep(0.5)  # the requests of both processes end
            descriptors.append(len(os.listdir("/proc/self/fd")))
            meet()
    contexts.append(num_contexts())
    tell("right", wrong=wrong, descriptors=descriptors, contexts=contexts)
    tell("closed")


def exchange(process):
    job = Job()
    (small,) = job.ready(job.small)
    tell("right", wrong=job.wrong(small, times=20))
    job.close()


def work(scenario):
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    process = processes.joined()[2]
    # JAX ends a process if the other process is missing for longer than the heartbeat timeout.
    own_gpu = {"local_device_ids": [0]} if OWN_GPU_ONLY in os.environ else {}
    processes.join(heartbeat_timeout_seconds=600, **own_gpu)
    try:
        scenario(process)
        wait_for("end")  # process 0 is the coordinator; if it ends first, JAX ends process 1
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


# ------------------------------------------------------------------------------------ two workers


class Worker:
    def __init__(self, scenario, address, process, folder, meet, own_gpu_only=False):
        environment = processes.environment_of(address, 2, process, 1)
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # pytest has most GPU memory
        environment["TMPDIR"] = str(folder)
        root = str(HERE.parent.parent)
        path = [root, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        # Without this flag, the compilers of both processes wait for each other.
        environment["XLA_FLAGS"] = "--xla_gpu_shard_autotuning=false"
        environment.pop("MOE_A2A_TEST_RANKS_ON_ONE_GPU", None)  # each worker has one rank
        if own_gpu_only or SHARES_GPU:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
            environment["CUDA_VISIBLE_DEVICES"] = visible[0 if SHARES_GPU else process]
            environment[OWN_GPU_ONLY] = "1"
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / pathlib.Path(__file__).name), scenario.__name__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.lines = queue.Queue()
        self.printed = []
        self.meet = meet
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            if line.startswith("@met "):
                self.meet()
            self.lines.put(line)
        self.lines.put(None)

    def hear(self, word, seconds):
        """Return the values that the worker prints with `word`."""
        end = time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=max(end - time.monotonic(), 0.01))
            except queue.Empty:
                raise AssertionError(f"no {word!r} in {seconds:.0f} s:\n{self.end()}") from None
            if line is None:
                raise AssertionError(f"no {word!r}, but the end:\n{self.end()}")
            self.printed.append(line)
            if line.startswith(f"@{word} "):
                return json.loads(line.split(" ", 1)[1])

    def say(self, word):
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def finish(self):
        self.hear("closed", 20)
        self.say("end")
        assert self.process.wait(timeout=20) == 0, self.end()

    def end(self):
        self.kill()
        self.errors.seek(0)
        return "".join(self.printed)[-2000:] + self.errors.read()[-4000:]


class Pair:
    def __init__(self, scenario, folder, **options):
        address = processes.free_address()
        meeting = threading.Barrier(2, action=lambda: self.say("met"))
        self.workers = [
            Worker(scenario, address, i, folder, meeting.wait, **options) for i in range(2)
        ]
        self.survivor, self.victim = self.workers

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self.workers:
            worker.kill()

    def hear(self, word, seconds=START):
        return [worker.hear(word, seconds) for worker in self.workers]

    def say(self, word):
        for worker in self.workers:
            worker.say(word)

    def hear_right(self):
        found = self.hear("right")
        assert [right["wrong"] for right in found] == [0, 0], found
        return found

    def finish(self):
        for worker in reversed(self.workers):
            worker.finish()


def leavings(folder):
    shared = {name for name in os.listdir("/dev/shm") if not name.startswith("nccl-")}
    files = {str(path) for path in pathlib.Path(folder).rglob("*") if path.is_file()}
    unix = pathlib.Path("/proc/net/unix").read_text().splitlines()
    return shared, files, {line.split()[-1] for line in unix if "jax_moe_a2a" in line}


@pytest.fixture
def folder(tmp_path):
    """Check at the end that no files, sockets or shared memory remain."""
    shared_before, _, sockets_before = leavings(tmp_path)
    yield tmp_path
    shared, files, sockets = leavings(tmp_path)
    assert shared <= shared_before, shared - shared_before
    assert not files and sockets <= sockets_before, (files, sockets)


PHASE = "waiting for|sending rows|open"


def assert_names_who_and_where(found, seconds, who=VICTIM):
    assert found["plausible"] == 0, found
    assert re.search(rf"(rank|process) {who}\b", found["error"]), found
    assert re.search(PHASE, found["error"]), found
    assert seconds < TIMEOUT + SLACK, (seconds, found)


# ------------------------------------------------------------------------------------------- tests


def test_other_processes_get_an_error_in_time_if_a_process_is_killed(folder):
    with Pair(loop_until_it_fails, folder) as pair:
        assert not any(ready["wrong"] for ready in pair.hear("ready"))
        time.sleep(0.3)
        start = time.monotonic()
        pair.victim.kill()
        found = pair.survivor.hear("failed", TIMEOUT + 2 * SLACK)
        assert_names_who_and_where(found, time.monotonic() - start)
        pair.survivor.finish()


def test_other_processes_get_an_error_in_time_if_a_process_is_stopped(folder):
    with Pair(loop_until_it_fails, folder) as pair:
        pair.hear("ready")
        time.sleep(0.3)
        start = time.monotonic()
        pair.victim.signal(signal.SIGSTOP)
        found = pair.survivor.hear("failed", TIMEOUT + 2 * SLACK)
        assert_names_who_and_where(found, time.monotonic() - start)
        # The stopped victim now continues, and fails, too.
        start = time.monotonic()
        pair.victim.signal(signal.SIGCONT)
        found = pair.victim.hear("failed", TIMEOUT + 2 * SLACK)
        assert_names_who_and_where(found, time.monotonic() - start, who=SURVIVOR)
        pair.finish()


def close_and_go_on(pair):
    pair.say("close")
    pair.hear("stopped", 20)
    pair.say("go on")
    pair.hear_right()
    pair.finish()


def test_a_process_that_makes_no_call_finds_that_another_one_has_failed(folder):
    with Pair(idle, folder) as pair:
        pair.hear("ready")
        pair.survivor.hear("failed", TIMEOUT + 2 * SLACK)
        pair.victim.say("check")
        found = pair.victim.hear("failed", SLACK)
        assert f'rank {SURVIVOR} has reported "timeout"' in found["error"], found
        close_and_go_on(pair)


@needs_nccl
def test_processes_that_do_not_raise_end_a_program_with_a_psum(folder):
    with Pair(late_with_psum, folder) as pair:
        assert all(math.isfinite(each) for ready in pair.hear("ready") for each in ready["sums"])
        for found in pair.hear("failed", 4 * (TIMEOUT + SLACK)):
            assert all(map(math.isnan, found["sums"])) and "timeout" in found["error"], found
        close_and_go_on(pair)


@needs_nccl
def test_closing_does_not_wait_for_a_collective_without_end(folder):
    with Pair(stuck_in_a_collective, folder) as pair:
        pair.hear("ready")
        found = pair.survivor.hear("failed", CLOSE + 2 * SLACK)
        assert "still at work" in found["error"] and "other work" in found["error"], found
        assert found["seconds"] < CLOSE + SLACK and found["memory"] > 0, found
        pair.victim.say("join")
        close_and_go_on(pair)


def assert_never_comes(scenario, folder, compiling=0):
    with Pair(scenario, folder) as pair:
        pair.hear("ready")
        start = time.monotonic()
        found = pair.survivor.hear("failed", START)
        assert_names_who_and_where(found, time.monotonic() - start - compiling)
        pair.survivor.finish()


def test_other_processes_get_an_error_in_time_if_a_process_makes_no_group(folder):
    assert_never_comes(never_makes_a_group, folder, COMPILE)


def test_other_processes_get_an_error_in_time_if_a_process_never_calls(folder):
    assert_never_comes(never_calls, folder)


def test_programs_that_run_in_another_order_in_each_process_get_an_error(folder):
    with Pair(other_order_of_execution, folder) as pair:
        pair.hear("ready")
        start = time.monotonic()
        found = pair.hear("failed", TIMEOUT + 2 * SLACK)
        assert time.monotonic() - start < TIMEOUT + SLACK
        assert all(each["error"] and not each["plausible"] for each in found), found
        assert any("mismatched calls" in each["error"] for each in found), found
        close_and_go_on(pair)


def test_the_workspace_of_several_processes_grows_closes_and_opens_again(folder):
    with Pair(growth, folder) as pair:
        for right in pair.hear_right():
            small, grown = right["memory"]
            assert len(small) == len(grown) == 1 and grown[0] > small[0] > 0
        pair.finish()


@pytest.mark.several_devices("it fills the GPU of one process")
def test_a_small_reservation_succeeds_after_another_process_had_no_room_for_a_large_one(folder):
    with Pair(no_room, folder) as pair:
        found = pair.hear_right()
        error = found[SURVIVOR]["error"]
        assert f"process {VICTIM}" in error and "out of memory" in error, error
        pair.finish()


def test_opening_and_closing_leaves_no_descriptor_and_makes_no_context(folder):
    """22 cycles leave no more descriptors than 2 cycles."""
    with Pair(reopening, folder) as pair:
        for right in pair.hear_right():
            few, many = right["descriptors"]
            assert many <= few, right
            before, after = right["contexts"]
            assert after == before, right
        pair.finish()


def test_processes_that_see_only_their_own_gpu_exchange(folder):
    with Pair(exchange, folder, own_gpu_only=True) as pair:
        pair.hear_right()
        pair.finish()


if __name__ == "__main__":
    work(globals()[sys.argv[1]])
