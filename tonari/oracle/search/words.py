"""Why one configuration is slower than another, in a sentence. Pure."""

from collections.abc import Mapping

NAMES = {
    "computation": "computation",
    "recomputation": "computing activations again",
    "swap": "copies of activations to the host's memory and back",
    "bubble": "idle ranks of the pipeline",
    "tp": "messages of tp",
    "cp": "messages of cp",
    "dp": "gathering parameters and reducing gradients",
    "pp": "sends between stages",
    "update": "the optimizer's update",
    "offload": "copies from and to the host's memory",
    "compute": "computation",
    "rest of the exchange": "the rest of the exchange",
    "exchange": "rows on their way",
    "decoding": "decoding rows",
    "node disk": "reading rows from the node's disk",
    "windows": "reading rows beyond the quota",
    "epoch end": "the end of the epoch",
    "refresh": "scoring hidden rows",
    "evaluation": "the evaluation",
    "checkpoint": "the checkpoint",
}
"""Of parts that were priced and of such as were simulated, whose others are waited for."""


def why_slower(parts_s: Mapping[str, float], best_s: Mapping[str, float]) -> str:
    """Name the part of a step that grew most against the best one's; empty: it is as fast.

    Args:
        parts_s: Of the slower configuration, by its names.
        best_s: Of the best one.
    """
    slower_s = sum(parts_s.values()) - sum(best_s.values())
    name, grew_s = max(
        ((name, seconds - best_s.get(name, 0.0)) for name, seconds in parts_s.items()),
        key=lambda part: part[1],
    )
    if slower_s <= 1e-8 * sum(best_s.values()) or grew_s <= 0:
        return ""
    before_s = best_s.get(name, 0.0)
    words = NAMES.get(name, f"waiting for {name.replace('_', '-')}")
    return (
        f"It takes {_words(slower_s)} longer, above all for {words}: {_words(parts_s[name])} "
        f"in place of {_words(before_s)}."
    )


def _words(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
