#!/bin/sh
# One command for the first person with a Blackwell GPU: every GEMM instance against integers (when the device opens),
# layers of several shapes and batch sizes stage by stage against the definition, then the benchmark. All of it goes to
# one report to send back; a failure names backend, shape and tokens, and does not stop the others.
#
#   blackwell_selftest.sh [COMMAND [BACKEND [REPORT]]]        default: megamoe sm100 blackwell_report.txt
#
# SHAPES and TOKENS replace the lists below; SHAPES is one "megamoe synth" shape per line.
command=${1:-megamoe}
backend=${2:-sm100}
report=${3:-blackwell_report.txt}
shapes=${SHAPES:-"tiny
H=480,I=336,E=3,K=2
v4-flash --experts 0:32 --layers 1
v4-pro --experts 0:48 --layers 1"}
tokens=${TOKENS:-"1 2 7 8 9 31 33 64 100 129 500"}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
checked=0
: > "$report"

# Output to the report; the exit status is the command's.
record() {
    echo "\$ $*" >> "$report"
    "$@" >> "$report" 2>&1
}

record "$command" doctor --json
if command -v nvidia-smi > /dev/null; then record nvidia-smi -q; fi
echo "$shapes" > "$work/shapes"
while read -r shape; do
    rm -rf "$work/model"
    # A shape is a word and perhaps options.
    # shellcheck disable=SC2086
    if ! record "$command" synth --shape $shape "$work/model"; then
        echo "FAIL: synth $shape"
        failed=$((failed + 1))
        continue
    fi
    for count in $tokens; do
        checked=$((checked + 1))
        record "$command" check "$work/model" --layer 0 --tokens "$count" --backend "$backend" \
            --activations nvfp4 && continue
        echo "FAIL: backend $backend, shape $shape, $count tokens; the report says where"
        failed=$((failed + 1))
    done
    case $backend in
    sm100-model) ;; # a model has no speed
    *) record "$command" bench "$work/model" --layer 0 --backend "$backend" --tokens 1,8,64,512,2048 --json ;;
    esac
done < "$work/shapes"
echo "$checked layers checked, $failed failed; send back $report"
[ "$failed" -eq 0 ]
