"""Read a file on a node of a lab, evicted first or as it is; report how long, and what was seen.

Arguments: file, ``evict`` or ``keep``. It says "ready", and reads when a line comes.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

from tonari.bench.storage.site.evidence import Watch, judge
from tonari.bench.storage.site.site import describe_site


def main() -> None:
    path = Path(sys.argv[1])
    site = describe_site(path)
    digest, num_bytes = hashlib.blake2b(), 0
    with Watch([path], site, cold=sys.argv[2] == "evict") as watch:
        print("ready", flush=True)
        sys.stdin.readline()
        started = time.monotonic()
        with open(path, "rb", buffering=0) as file:
            while data := file.read(1 << 20):
                digest.update(data)
                num_bytes += len(data)
        ended = time.monotonic()
    verdict = judge(watch.evidence(num_bytes), site)
    report = {
        "digest": digest.hexdigest(),
        "started": started,
        "ended": ended,
        "state": verdict.state,
        "why": verdict.why,
        "filesystem": site.name,
        "server": site.mount.server,
        "is_shared": site.is_shared,
        "device": path.stat().st_dev,
        "inode": path.stat().st_ino,
    }
    print(json.dumps(report), flush=True)


main()
