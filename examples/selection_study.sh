#!/usr/bin/env bash
# Train every point of the phase diagram: noise x duplicates, each in a directory of its own. Cells
# that are there are not trained again: kill it when you like, and run it once more. 12 seeds at the
# three main points, 4 at the six others: some eleven hours of one core. Then ten mixtures on which
# nothing was chosen, to judge `Auto` by: an hour or so.
#
#   bash examples/selection_study.sh [DIRECTORY [SECTION.KEY=VALUE ...]]
set -euo pipefail

out=${1:-runs/selection}
study=$(dirname "$0")/selection_study.toml
kept=$(dirname "$0")/../docs/results/selection.tar.xz
if [[ ! -d $out ]]; then
    mkdir -p "$out"
    tar -C "$out" -xJf "$kept"
fi

point() {
    local name=$1 seeds=$2 noise=$3 duplicates=$4
    shift 4
    echo "== $name: noise $noise, duplicates $duplicates, $seeds seeds"
    tonari ablate "$study" --out "$out/$name" --seeds "$seeds" --jobs "${JOBS:-auto}" \
        "data.noise=$noise" "data.duplicates=$duplicates" "$@"
}

point noise40 12 0.4 0.0 "${@:2}"
point clean 12 0.0 0.0 "${@:2}"
point duplicates90 12 0.0 0.9 "${@:2}"
point noise20 4 0.2 0.0 "${@:2}"
point duplicates50 4 0.0 0.5 "${@:2}"
point noise20-duplicates50 4 0.2 0.5 "${@:2}"
point noise20-duplicates90 4 0.2 0.9 "${@:2}"
point noise40-duplicates50 4 0.4 0.5 "${@:2}"
point noise40-duplicates90 4 0.4 0.9 "${@:2}"

held_back() {
    local name=$1
    shift
    echo "== held back: $name"
    tonari ablate "$study" --out "$out/held-back/$name" --jobs "${JOBS:-auto}" \
        --only 'full, *' --only 'random 0.5, 0.5 *' --only 'averaged weights, 0.25 *' \
        --only 'keep agreed, half' --only 'auto, half' \
        study.first_seed=20 study.seeds=4 "$@"
}

held_back noise10 data.noise=0.1 "${@:2}"
held_back noise30 data.noise=0.3 "${@:2}"
held_back noise15-duplicates70 data.noise=0.15 data.duplicates=0.7 "${@:2}"
held_back duplicates75 data.noise=0.0 data.duplicates=0.75 "${@:2}"
held_back junk30 data.noise=0.0 data.junk=0.3 "${@:2}"
held_back junk15-noise15 data.noise=0.15 data.junk=0.15 "${@:2}"
held_back imbalance10 data.noise=0.0 data.imbalance=10 "${@:2}"
held_back noise30-imbalance10 data.noise=0.3 data.imbalance=10 "${@:2}"
# Imbalance made `Auto` hide right labels until each class weighed as much: two more that are fresh.
held_back imbalance20 data.noise=0.0 data.imbalance=20 study.first_seed=30 "${@:2}"
held_back noise20-imbalance5 data.noise=0.2 data.imbalance=5 study.first_seed=30 "${@:2}"
