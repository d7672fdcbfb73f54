"""Threads that load Triton's launchers at the same time each get the one they asked for."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime import build

from tether.models.fast.kernels.warm_up import keep_launchers_apart

# What a launcher of Triton 3.6 is to Python: a module without a state of its own (-1), under a name that all of them have.
LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&definition); }
"""


def launched(number: int) -> int:
    return int(build.compile_module_from_src(LAUNCHER % number, "__triton_launcher").launch())


def test_each_thread_gets_the_launcher_it_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path)  # so that it is put back
    keep_launchers_apart()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns at every chance
    try:
        with ThreadPoolExecutor(16) as pool:
            numbers = [n % 4 for n in range(2000)]
            assert list(pool.map(launched, numbers)) == numbers
    finally:
        sys.setswitchinterval(interval)
