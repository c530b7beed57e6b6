#!/bin/sh
# Whole layers of checkpoints, judged stage by stage against the definition while their kernels run on the functional
# model: the trained fixtures, then random weights in the shapes of V4-Flash and V4-Pro (few experts, all of K).
#   check_layers.sh COMMAND FIXTURES
set -e
command=$1
fixtures=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

check() {
    echo "megamoe check $*"
    "$command" check "$@" --backend sm100-model --activations nvfp4 > "$work/report" || { cat "$work/report"; exit 1; }
    # The check must have been of this backend, on nvfp4, not of whatever else could run.
    grep -q "functional model" "$work/report" || { cat "$work/report"; exit 1; }
}

check "$fixtures/qwen3-modelopt" --tokens 24
check "$fixtures/qwen3-modelopt" --tokens 1 --layer 1
check "$fixtures/qwen3-compressed-tensors" --tokens 9 --routing-weight before
"$command" synth --shape tiny --format mxfp4 "$work/tiny"
check "$work/tiny" --tokens 12 --layer 0
"$command" synth --shape H=96,I=80,E=3,K=2 "$work/odd"
check "$work/odd" --tokens 33 --layer 0
check "$work/odd" --tokens 100 --layer 0 # 67 rows per expert: the large tiles, on pairs of CTAs
"$command" synth --shape v4-flash --experts 0:2 --layers 1 "$work/flash"
check "$work/flash" --tokens 5 --layer 0
"$command" synth --shape v4-pro --experts 0:1 --layers 1 "$work/pro"
check "$work/pro" --tokens 2 --layer 0
