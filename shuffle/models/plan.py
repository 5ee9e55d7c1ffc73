"""Which two replicas exchange their models in a round, and when that is cheaper than rows."""

from dataio.base.permutation import permute, unpermute
from dataio.base.seeding import key


def partner_of(replica: int, *, num_replicas: int, seed: int, round_number: int) -> int | None:
    """Find the replica that this one exchanges models with.

    Replicas are shuffled and paired in that order, so that every matching is equally likely, on
    one node or on two. Time and memory do not depend on the number of replicas beyond 64.

    Returns:
        The partner, whose partner is ``replica``. None for the one that an odd number leaves over:
        each is as likely to be it.

    Raises:
        ValueError: If replica lies outside [0, num_replicas).
    """
    order = key(seed, "model partners", step=round_number)
    # Places 0 and 1 are a pair, then 2 and 3, and so on
    place = int(unpermute(replica, num_replicas, order)) ^ 1
    return int(permute(place, num_replicas, order)) if place < num_replicas else None


def equal_exchange(round_bytes: int, *, share_bytes: int, rounds_per_epoch: float = 1.0) -> float:
    """Compute which fraction of rows costs as many bytes an epoch as exchanging models does.

    Exchanging models is the cheaper one where ``Partial`` would need a larger fraction than this
    to train as well; above 1 it never is.

    Args:
        round_bytes: What a replica sends a round, ``ModelExchange.round_bytes``.
        share_bytes: Bytes of a replica's share of the dataset, > 0.
        rounds_per_epoch: Rounds in the steps of an epoch.

    Raises:
        ValueError: If share_bytes is not above 0.
    """
    if share_bytes <= 0:
        raise ValueError(
            f"equal_exchange: share_bytes is {share_bytes}, expected the bytes of a replica's rows"
        )
    return round_bytes * rounds_per_epoch / share_bytes
