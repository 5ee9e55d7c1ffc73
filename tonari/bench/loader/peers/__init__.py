"""One program each: a loader in the settings that its own documentation recommends.

A program runs in the interpreter that has its packages and sees only `tonari.bench.loader.sets` and
`tonari.bench.loader.peers.harness`, so it needs nothing of Tonari.
"""
