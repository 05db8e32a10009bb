"""The compiled CPU library (``csrc/``): loaded where it was built, else why not. Nothing needs it.

It is built with the package where there is a compiler. It knows nothing of torch, nor of Python: pointers go in, and
threads are those of the OpenMP runtime that torch has loaded already.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path

import torch  # loads the OpenMP runtime

VERSION = 4  # of csrc/kvq.h
ISAS = ("portable", "AVX2", "AVX-512BW", "AVX-512-VNNI")

# A wheel without the library, built where there was no compiler, may lie in pip's cache.
_FIX = "install kvquant from a wheel, or again where there is g++ (pip's --force-reinstall --no-deps --no-cache-dir)"
_FOLDER = Path(__file__).parent
_WORD, _ADDRESS = ctypes.c_int64, ctypes.c_void_p
_FUNCTIONS = {  # all of which return a word
    "kvq_version": [],
    "kvq_best": [],
    "kvq_attention": [_ADDRESS, _ADDRESS, _ADDRESS, _WORD, _ADDRESS, _ADDRESS, _ADDRESS, _WORD, _WORD],
    "kvq_encode": [_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _WORD, _WORD],
    "kvq_decode": [_ADDRESS, _ADDRESS, _ADDRESS, _WORD, _WORD],
}


def library() -> ctypes.CDLL | None:
    """The library; None where it is missing."""
    return _found()[0]


def missing() -> str:
    """Why there is no library and how to have one, as a part of a sentence; nothing if there is."""
    found, why = _found()
    return f"no compiled library ({why}); to have it, {_FIX}" if found is None else ""


@lru_cache(maxsize=1)
def isa() -> int:
    """The best instruction set of this machine that the library has code for: an index of `ISAS`."""
    found = library()
    return 0 if found is None else int(found.kvq_best())


def at_hand(device: torch.device) -> bool:
    """Whether the library can work on a device. The first time that a CPU has to do without, it is logged."""
    if device.type != "cpu":
        return False
    if library() is None:
        _tell()
        return False
    return True


@lru_cache(maxsize=1)
def _found() -> tuple[ctypes.CDLL | None, str]:
    why = "it was not built"
    for path in sorted(_FOLDER.glob("_native*")):
        try:
            found = ctypes.CDLL(str(path))
            for name, arguments in _FUNCTIONS.items():
                function = getattr(found, name)
                function.argtypes, function.restype = arguments, _WORD
            if found.kvq_version() == VERSION:
                return found, ""
            why = f"{path.name} is of another release"
        except OSError as error:
            why = f"{path.name} does not load: {error}"
        except AttributeError:  # a function is not there
            why = f"{path.name} is of another release"
    return None, why


@lru_cache(maxsize=1)
def _tell() -> None:
    # Logged, not warned of: where warnings are errors, what is optional must not become needed.
    logging.getLogger("kvquant").warning("kvquant attends and encodes in plain torch, which is slower: %s", missing())
