#!/usr/bin/env bash
# Pack the text of the study and train it. Easy text: tiny Shakespeare. Hard but learnable: the source
# of Python's standard library, and its compiled bytecode. Half a megabyte of each to train on, the
# next 60 kB to test on. Another Python has another library, so other cells.
#
#   bash examples/text_study.sh tinyshakespeare.txt [DIRECTORY [SECTION.KEY=VALUE ...]]
set -euo pipefail

plays=$1
out=${2:-runs/text-study}
mkdir -p "$out/text"
python - "$plays" "$out/text" <<'PACK'
import marshal, sys, sysconfig
from pathlib import Path

plays, out = Path(sys.argv[1]), Path(sys.argv[2])
modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
source = [path.read_bytes() for path in modules]
compiled = [marshal.dumps(compile(text, "", "exec")) for text in source]
for name, text in (
    ("plays", plays.read_bytes()), ("source", b"".join(source)), ("bytecode", b"".join(compiled))
):
    (out / f"train-{name}.txt").write_bytes(text[:500_000])
    (out / f"test-{name}.txt").write_bytes(text[500_000:560_000])
PACK
tonari ablate "$(dirname "$0")/text_study.toml" --out "$out" --jobs "${JOBS:-1}" \
    "data.train=$out/text/train-*.txt" "data.test=$out/text/test-*.txt" "${@:3}"
