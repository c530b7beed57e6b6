#!/usr/bin/env bash
# The main job on the example in the repository: look into two real NVFP4 checkpoints, run a layer of each on
# captured hidden states, and check every stage against the definition.
set -euo pipefail

megamoe=$(realpath "${1:-build}/megamoe")
cd "$(dirname "$0")/.."
fixtures=tests/fixtures
output=$(mktemp -d)
trap 'rm -rf "$output"' EXIT

show() {
    printf '\n$ megamoe %s\n' "$*"
    "$megamoe" "$@"
}

for checkpoint in qwen3-modelopt deepseek-v4-modelopt; do
    show inspect "$fixtures/$checkpoint"
    show run "$fixtures/$checkpoint" --layer 1 --input "$fixtures/$checkpoint/captures/layer_1.safetensors" \
        --output "$output/$checkpoint.safetensors"
    show check "$fixtures/$checkpoint" --activations nvfp4
done
show bench --shape tiny --tokens 1,8,64
