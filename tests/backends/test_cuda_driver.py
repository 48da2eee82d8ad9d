"""What the CUDA driver is given, against its own header: a driver of ours that writes it down."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import threading
from pathlib import Path

import pytest

from support.cuda_on_cpu.library import cuda_headers, why_not
from tvr.backends.pycuda_raw.driver import Driver
from tvr.errors import KernelError

pytestmark = pytest.mark.skipif(
    why_not() is not None or not any((f / "cuda.h").is_file() for f in cuda_headers()),
    reason=why_not() or "needs cuda.h",
)

CODES = "PiqfP"
STREAM = 0x5EED
CUBIN = b"a cubin\0of ours"

#: Refuses kernels of other names, more than 1000 bytes of shared memory, and grids of 13 or whose
#: size is not the second parameter.
SOURCE = r"""
#include <cuda.h>
#include <cstdio>
#include <cstring>

static int loaded, kernel;
static char said[512];

extern "C" {
const char* last_launch() { return said; }

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  *module = reinterpret_cast<CUmodule>(&loaded);
  return memcmp(image, "a cubin\0of ours", 15) ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  if (module != reinterpret_cast<CUmodule>(&loaded)) return CUDA_ERROR_INVALID_HANDLE;
  *function = reinterpret_cast<CUfunction>(&kernel);
  return strcmp(name, "some_bf16") ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (function != reinterpret_cast<CUfunction>(&kernel)) return CUDA_ERROR_INVALID_HANDLE;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_NOT_FOUND;
  return value > 1000 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** params, void** extra) {
  const int size = *static_cast<int*>(params[1]);
  if (c->gridDimX == 13 || c->gridDimX != static_cast<unsigned>(size)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  CUlaunchAttribute wanted = {};
  wanted.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  wanted.value.programmaticStreamSerializationAllowed = 1;
  const bool as_wanted = f == reinterpret_cast<CUfunction>(&kernel) && extra == nullptr &&
                         c->numAttrs == 1 && memcmp(c->attrs, &wanted, sizeof(wanted)) == 0;
  snprintf(said, sizeof(said), "%d: %u %u %u, %u %u %u, %u on %p: %p %d %lld %g %p", as_wanted,
           c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
           c->sharedMemBytes, static_cast<void*>(c->hStream), *static_cast<void**>(params[0]),
           size, *static_cast<long long*>(params[2]), *static_cast<float*>(params[3]),
           *static_cast<void**>(params[4]));
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : nullptr;
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(SOURCE)
    headers = [f"-isystem{path}" for path in cuda_headers()]
    command = ["g++", "-shared", "-fPIC", *headers, "driver.cpp", "-o", "driver.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    return folder / "driver.so"


def load(library: Path, cubin: bytes = CUBIN, symbol: str = "some_bf16", shared_bytes: int = 1000):
    return Driver(str(library)).load(cubin, symbol, CODES, shared_bytes, STREAM)


def packed(size: int) -> bytes:
    return struct.pack("@" + CODES, 0xF00D, size, 1 << 40, 0.5, 0xBEEF)


def test_a_launch_is_what_the_header_says(library):
    load(library)((7, 2, 3), (128, 1, 1), 500, packed(7))
    said = ctypes.CDLL(str(library)).last_launch
    said.restype = ctypes.c_char_p
    wanted = b"1: 7 2 3, 128 1 1, 500 on 0x5eed: 0xf00d 7 1099511627776 0.5 0xbeef"
    assert said() == wanted


def test_a_kernel_is_launched_with_its_own_numbers_from_every_thread(library):
    launch, errors = load(library), []

    def work(size: int) -> None:
        try:
            for _ in range(2000):
                launch((size, 1, 1), (32, 1, 1), 0, packed(size))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(100 + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_launch_that_the_driver_refuses_is_an_error(library):
    launch = load(library)
    with pytest.raises(KernelError, match=r"^cuLaunchKernelEx failed: CUDA_ERROR_INVALID_VALUE"):
        launch((13, 1, 1), (32, 1, 1), 0, packed(13))
    launch((14, 1, 1), (32, 1, 1), 0, packed(14))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"cubin": b"of somebody else"}, r"cuModuleLoadData failed: an error .* \(200\)"),
        ({"symbol": "other_bf16"}, r"cuModuleGetFunction failed: an error .* \(500\)"),
        ({"shared_bytes": 1001}, r"cuFuncSetAttribute failed: CUDA_ERROR_INVALID_VALUE \(1\)"),
    ],
)
def test_a_kernel_that_the_driver_does_not_take_is_an_error(library, other, message):
    with pytest.raises(KernelError, match=message):
        load(library, **other)


def test_a_driver_that_is_not_there_is_an_error_that_says_what_to_set():
    with pytest.raises(KernelError, match=r"no-such-driver.*set pdl = false"):
        Driver("no-such-driver.so")
