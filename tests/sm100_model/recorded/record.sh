#!/bin/sh
# Records what sm90_common prints on the GPU of this machine: every case in a process of its own, since a fault ends the
# process, twelve at a time, gathered in order under a header that says where it comes from.
# usage: record.sh PROGRAM > h200_sm90_common.txt
set -eu
program=$1
cases=$(mktemp -d)
trap 'rm -r "$cases"' EXIT
echo "# What sm90_common printed on a Hopper GPU, one process per case. Recorded $(date -u +%Y-%m-%d)."
name_and_driver=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)
echo "# nvidia-smi (name, driver): $name_and_driver"
echo "# Compiled with: nvcc -std=c++17 -O1 -fmad=false -gencode arch=compute_90a,code=sm_90a sm90_common.cu"
echo '# "stopped" is a fault reported by the driver; the line before says which. "raw" lines are the 1024 bytes'
echo "# of shared memory where the box above landed (ee: untouched)."
"$program" --header 0
# shellcheck disable=SC2016 # the inner shell expands its own arguments
one='timeout 20 "$1" --only "$2" > "$3/$2" 2>&1 || echo "# exit status $? of case $2" >> "$3/$2"'
seq 0 199 | xargs -P 12 -I{} sh -c "$one" sh "$program" {} "$cases"
for i in $(seq 0 199); do cat "$cases/$i"; done
