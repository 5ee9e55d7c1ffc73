"""The same arithmetic on many tensors by one call.

Why: hundreds of small parameters would each cost a call of some microseconds. torch's optimizers
compute so. Public instead: none; the functions that they call have no public names.
"""

import torch

add_, copy_, lerp_ = torch._foreach_add_, torch._foreach_copy_, torch._foreach_lerp_
