"""Hold the multiprocessors (SMs) of a GPU with a kernel that waits for a word of the host.

The kernel stands for a foreign kernel that waits for a peer, such as a collective of NCCL. A block
requests all shared memory of an SM, so no other block has room there. Kernel and launch use the
CUDA driver directly, because the package must not know of them.
"""

import contextlib
import ctypes
import time

MOST_SMS = 512
# Words of the host: of all blocks, then one of each SM in two arrays.
RELEASE, MAY_LEAVE, EXPIRED, STATE, IS_FREE = 0, 1, 2, 4, 4 + MOST_SMS
NUM_WORDS = IS_FREE + MOST_SMS
STARTED, LEFT = 1, 2

# hold: a block on a free SM waits for MAY_LEAVE, any other block for RELEASE, and at most `limit`
# nanoseconds. pair: a cluster of two blocks stores the SMs that it runs on, which are of one GPC.
PTX = f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry hold(.param .u64 words, .param .u64 limit)
{{
  .reg .pred %p<4>;
  .reg .b32 %r<6>;
  .reg .b64 %d<6>;
  ld.param.u64 %d1, [words];
  ld.param.u64 %d2, [limit];
  mov.u64 %d3, %globaltimer;
  add.u64 %d2, %d2, %d3;
  mov.u32 %r1, %smid;
  mul.wide.u32 %d4, %r1, 4;
  add.u64 %d4, %d1, %d4;
  ld.volatile.global.u32 %r2, [%d4 + {4 * IS_FREE}];
  setp.ne.u32 %p1, %r2, 0;
  selp.u64 %d5, {4 * MAY_LEAVE}, {4 * RELEASE}, %p1;
  add.u64 %d5, %d1, %d5;
  st.volatile.global.u32 [%d4 + {4 * STATE}], {STARTED};
WAIT:
  ld.volatile.global.u32 %r3, [%d5];
  setp.ne.u32 %p2, %r3, 0;
  @%p2 bra LEAVE;
  nanosleep.u32 200;
  mov.u64 %d3, %globaltimer;
  setp.lt.u64 %p3, %d3, %d2;
  @%p3 bra WAIT;
  st.volatile.global.u32 [%d1 + {4 * EXPIRED}], 1;
LEAVE:
  st.volatile.global.u32 [%d4 + {4 * STATE}], {LEFT};
  ret;
}}
.visible .entry pair(.param .u64 words) .explicitcluster .reqnctapercluster 2, 1, 1
{{
  .reg .b32 %r<3>;
  .reg .b64 %d<3>;
  ld.param.u64 %d1, [words];
  mov.u32 %r1, %ctaid.x;
  mul.wide.u32 %d2, %r1, 4;
  add.u64 %d1, %d1, %d2;
  mov.u32 %r2, %smid;
  st.volatile.global.u32 [%d1], %r2;
  barrier.cluster.arrive;
  barrier.cluster.wait;
  ret;
}}
"""

# Of the driver's API.
_NUM_SMS, _MOST_SHARED_BYTES = 16, 97  # CUdevice_attribute
_DYNAMIC_SHARED_BYTES = 8  # CUfunction_attribute
_MAPPED, _NON_BLOCKING = 2, 1


class Holder:
    """The kernel on one GPU.

    Args:
      ordinal: the GPU, as the driver numbers the visible GPUs.
      limit: seconds after which a block ends without a release.
    """

    def __init__(self, ordinal, limit):
        self._limit, self._cuda = limit, ctypes.CDLL("libcuda.so.1")
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._device = device
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.num_sms, self._shared_bytes = (
            self._attribute(which) for which in (_NUM_SMS, _MOST_SHARED_BYTES)
        )
        assert self.num_sms <= MOST_SMS
        with self._current():
            self._prepare()
            pair = self._two_of_a_gpc()
        self._sms = pair + [sm for sm in range(self.num_sms) if sm not in pair]
        self.free = []

    def _prepare(self):
        module, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        host, on_device = ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuModuleLoadData", ctypes.byref(module), PTX.encode())
        self._kernels = {name: ctypes.c_void_p() for name in ("hold", "pair")}
        for name, kernel in self._kernels.items():
            self._call("cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
            self._call("cuFuncSetAttribute", kernel, _DYNAMIC_SHARED_BYTES, self._shared_bytes)
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        # The priority of the exchanges' stream, so that held SMs do not come from a lower priority.
        self._call(
            "cuStreamCreateWithPriority", ctypes.byref(self._stream), _NON_BLOCKING, greatest
        )
        self._call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(4 * NUM_WORDS), _MAPPED)
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(on_device), host, 0)
        self._words = (ctypes.c_uint32 * NUM_WORDS).from_address(host.value)
        self._host, self._words_on_device = host, on_device

    def _two_of_a_gpc(self):
        self._launch("pair", 2)
        self._call("cuStreamSynchronize", self._stream)
        return sorted(self._words[:2])

    @contextlib.contextmanager
    def holding(self, num_free, *, blocks=None):
        """Hold all SMs except `num_free` until `release`, or the end of the block.

        Two free SMs or more include two SMs of one GPC. Without `blocks`, the GPU must be idle, and
        the SMs are held when the block begins. Otherwise so many blocks are queued, which take SMs
        as the SMs become free.
        """
        self._words[:] = [0] * NUM_WORDS
        self.free = self._sms[:num_free]
        for sm in self.free:
            self._words[IS_FREE + sm] = 1
        self._words[MAY_LEAVE] = int(blocks is not None)
        with self._current():
            self._launch("hold", blocks or self.num_sms, ctypes.c_uint64(int(self._limit * 1e9)))
        try:
            if blocks is None:
                self._await(STARTED, range(self.num_sms))
                self._words[MAY_LEAVE] = 1
                self._await(LEFT, self.free)
            yield self
        finally:
            self.release()
            with self._current():
                self._call("cuStreamSynchronize", self._stream)

    def release(self):
        """Let all blocks end."""
        self._words[RELEASE] = 1

    @property
    def held(self):
        """The SMs that the kernel holds, or has held since the block began."""
        states = self._words[STATE : STATE + self.num_sms]
        return [sm for sm, state in enumerate(states) if state and sm not in self.free]

    @property
    def has_expired(self):
        """Return True if a block has ended without a release."""
        return bool(self._words[EXPIRED])

    def close(self):
        """Free the memory. No later call is allowed."""
        with self._current():
            self._call("cuMemFreeHost", self._host)
            self._call("cuStreamDestroy_v2", self._stream)
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _await(self, state, sms):
        end = time.monotonic() + 5
        while any(self._words[STATE + sm] < state for sm in sms):
            assert time.monotonic() < end, "the kernel has not started on all SMs: is the GPU idle?"
            time.sleep(1e-4)

    def _launch(self, name, blocks, *more):
        arguments = (self._words_on_device, *more)
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        shape = (blocks, 1, 1, 32, 1, 1, self._shared_bytes)
        self._call("cuLaunchKernel", self._kernels[name], *shape, self._stream, pointers, None)

    def _attribute(self, which):
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, self._device)
        return value.value

    @contextlib.contextmanager
    def _current(self):
        """Make the GPU's context current in this thread."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name, *arguments):
        error = getattr(self._cuda, name)(*arguments)
        assert error == 0, f"{name} returned {error}"
