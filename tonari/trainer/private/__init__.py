"""What of torch's insides we use: every name that torch's documentation does not promise.

Nothing else of ours imports a private module of torch or patches it
(`tests/trainer/test_private.py` finds what does). Each module says what it takes, why, and what
public interface would replace it. All of it was run on torch 2.11 and 2.13; the test imports each
name on whatever torch is installed. The data layer takes one name, in a file of its own
(``dataio/batch/feed.py``), as it works without the trainer and on older torch.
"""
