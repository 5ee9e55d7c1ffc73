"""One thread at a time reads the header of an `.npy`.

The header is a Python literal, and CPython 3.11 may fail with a SystemError ("AST constructor
recursion depth mismatch") when another thread comes in while one is being parsed.
"""

import threading

NPY_LOCK = threading.Lock()
