"""Whether torch can compile here.

Why: without a C++ compiler `torch.compile` fails in the first step, after data was staged. Public
instead: none.
"""

import sys


def find_cpp_compiler() -> str:
    """Find the compiler that torch would call.

    Raises:
        FileNotFoundError: If there is none.
    """
    # Only now: it is slow to import.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return str(get_cpp_compiler())
    except InvalidCxxCompiler as error:
        raise FileNotFoundError("no C++ compiler") from error


def is_compiler_imported() -> bool:
    """Whether something has imported what compiles."""
    return "torch._dynamo" in sys.modules
