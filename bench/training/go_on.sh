#!/usr/bin/env bash
# Train the demo checkpoint on, unattended: the trunk at 2,048 tokens (TUNE_S), at 8,192 tokens
# (LONG_S), then its drafter (DRAFTER_S); export, and ask the probes. A phase of 0 seconds is left
# out. A phase that fails leaves what it saved last, or else the weights before it.
#
#   CORPUS=CORPUS bench/training/go_on.sh OUT               # an H200: 24 minutes
#   TUNE_S=0 LONG_S=0 bench/training/go_on.sh OUT           # the drafter alone: 6 minutes
#   DEVICE=cpu TUNE_S=60 LONG_S=60 DRAFTER_S=20 bench/training/go_on.sh OUT     # to try it on a CPU
#
# CORPUS: folder of model/training/corpus.py's output; without it nothing learns prose, so that the
# trunk is trained only on a CPU. PYTHON: one with torch, numpy, safetensors, tokenizers, msgpack,
# xxhash, rich, pillow and matplotlib; default .venv/bin/python, else python3. FOLDER: the
# checkpoint to go on from, configs/models/demo. CASES: of each probe's cell, 50. OUT gets
#   checkpoint.tar   the files of the new checkpoint that differ from FOLDER's, its curves included
#   tuned.tar        the same as it was before the 8,192 tokens, without a drafter
#   p11.json, p11.png, figures.txt (all probes), run.log, and work/ with each phase's weights
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -eq 1 ] || { sed -n '2,/^set/p' "$0" | sed '$d;s/^# \?//'; exit 2; }

out=$1
folder=${FOLDER:-configs/models/demo}
tune_s=${TUNE_S:-880} long_s=${LONG_S:-170} drafter_s=${DRAFTER_S:-260} cases=${CASES:-50}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
device=${DEVICE:-cuda}
corpus=${CORPUS:+--corpus "$CORPUS"}
short="--length 2048 --batch 32 --pictures 4 --workers 6"
long="--length 8192 --batch 8 --pictures 16 --workers 6"
anchors=4096 prompts=6 probes="P1 P2 P3 P4 P5 P6 P7 P8 P9 P10 P12 P13"
if [ "$device" = cpu ]; then
    short="--length 384 --batch 1 --pictures 1" long="--length 768 --batch 2 --pictures 1"
    anchors=64 prompts=1 cases=1 probes="P8 P12"
fi
[ "$tune_s$long_s" = 00 ] || [ -n "$corpus" ] || [ "$device" = cpu ] ||
    { echo "TUNE_S and LONG_S need CORPUS" >&2; exit 2; }

mkdir -p "$out/work"
out=$(cd "$out" && pwd)
work=$out/work
exec > >(tee "$out/run.log") 2>&1
if ! "$python" -c 'import headrace.model' 2>/dev/null; then  # not installed: through links
    make --no-print-directory build/ns VENV=.
    export PYTHONPATH=$PWD/build/ns${PYTHONPATH:+:$PYTHONPATH}
fi
"$python" -c '
import importlib.util as u, sys
lack = [m for m in "torch numpy safetensors tokenizers msgpack xxhash rich PIL matplotlib".split() if not u.find_spec(m)]
sys.exit("missing Python packages: " + " ".join(lack) if lack else 0)'
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
began=$SECONDS
say() { echo "== $((SECONDS - began)) s: $*"; }

weights=$folder
train() { # NAME ARGUMENTS: go on from $weights
    local name=$1
    shift
    # shellcheck disable=SC2086  # corpus is words
    "$python" -m headrace.model.training.train --config "$folder/config.json" --device "$device" \
        $corpus --resume "$weights" --out "$work/$name" "$@" || say "$name FAILED"
}
trunk() { # NAME SECONDS ARGUMENTS: the real choice of entries from the first step on
    local name=$1 seconds=$2
    shift 2
    say "$name, $seconds s"
    train "$name" --steps 100000 --fit-seconds "$seconds" --seconds $((seconds + 20 * (seconds > 20))) \
        --select-from 0 --save-every 500 "$@"
    [ ! -f "$work/$name/weights-0.safetensors" ] || weights=$work/$name
}
export_to() { # NAME ARGUMENTS: work/NAME and OUT/NAME.tar
    local name=$1
    shift
    "$python" -m headrace.model.training.export --config "$folder/config.json" \
        --weights "$weights" --out "$work/$name" "$@"
    (cd "$work/$name" && for file in *; do cmp -s "$file" "$OLDPWD/$folder/$file" || echo "$file"; done) \
        > "$work/$name.changed"
    tar -C "$work/$name" -cf "$out/$name.tar" -T "$work/$name.changed"
    say "$name, changed: $(tr '\n' ' ' < "$work/$name.changed")"
}

# shellcheck disable=SC2086  # sizes are words
if [ "$tune_s" != 0 ]; then
    trunk tune "$tune_s" $short --round-from 0.5 --rate 0.6 --seed 2 \
        --mix recall=0.4 chat=0.2 --long-recall 0.6
    export_to tuned
fi
# shellcheck disable=SC2086
if [ "$long_s" != 0 ]; then
    trunk long "$long_s" $long --round-from 0 --rate 0.15 --seed 3 \
        --mix recall=0.4 chat=0.15 --long-recall 0.8
fi
asking=()
if [ "$tune_s$long_s" != 00 ]; then  # the answers do not depend on the drafter
    export_to trunk
    for probe in $probes; do
        nice "$python" bench/probes/run.py --engine --model "$work/trunk" --cases "$cases" \
            --probes "$probe" > "$work/asked-$probe.txt" 2>&1 &
        asking+=($!)
    done
fi
drafter=()
# shellcheck disable=SC2086
if [ "$drafter_s" != 0 ]; then
    say "the drafter, $drafter_s s"
    train drafter $short --seed 4 --mix stories=0.2 chat=0.2 --stop-at 0 --steps 1 \
        --drafter-seconds "$drafter_s" --drafter-anchors $anchors
    [ ! -f "$work/drafter/drafter.safetensors" ] ||
        drafter=(--drafter "$work/drafter/drafter.safetensors")
fi
say "export"
export_to checkpoint ${drafter[@]+"${drafter[@]}"}
say "P11: drafts kept, and calibration"
"$python" bench/probes/drafts.py "$work/checkpoint" --prompts $prompts --json "$out/p11.json" \
    --image "$out/p11.png" | tee "$out/figures.txt" || say "P11 FAILED"
for pid in ${asking[@]+"${asking[@]}"}; do wait "$pid" || say "a probe FAILED"; done
for probe in $probes; do
    [ ! -f "$work/asked-$probe.txt" ] || cat "$work/asked-$probe.txt"
done | tee -a "$out/figures.txt"
say "done"
