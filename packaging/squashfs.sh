#!/bin/bash
# Packs an environment of Python into one file, so that a start reads one file of the shared
# filesystem instead of thousands.
#
#   packaging/squashfs.sh pack ENVIRONMENT IMAGE      # once, anywhere; needs mksquashfs
#   packaging/squashfs.sh mount IMAGE ENVIRONMENT     # on each node, in the job; needs squashfuse
#   packaging/squashfs.sh unmount ENVIRONMENT
#
# Mount it where it was made: the programs of an environment name their Python by its path. So make
# it under a path that each node has of its own, such as /tmp/tonari-env.
set -eu

case ${1:-} in
  pack)
    environment=${2:?give the environment: a directory with bin/python}
    image=${3:?give the image to write}
    "$environment/bin/python" -m compileall -q "$environment" || true # files of other versions
    mksquashfs "$environment" "$image" -noappend -no-progress -comp zstd -all-root
    ;;
  mount)
    image=${2:?give the image}
    environment=${3:?give the directory at which it was made}
    mkdir -p "$environment"
    squashfuse -o ro "$image" "$environment"
    ;;
  unmount)
    fusermount -u "${2:?give the directory at which it is mounted}"
    ;;
  *)
    echo "squashfs.sh: '${1:-}' is not a command, expected pack, mount or unmount" >&2
    exit 2
    ;;
esac
