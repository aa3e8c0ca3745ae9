"""CUDA C++ to machine code with NVRTC, a library that needs no GPU (pip install nvidia-cuda-nvrtc)."""

import ctypes
import functools
import os
import sys
from pathlib import Path

from .. import build

INCLUDE = Path(__file__).parent / "include"
SHARED = Path(__file__).parents[1] / "msl" / "include"  # of which CUDA has what is plain C++
# As Metal's safe math: subnormal floats are flushed to zero, products and sums are contracted.
FLAGS = ("--std=c++17", "--device-as-default-execution-space", "--ftz=true", "--disable-warnings")


class CompileError(RuntimeError):
    """A translated shader that NVRTC refuses; the message is its log."""


def candidates() -> list[str]:
    """Where libnvrtc may lie: in wheels, in a toolkit, or on the loader's path."""
    folders = [Path(entry) / "nvidia" for entry in sys.path if entry]
    found = [str(path) for folder in folders for path in sorted(folder.glob("**/libnvrtc.so.1[0-9]"))]
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    found += [str(path) for path in sorted(toolkit.glob("lib64/libnvrtc.so.1[0-9]"))]
    return [*found, "libnvrtc.so.13", "libnvrtc.so.12"]


@functools.cache
def library() -> ctypes.CDLL:
    for path in candidates():
        try:
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins))  # which NVRTC would look for on the loader's path alone
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CompileError("NVRTC was not found: pip install nvidia-cuda-nvrtc")


@functools.cache
def version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def identity() -> str:
    """Of all that a program's code depends on beside the program."""
    headers = build.files_digest(*INCLUDE.iterdir(), *SHARED.glob("*.h"))
    return build.digest(headers, FLAGS, version())


def text(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library(), f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def compile_program(code: str, architecture: str = "sm_90", options: tuple = ()) -> tuple[bytes, str]:
    """(machine code, PTX) of a CUDA program that includes the headers of this folder."""
    program = ctypes.c_void_p()
    library().nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"program.cu", 0, None, None)
    flags = [
        flag.encode() for flag in (*FLAGS, f"-arch={architecture}", f"-I{INCLUDE}", f"-I{SHARED}", *options)
    ]
    try:
        failed = library().nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        if failed:
            raise CompileError(text(program, "ProgramLog").decode(errors="replace").rstrip("\0\n"))
        return text(program, "CUBIN"), text(program, "PTX").decode().rstrip("\0")
    finally:
        library().nvrtcDestroyProgram(ctypes.byref(program))
